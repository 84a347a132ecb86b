"""Tensor parallelism: pairs of layers divided by columns and then by rows (Megatron-LM, arXiv 1909.08053).

A region is a set of linear layers that read what all ranks have (its columns: queries, keys and values; gate and up), and the
one that reads what became of them (its row: the output projection; down). Each rank has some of the columns' outputs and the
row's inputs of those: what is between (heads of attention, elementwise functions) is its own business. One all-reduce in
forward, of the row's partial sums, and one in backward for each tensor that the columns read.

Regions are found in the trace of the plain model (`regions.py`). Whether what is between can be computed in parts is found out
by doing it: first on fake tensors, where shapes may not fit (`attempts.py`), and on the ranks of a run by comparing outputs
with the whole model's (`checks/values.py`).

Parameters are DTensors, so that norms, checkpoints and optimizers see whole ones; modules compute with their local parts, and
activations are plain tensors. `sequence` divides what is between the regions too, along the sequence (Korthikanti et al.,
arXiv 2205.05198).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from holdall.errors import Unsupported
from holdall.parallel.exchanges import Copied, Gathered, Scattered, Summed, Words, all_gather
from holdall.parallel.parts import Division, Fork, Made, avoid_fast_paths, draws, part_of, put, replicate, wrap
from holdall.parallel.regions import axis, common_ancestor
from holdall.sharded import local_of
from holdall.types.info import TensorRegion


class RunningRegion:
    """The state of a region: from the first of its columns to its row."""

    def __init__(self, division: Division, region: TensorRegion, drops: bool) -> None:
        self.division, self.region, self._drops = division, region, drops
        self._entered: dict[int, tuple[torch.Tensor, ColumnInput]] = {}  # by what columns read
        self._rng = Fork(division)

    def begin(self) -> None:
        if self.division.region is not self:
            self.division.region = self
            self._entered.clear()
            if self._drops:
                self._rng.begin()

    def enter(self, x: torch.Tensor, in_parts: bool) -> ColumnInput:
        """What a column gets for its input. Columns that read the same tensor get the same, so that its gradient is summed
        once. `in_parts`: the input is a part of the sequence."""
        self.begin()
        if id(x) not in self._entered:
            group = self.division.group
            made = Regathered(x, group) if in_parts else ColumnInput(Copied.apply(x, group))
            self._entered[id(x)] = (x, made)
        return self._entered[id(x)][1]

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """The whole sequence, which columns read as it is."""
        self.begin()
        entry = Regathered(part, self.division.group)
        self._entered[id(entry.x)] = (entry.x, entry)
        return entry.x

    def ended(self, plain: Any, *args: Any, **kwargs: Any) -> Any:
        """The forward of the module around the region, which may not come to its end: a replay stops where backward has all
        that it needs."""
        try:
            return plain(*args, **kwargs)
        except BaseException:
            if self.division.region is self:
                self.division.failed = self
                self.leave()
            raise

    def leave(self) -> None:
        self.division.region = None
        for _, entry in self._entered.values():
            entry.close()
        self._entered.clear()
        self._rng.end()


class ColumnInput:
    """What the columns of a region read."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def close(self) -> None:
        """The region is over; the graph may keep this object, but not what the columns read."""
        del self.x

    def saving(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()


class Regathered(ColumnInput):
    """Parts of the sequence, gathered for the columns of a region. Autograd keeps this rank's part and gathers again in
    backward, once for all columns."""

    def __init__(self, part: torch.Tensor, group: Any) -> None:
        super().__init__(Gathered.apply(part, 1, group, True))
        self._part, self._group = part.detach(), group
        self._storage = self.x.untyped_storage()._cdata
        self._left = 0  # saves that backward has not asked for
        self._again: torch.Tensor | None = None

    def saving(self) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage()._cdata != self._storage:
            return tensor
        self._left += 1
        return self._left, tensor.shape, tensor.stride()

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        _, shape, stride = packed
        whole = self._again if self._again is not None else all_gather(self._part, 1, self._group)
        self._left -= 1
        self._again = whole if self._left else None
        return whole.as_strided(shape, stride)


def divide(
    model: torch.nn.Module,
    regions: Iterable[TensorRegion],
    vocabulary: Sequence[str],
    device_mesh: Any,
    *,
    stack: Sequence[str] = (),
    apart: Sequence[str] = (),
    whole: Any = None,
) -> Division:
    """Divide a model in place over the ranks of a mesh with one dimension. `vocabulary`: embeddings and heads that are divided
    by words. `stack`: consecutive modules between which activations are divided along the sequence; none: they are whole.
    `apart`: modules that are left to another division, and `whole`: the mesh of both."""
    division = Division(device_mesh, whole)
    made: Made = {}
    special = set(apart)
    sequence = bool(stack)
    for region in regions:
        above = model.get_submodule(common_ancestor((*region.columns, region.row)))
        running = RunningRegion(division, region, draws(above))
        for name in region.divided:
            setattr(above, name, getattr(above, name) // division.ranks)
        for name in region.own:
            setattr(above, name, part_of(getattr(above, name), 0, 1, division, made))
        wrap(above, running.ended)
        is_apart = sequence and not any(above is model.get_submodule(path) for path in stack)
        if is_apart:
            _gather_before(above, running)
        _leave_with_replays(above, running)
        for path in region.columns:
            _divide_column(model.get_submodule(path), division, running, region.parts, made, sequence and not is_apart)
        _divide_row(model.get_submodule(region.row), division, running, made, sequence)
        special |= {*region.columns, region.row}
    for path in vocabulary:
        module = model.get_submodule(path)
        divide_words = _divide_embedding if isinstance(module, torch.nn.Embedding) else _divide_head
        divide_words(module, division, made)
        special.add(path)
    for path, module in model.named_modules():
        if path not in special and next(module.parameters(recurse=False), None) is not None:
            replicate(module, division, made)
    avoid_fast_paths(model)
    if stack:
        _divide_stack([model.get_submodule(path) for path in stack], division)
    return division


def _leave_with_replays(above: torch.nn.Module, running: RunningRegion) -> None:
    """A replay may end inside the region, before its row: what is computed next is outside."""

    def forward(plain: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return plain(*args, **kwargs)
        except Exception as error:
            if getattr(error, "ends_replay", False) and running.division.region is running:
                running.leave()
            raise

    wrap(above, forward)


def _divide_column(module: Any, division: Division, running: RunningRegion, parts: int, made: Made, in_parts: bool) -> None:
    module.weight = part_of(module.weight, axis(module, "out"), parts, division, made)
    if module.bias is not None:
        module.bias = part_of(module.bias, 0, parts, division, made)
    if hasattr(module, "nf"):
        module.nf //= division.ranks

    def forward(plain: Any, x: torch.Tensor) -> Any:
        entry = running.enter(x, in_parts)
        with division.local(module), entry.saving():
            return plain(entry.x)

    wrap(module, forward)


def _divide_row(module: Any, division: Division, running: RunningRegion, made: Made, sequence: bool) -> None:
    from torch.distributed.tensor import Replicate

    module.weight = part_of(module.weight, axis(module, "in"), 1, division, made)
    if module.bias is not None:
        module.bias = put(module.bias, module.bias.detach(), Replicate(), division, made)

    def forward(plain: Any, x: torch.Tensor) -> Any:
        with division.local(module, ("bias",), is_partial=sequence):
            bias = module._parameters["bias"]
            with division.local(module, ("weight",)), _without_bias(module):
                y = plain(x)
            y = Scattered.apply(y, 1, division.group, True) if sequence else Summed.apply(y, division.group)
            running.leave()
            return y if bias is None else y.add_(bias)

    wrap(module, forward)


@contextmanager
def _without_bias(module: Any) -> Iterator[None]:
    bias = module._parameters["bias"]
    is_needed = bias is not None and hasattr(module, "nf")  # Conv1D adds one
    module._parameters["bias"] = torch.zeros_like(bias).detach() if is_needed else None
    try:
        yield
    finally:
        module._parameters["bias"] = bias


def _divide_embedding(module: Any, division: Division, made: Made) -> None:
    """A rank has some of the words; it looks those up, and the sum has them all."""
    module.weight = part_of(module.weight, 0, 1, division, made)

    def forward(_: Any, ids: torch.Tensor) -> torch.Tensor:
        with division.local(module):
            own = module.weight
            first = division.rank * own.shape[0]
            place = ids - first
            missing = (place < 0) | (place >= own.shape[0])
            padding = module.padding_idx
            at = padding - first if padding is not None and first <= padding < first + own.shape[0] else None
            found = torch.nn.functional.embedding(place.masked_fill(missing, 0), own, padding_idx=at)
            found = found.masked_fill(missing.unsqueeze(-1), 0)
        return Summed.apply(found, division.group)  # type: ignore[no-any-return]

    wrap(module, forward)


def _divide_head(module: Any, division: Division, made: Made) -> None:
    """A rank computes the logits of some of the words, and gets the others'."""
    module.weight = part_of(module.weight, 0, 1, division, made)
    if module.bias is not None:
        module.bias = part_of(module.bias, 0, 1, division, made)

    words = module.holdall_words = Words(division.group, local_of(module.weight).shape[0])  # a chunked head asks for them

    def forward(plain: Any, x: torch.Tensor) -> torch.Tensor:
        with division.local(module):
            own: torch.Tensor = plain(Copied.apply(x, division.group))
        return own if own.shape[-1] == words.total else words.gathered(own)

    wrap(module, forward)


# along the sequence


def _divide_stack(modules: Sequence[torch.nn.Module], division: Division) -> None:
    """From the first module to the last, activations are parts of the sequence: norms, dropouts and residuals compute, and keep
    for backward, a part of it."""
    fork, drops = Fork(division), any(draws(m) for m in modules)

    def wrap_one(module: torch.nn.Module, *, first: bool, last: bool) -> None:
        def forward(plain: Any, *args: Any, **kwargs: Any) -> Any:
            if first:
                args, kwargs = _first_tensor(args, kwargs, lambda x: _part_of_sequence(x, division))
                if drops:
                    fork.begin()
            division.split += 1
            try:
                out = plain(*args, **kwargs)
            finally:
                division.split -= 1
            if last:
                fork.end()
                (out,), _ = _first_tensor((out,), {}, lambda x: Gathered.apply(x, 1, division.group, False))
            return out

        wrap(module, forward)

    for n, module in enumerate(modules):
        wrap_one(module, first=n == 0, last=n == len(modules) - 1)


def _gather_before(module: torch.nn.Module, running: RunningRegion) -> None:
    """A module with a region and nothing else sees the whole sequence: it may take lengths from its input."""

    def forward(plain: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _first_tensor(args, kwargs, running.gathered)
        return plain(*args, **kwargs)

    wrap(module, forward)


def _part_of_sequence(x: torch.Tensor, division: Division) -> torch.Tensor:
    if x.dim() < 3 or x.shape[1] % division.ranks:
        raise Unsupported(
            f"activations of shape {tuple(x.shape)} cannot be divided along the sequence over {division.ranks} ranks",
            hint=f"use sequences whose length is a multiple of {division.ranks}",
        )
    return Scattered.apply(x, 1, division.group, False)  # type: ignore[no-any-return]


def _first_tensor(args: Any, kwargs: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, Any]:
    """The arguments with the first tensor of floats among them changed: the activations."""
    leaves, spec = tree_flatten((args, kwargs))
    for n, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            leaves[n] = change(leaf)
            break
    return tree_unflatten(leaves, spec)  # type: ignore[no-any-return]
