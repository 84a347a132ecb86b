"""Expert parallelism: the experts of a mixture lie on different ranks, and tokens travel to them and back (GShard, Switch
Transformer, DeepSpeed-MoE).

Every rank has a batch of its own, as in data parallelism, and gradients are means over the ranks. No token is dropped: ranks
first tell each other how many they will send, then an all-to-all takes the tokens to the ranks of their experts, and another
one brings the results home, where they are weighted and added up.

Beside tensors, ranks that have the same tokens take a part of them each to the experts, which are whole on each of those ranks:
so no token is computed twice, and gradients of experts are sums over them (as DeepSpeed-TED drops duplicates, arXiv
2303.06318). With sequences divided, each has tokens of its own already.

Experts are met as Hugging Face's models have them, and as is natural where one kernel computes all of them: a module whose
parameters are stacks of experts, called with (tokens, indices of experts, weights). It computes a part of the stack as it
computes the whole. A trace on fake tensors does not know the routes of tokens, and takes them to be equally many to all
experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from holdall.parallel.exchanges import Gathered, Scattered, Sent, own_part
from holdall.parallel.parts import Division, Fork, Made, avoid_fast_paths, draws, is_traced, part_of, replicate, wrap


def find_experts(model: torch.nn.Module, ranks: int) -> tuple[str, ...]:
    """Paths of the modules that are stacks of experts, so many that they can be divided."""
    return tuple(path for path, module in model.named_modules() if (n := _experts_of(module)) and n % ranks == 0)


def _experts_of(module: torch.nn.Module) -> int:
    """Experts of a stack; 0: it is none."""
    number = getattr(module, "num_experts", 0)
    stacks = list(module.parameters(recurse=False))
    takes = [p for p in inspect.signature(module.forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    needs = [p for p in takes if p.default is p.empty]
    is_stack = any(p.dim() == 3 for p in stacks) and all(p.dim() >= 2 and p.shape[0] == number for p in stacks)
    is_alone = not any(True for child in module.children() for _ in child.parameters())
    return int(number) if is_stack and is_alone and 3 in (len(takes), len(needs)) else 0


def divide_experts(
    model: torch.nn.Module, experts: Sequence[str], over: Any, *, means: bool = True, beside: Division | None = None
) -> Division:
    """Divide the experts of a model over the ranks of a mesh with one dimension, in place. `means`: backward takes the means
    of the other parameters' gradients over the ranks; without, whoever calls this does. `beside`: the rest of the model is
    divided by tensors already. Returns the division of the rest."""
    division = Division(over, None if beside is None else beside.device_mesh)
    made: Made = {}
    for path in experts:
        module = model.get_submodule(path)
        _divide_stack(module, division, beside, made)
        if beside is not None:
            _divide_tokens(module, beside)
    rest = division if beside is None else beside
    rest.batches = (division.group, division.ranks) if means else None
    if beside is None:
        for path, module in model.named_modules():
            if path not in experts and next(module.parameters(recurse=False), None) is not None:
                replicate(module, division, made)
        avoid_fast_paths(model)
    return rest


def _divide_stack(module: Any, division: Division, beside: Division | None, made: Made) -> None:
    for name, p in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, part_of(p, 0, 1, division, made))
    module.num_experts //= division.ranks
    rest = beside or division

    def forward(plain: Any, tokens: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        route = _Route(indices, module.num_experts, division)
        arrived = Sent.apply(tokens[route.rows], route.here, route.there, division.group)
        ones = weights.new_ones((len(arrived), 1))
        with rest.local(module, is_partial=beside is not None, batches=(None, division.ranks)):
            results = plain(arrived, route.experts(arrived.device).unsqueeze(1), ones)
        back = Sent.apply(results, route.there, route.here, division.group)
        weighted = back * weights.flatten()[route.order].unsqueeze(1).to(back.dtype)
        return weighted.new_zeros(tokens.shape).index_add(0, route.rows, weighted)  # type: ignore[no-any-return]

    wrap(module, forward)


def _divide_tokens(module: torch.nn.Module, division: Division) -> None:
    """Ranks that have the same tokens compute a part of them each. Where their number is no multiple of the ranks', there are
    some of weight zero more."""
    fork = Fork(division) if draws(module) else None

    def forward(plain: Any, tokens: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if division.split:  # they are parts of the sequence
            return plain(tokens, indices, weights)  # type: ignore[no-any-return]
        count, more = len(tokens), -len(tokens) % division.ranks
        if more:
            tokens, indices, weights = (pad(t, (0, 0, 0, more)) for t in (tokens, indices, weights))
        tokens, weights = (Scattered.apply(t, 0, division.group, False) for t in (tokens, weights))
        if fork is not None:
            fork.begin()
        try:
            results = plain(tokens, own_part(indices, 0, division.group), weights)
        finally:
            if fork is not None:
                fork.end()
        results = Gathered.apply(results, 0, division.group, False)
        return results[:count] if more else results  # type: ignore[no-any-return]

    wrap(module, forward)


class _Route:
    """Which rows of tokens go where."""

    def __init__(self, indices: torch.Tensor, own: int, division: Division) -> None:
        flat = indices.flatten()
        self._own, self._ranks = own, division.ranks
        self.order = flat.argsort(stable=True)  # by expert
        self.rows = self.order // indices.shape[1]
        if is_traced():
            each, more = divmod(len(flat), division.ranks)
            self.there = [each + (rank < more) for rank in range(division.ranks)]
            self.here, self._arriving = self.there, None
            return
        sent = torch.bincount(flat, minlength=own * division.ranks)
        self._arriving = torch.empty_like(sent)
        dist.all_to_all_single(self._arriving, sent, group=division.group)
        self.there = sent.view(division.ranks, own).sum(1).tolist()
        self.here = self._arriving.view(division.ranks, own).sum(1).tolist()

    def experts(self, device: torch.device) -> torch.Tensor:
        """The number, among this rank's, of the expert of each row that arrives."""
        if self._arriving is None:
            return torch.arange(sum(self.here), device=device) % self._own
        return torch.arange(self._own, device=device).repeat(self._ranks).repeat_interleave(self._arriving)
