"""Tracks small values that are known although the tensors are fake.

Models read their inputs: is this mask all ones, are these positions packed, has the step counter moved. Fake tensors cannot
answer, and frameworks then take another branch than in a real run, so the plan would be for another program. Batches, counters
and values derived from them are small, so their real values are tracked along with the fakes. For random numbers see
`drawn.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from holdall.errors import HoldallError
from holdall.ops import is_factory, makes_little, mutated_arguments, tensors_in
from holdall.tracing.fake_gaps import KERNELS
from holdall.tracing.values import drawn
from holdall.tracing.values.chosen import choose, deciding

_LARGEST = 2**21  # elements; enough for masks of a sample batch, small beside the model
_DRAWN = -1  # in the place of a number of the batch's tensors: random numbers
_LARGEST_FLOAT = 2**12  # floats are activations more often than they are answers


class UnknownValue(HoldallError):
    """The step reads a value that depends on the weights: it cannot be traced without running it."""


class KnownValues:
    def __init__(self, mode: FakeTensorMode | None) -> None:
        self._mode = mode
        self._known: Any = WeakIdKeyDictionary()
        self._carried: dict[int, tuple[torch.Tensor, frozenset[int]]] = {}
        self._from: Any = WeakIdKeyDictionary()  # known value -> indices of the batch tensors it was computed from
        self.looked_at: set[int] = set()  # indices of batch tensors whose values decide the control flow
        self.guess = False  # answer 1.0 for unknown values: an optimizer's scalars do not change its allocations

    def tell(self, fake: torch.Tensor, value: torch.Tensor, number: int) -> None:
        """`fake` stands for `value`, the batch tensor with this index."""
        if _small(value):
            with _disable_current_modes():
                self._known[fake] = value.detach().cpu()
            self._from[fake] = frozenset((number,))

    def carry(self, fake: torch.Tensor, key: int) -> None:
        """Keep the value of a tensor that autograd saves, by the save's number."""
        if self._mode is not None and fake in self._known:
            self._carried[key] = self._known[fake], self._from.get(fake, frozenset())

    def restore(self, key: int, fake: torch.Tensor) -> None:
        if key in self._carried:
            self._known[fake], self._from[fake] = self._carried[key]

    def forget(self, key: int) -> None:
        self._carried.pop(key, None)

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether neither the batch nor a random number decides its value."""
        return self._mode is not None and tensor in self._known and not self._from.get(tensor)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op; compute the values of its outputs if its inputs are known."""
        is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if self._mode is None:
            out = func(*args, **kwargs)
            if is_random and (value := drawn.fraction(func, args, kwargs, out)) is not None:
                out.detach().copy_(value)
            return out
        tensors = tensors_in((args, kwargs))
        known = all(not isinstance(t, FakeTensor) or t in self._known for t in tensors)
        if known and (tensors or is_factory(func)) and not is_random:
            return self._run_known(func, args, kwargs, factory=not tensors)
        for t in mutated_arguments(func, args, kwargs):  # an unknown value may have been written to a known one
            self._known.pop(t, None)
        kernel = KERNELS.get(str(func))
        if kernel is None and func is torch.ops.aten.embedding.default:
            self._check_range(args[0], args[1])
        if self.guess and func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        try:
            out = func(*args, **kwargs) if kernel is None else kernel(func, args, kwargs)
            if is_random:
                self._tell_drawn(func, args, kwargs, out)
            return out
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            out = choose(func, args, self._known.get)
            if out is None:
                raise UnknownValue(f"`{func}` needs a value that only a real run can compute") from error
        self.looked_at.update(*(self._from.get(t, ()) for t in deciding(func, args)))
        return out

    def _run_known(self, func: Any, args: Any, kwargs: Any, *, factory: bool) -> Any:
        if factory and not makes_little(args, kwargs):
            return func(*args, **kwargs)
        real_args, real_kwargs = tree_map_only(torch.Tensor, self._value, (args, kwargs))
        if "device" in real_kwargs:
            real_kwargs = {**real_kwargs, "device": torch.device("cpu")}
        sources = frozenset().union(*(self._from.get(t, ()) for t in tensors_in((args, kwargs)) if isinstance(t, FakeTensor)))
        value: Any = None
        try:
            with _disable_current_modes():
                value = func(*real_args, **real_kwargs)
            have = True
        except (RuntimeError, NotImplementedError):
            have = False
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if not have:
                raise UnknownValue(f"`{func}` needs a value that only a real run can compute") from error
            self.looked_at |= sources
            device = next((t.device for t in tensors_in((args, kwargs)) if isinstance(t, FakeTensor)), torch.device("cpu"))
            out = tree_map_only(torch.Tensor, lambda t: self._fake_like(t, device), value)
        if not all(isinstance(x, torch.Tensor) for x in tree_iter(out)):  # a Python result
            self.looked_at |= sources
        if have:
            for fake, real in zip(tree_iter(out), tree_iter(value), strict=False):
                if isinstance(fake, FakeTensor) and isinstance(real, torch.Tensor) and _small(real):
                    self._known[fake], self._from[fake] = real, sources
        return out

    def _fake_like(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A fake of a known value, which is on the CPU, where the step would have it."""
        assert self._mode is not None
        with self._mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

    def _tell_drawn(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record random numbers that the step may read."""
        value = drawn.fraction(func, args, kwargs, out)
        if value is None:
            value = drawn.integers(func, args, kwargs, out)
        if value is not None and isinstance(out, FakeTensor):
            self._known[out], self._from[out] = value, frozenset((_DRAWN,))

    def _check_range(self, weight: torch.Tensor, indices: torch.Tensor) -> None:
        """Raise for an index out of range: a fake lookup never fails, a real one would."""
        if indices in self._known and indices.numel():
            with _disable_current_modes():
                largest = int(self._known[indices].max())
            if largest >= weight.shape[0]:
                raise IndexError(f"index {largest} is out of range for an embedding of {weight.shape[0]} rows")

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._known[tensor] if isinstance(tensor, FakeTensor) else tensor


def _small(value: torch.Tensor) -> bool:
    return value.numel() <= (_LARGEST_FLOAT if value.is_floating_point() else _LARGEST)
