"""Groups parameters into units that move and are updated together, and measures their updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from holdall.tracing.recorder import Recorder
from holdall.tracing.timing.host_timing import seconds_per_element
from holdall.tracing.timing.op_timing import Trials, load_solvers
from holdall.tracing.values.known import KnownValues
from holdall.types import Block, Kind, Op, Phase, TensorInfo, Unit
from holdall.updates.parts import Part, clone_optimizer, snapshot


@dataclass(frozen=True, kw_only=True)
class Updating:
    """The fakes of an optimizer's parameters, by the first name of each."""

    optimizer: torch.optim.Optimizer
    values: Mapping[str, torch.Tensor]
    narrow: Mapping[str, torch.Tensor]  # the working copies, where they have a lower precision than the master
    sliced: bool  # in slices, as on a GPU, to save memory

    @property
    def is_on_gpu(self) -> bool:
        return any(v.device.type == "cuda" for v in self.values.values())

    def states(self, names: Sequence[str]) -> list[dict[str, Any]]:
        return [self.optimizer.state.get(self.values[n], {}) for n in names]

    def groups(self) -> dict[str, int]:
        """Parameter -> index of its group: equal shapes in different groups may be updated differently."""
        of = {id(p): n for n, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        return {name: of.get(id(value), -1) for name, value in self.values.items()}

    def update(self, names: Sequence[str], grads: Sequence[torch.Tensor]) -> None:
        """Update on the device, as the runtime does."""
        values = [self.values[n] for n in names]
        part = Part(self.optimizer, values)
        states, groups = self.states(names), snapshot(self.optimizer)
        narrow = [self.narrow[n].detach() for n in names] if all(n in self.narrow for n in names) else None
        part.update([v.detach() for v in values], grads, states, groups, range(len(names)), narrow=narrow, sliced=self.sliced)

    def on_host(self) -> Updating:
        """The same with everything on a CPU."""
        there = {id(v): v.detach().to("cpu") for v in self.values.values()}
        clone = clone_optimizer(self.optimizer, there, foreach=False)
        for value in self.values.values():
            state = self.optimizer.state.get(value, {})
            clone.state[there[id(value)]] = {k: v.to("cpu") if isinstance(v, torch.Tensor) else v for k, v in state.items()}
        narrow = {n: v.detach().to("cpu") for n, v in self.narrow.items()}
        return Updating(optimizer=clone, values={n: there[id(v)] for n, v in self.values.items()}, narrow=narrow, sliced=False)

    def seconds_on_host(self) -> dict[str, float]:
        """Seconds of the update of each parameter for which a sample gives them."""
        groups = self.groups()
        keys = {n: (groups[n], v.dtype, self.narrow.get(n, v).dtype) for n, v in self.values.items()}
        largest: dict[Any, str] = {}
        for n, key in keys.items():
            if key not in largest or self.values[n].numel() > self.values[largest[key]].numel():
                largest[key] = n
        rates = {key: seconds_per_element(self.optimizer, self.values[n], key[2]) for key, n in largest.items()}
        return {n: rate * self.values[n].numel() for n, key in keys.items() if (rate := rates[key]) is not None}


def group_parameters(names: Sequence[str], blocks: Sequence[Block]) -> dict[str, list[str]]:
    """Unit -> its parameters: by the block that contains them, otherwise by the module that owns them."""
    paths = {b.module for b in blocks}
    groups: dict[str, list[str]] = {}
    for name in names:
        owner = name.rpartition(".")[0]
        inside, path = "", owner
        while path:
            if path in paths:
                inside = path  # the outermost block wins
            path = path.rpartition(".")[0]
        groups.setdefault(inside or owner, []).append(name)
    return groups


def find_units(
    names: Sequence[str],
    blocks: Sequence[Block],
    ops: Sequence[Op],
    tensors: Mapping[int, TensorInfo],
    updating: Updating | None,
) -> tuple[Unit, ...]:
    """The units of the parameters `names` (each once). Call it under the mode that made the fakes of `updating`."""
    weights = {t.name: t.id for t in tensors.values() if t.kind is Kind.PARAM}
    grads = {t.name.removesuffix(".grad"): t.id for t in tensors.values() if t.kind is Kind.GRAD}
    states: dict[str, list[int]] = {}
    for t in tensors.values():
        if t.kind is Kind.STATE:
            states.setdefault(t.name.rpartition(".")[0], []).append(t.id)
    first: dict[int, int] = {}
    for op in ops:
        for x in op.reads:
            first.setdefault(x, op.id)
    groups = group_parameters([n for n in names if n in weights], blocks)
    order = sorted(groups, key=lambda g: min(first.get(weights[n], len(ops)) for n in groups[g]))
    costs: dict[tuple[object, ...], tuple[int, _Cost, int]] = {}
    elsewhere = updating.on_host() if updating is not None and updating.is_on_gpu else None
    group_of = updating.groups() if updating is not None else {}
    is_here = torch.cuda.is_available()  # otherwise updates will run on another host than this
    rates = updating.seconds_on_host() if updating is not None and updating.is_on_gpu and is_here else {}
    found: list[Unit] = []
    for unit in order:
        members = groups[unit]
        trained = [n for n in members if updating is not None and n in updating.values]
        shape = tuple((tensors[weights[n]].shape, tensors[weights[n]].dtype, group_of.get(n)) for n in members)
        if shape not in costs:
            cost = _measure(trained, updating) if updating is not None and trained else _Cost()
            host_moved = _measure(trained, elsewhere).moved if elsewhere is not None and trained else 0
            costs[shape] = (len(found), cost, host_moved)
        same, cost, host_moved = costs[shape]
        found.append(
            Unit(
                id=len(found),
                name=unit,
                params=tuple(members),
                weights=tuple(weights[n] for n in members),
                grads=tuple(grads[n] for n in members if n in grads),
                states=tuple(x for n in members for x in states.get(n, ())),
                numel=sum(updating.values[n].numel() for n in trained) if updating is not None else 0,
                moved=cost.moved,
                workspace=cost.workspace,
                same_as=None if same == len(found) else same,
                host_moved=host_moved,
                host_seconds=sum(rates[n] for n in trained) if all(n in rates for n in trained) else 0.0,
                products=cost.products,
            )
        )
    if updating is not None and updating.is_on_gpu and any(cost.solves for _, cost, _ in costs.values()):
        load_solvers(next(v.device for v in updating.values.values() if v.device.type == "cuda"))
    return tuple(found)


class _Cost(NamedTuple):
    """The cost of one update."""

    moved: int = 0  # bytes read and written
    workspace: int = 0  # peak bytes of temporaries
    products: bool = False  # multiplies matrices
    solves: bool = False  # factorises matrices


def _measure(names: Sequence[str], updating: Updating) -> _Cost:
    """The cost of one update, on fakes."""
    recorder = Recorder(values=KnownValues(None), real=False, trials=Trials(torch.device("cpu")))
    recorder.phase = Phase.STEP
    recorder.values.guess = True
    with recorder:
        with recorder.quiet():
            grads = [torch.empty_like(updating.narrow.get(n, updating.values[n])) for n in names]
            recorder.seed(((n, updating.values[n]) for n in names), Kind.PARAM)
            recorder.seed(((n, updating.narrow[n]) for n in names if n in updating.narrow), Kind.PARAM)
            recorder.seed((("grad", g) for g in grads), Kind.GRAD)
            kept = [v for s in updating.states(names) for v in s.values() if isinstance(v, torch.Tensor)]
            recorder.seed((("state", v) for v in kept), Kind.STATE)
        updating.update(names, grads)
    ops, tensors, _ = recorder.finish()
    # an op may change a part of a storage in place: count at most its arguments' bytes
    moved = sum(op.moved + min(op.moved, sum(tensors[x].nbytes for x in op.mutates)) for op in ops)
    change = [0] * (len(ops) + 1)
    for t in tensors.values():
        if t.born >= 0:
            change[t.born] += t.nbytes
            change[len(ops) if t.freed is None else t.freed + 1] -= t.nbytes
    live = most = 0
    for op, delta in zip(ops, change, strict=False):
        live += delta
        most = max(most, live + op.workspace)
    solves = any("linalg" in op.site.op and "norm" not in op.site.op for op in ops)
    return _Cost(moved, most, products=any(op.flops for op in ops), solves=solves)
