"""What an optimizer keeps of each parameter, and needs for a while in an update: tried on copies of them, one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from holdall.errors import Unsupported
from holdall.pipelines.running.undone import same_random
from holdall.runtime.budget.ledger import Ledger
from holdall.sharded import local_of
from holdall.updates.parts import Part, is_separable, snapshot

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
State = dict[str, Any]
NO_SHARES: Mapping[int, float] = MappingProxyType({})
_FEW = 64  # rows and columns that are tried for a ratio


class RuleNeeds(NamedTuple):
    """Of one parameter."""

    states: int
    large: int  # those of them that can be at the host
    passing: int  # for a while in an update
    left: int = 0  # those of them that are there until the update of the next parameter makes its own

    def part(self, share: float) -> RuleNeeds:
        return RuleNeeds(*(math.ceil(nbytes * share) for nbytes in self)) if share < 1 else self


class RuleBytes:
    """`together`: groups whose parameters are updated at once, each operation over all of them."""

    def __init__(
        self, rule: MakeOptimizer, parameters: Sequence[torch.nn.Parameter], shares: Mapping[int, float] = NO_SHARES
    ) -> None:
        """`shares`: the parts of parameters, by identity, that this rank will have, where these are not all of them."""
        made = rule(list(parameters))
        if not is_separable(made):
            raise Unsupported(
                f"{type(made).__name__} updates all parameters together, so what it keeps of each cannot be told",
                hint="use a rule that treats parameters separately, such as AdamW, or leave `budget` out",
            )
        trained = [p for group in made.param_groups for p in group["params"] if p.requires_grad]
        self._parameters = list({id(p): p for p in trained}.values())
        self._part, self._groups = Part(made, self._parameters), snapshot(made)
        self._of_group = self._part.by_group(range(len(self._parameters)))
        tried: dict[tuple[Any, ...], RuleNeeds] = {}
        self._each: dict[int, RuleNeeds] = {}  # by the parameter's identity
        for g, members in self._of_group.items():
            for n in members:
                p = self._parameters[n]
                key = (g, p.shape, p.stride(), p.dtype)
                if key not in tried:
                    tried[key] = self._try(n, made.state.get(p, {}))
                self._each[id(p)] = tried[key].part(shares.get(id(p), 1.0))

    def _try(self, n: int, there: State) -> RuleNeeds:
        """Updates of a copy. `there`: states that the rule made when it was made."""
        p = self._parameters[n]
        alone = self._updated(n, [local_of(p).detach()], there)
        part = tuple(slice(_FEW) for _ in p.shape)
        few = local_of(p).detach()[part]  # a rule in a loop holds what was made for the parameter before
        there = {k: local_of(v)[part] if _is_large(v) and v.shape == p.shape else v for k, v in there.items()}
        one, two = (self._updated(n, [few] * count, there) for count in (1, 2))
        left = max(0, two.passing - one.passing) / max(1, few.nbytes)
        return alone._replace(left=round(left * local_of(p).nbytes) if p.dim() > 1 else alone.passing)

    def _updated(self, n: int, values: Sequence[torch.Tensor], there: State) -> RuleNeeds:
        """Of two updates by gradients of zeros, together with as many values."""
        values = [v.clone() for v in values]
        grads = [torch.zeros_like(v) for v in values]
        states = [{k: local_of(v).clone() if isinstance(v, torch.Tensor) else v for k, v in there.items()} for _ in values]
        most = 0
        with same_random(values[0].device), torch.no_grad(), Ledger(seed=[*values, *grads]) as ledger:
            before = ledger.live
            for _ in range(2):
                ledger.restart()
                self._part.step(values, grads, states, self._groups, [n] * len(values))
                most = max(most, ledger.peak - before)
        kept = [t for state in states for t in state.values() if isinstance(t, torch.Tensor)]
        total = max(ledger.live - before, sum(t.nbytes for t in kept))
        return RuleNeeds(total, sum(t.nbytes for t in kept if _is_large(t)), max(0, most - total))

    def large(self, parameters: Sequence[torch.nn.Parameter]) -> int:
        """Bytes of states that can be at the host."""
        return sum(self._each[id(p)].large for p in parameters if id(p) in self._each)

    def on_device(self, placed: Collection[int]) -> tuple[int, int]:
        """(states on the device, the most that an update needs for a while besides). `placed`: parameters, by identity, whose
        states are at the host, and come one by one."""
        states, most = 0, 0
        for g, members in self._of_group.items():
            own = [id(self._parameters[n]) for n in members]
            stay = [self._each[key] for key in own if key not in placed]
            away = [self._each[key] for key in own if key in placed]
            states += sum(one.states for one in stay) + sum(one.states - one.large for one in away)
            before = [0, *(one.left for one in stay)]
            passing = [one.passing + left for one, left in zip(stay, before, strict=False)]
            together = sum(one.passing for one in stay) if self._is_together(g) else max(passing, default=0)
            most = max(most, together, *(one.large + one.passing for one in away), 0)
        return states, most

    def _is_together(self, g: int) -> bool:
        group = self._groups[g]
        on_gpu = any(self._parameters[n].is_cuda for n in self._of_group[g])
        return bool(
            group.get("foreach") or ("foreach" in group and group["foreach"] is None and not group.get("fused") and on_gpu)
        )


def _is_large(value: Any) -> bool:
    """Is it a state that can be at the host? Counters stay."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() > 0
