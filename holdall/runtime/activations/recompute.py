"""Blocks that are run again in backward instead of being remembered.

torch's own checkpoint wraps one function call. A plan needs more: several consecutive module calls as one segment, ops inside
whose results are kept, inputs that may lie in another tier, and frees at moments the simulator can foresee. So each call is
written down as it happens (module, inputs, random state), what autograd saves in it is replaced by a `Promise`, and the first
promise that backward asks for replays the segment.

Segments nest: in a replay, some of the calls may again be written down instead of remembered (`Nest`). Their promises are then
those of an inner segment, whose inputs the replay has made, and are kept when backward asks for one of them.

Who holds whom, so that nothing outlives its use: autograd holds promises, promises hold the segment, the segment holds the
inputs of its calls. The segment sees its promises only weakly. When backward has released the last promise, all of it is
gone.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from holdall.errors import Unsupported
from holdall.ops import is_random
from holdall.runtime.activations.kv_cache import CacheBefore, is_cache
from holdall.types.program import Nest

Forward = Callable[..., Any]
RandomState = tuple[torch.Tensor, list[int], list[torch.Tensor]]  # of the host, devices, of each of them
_IGNORED = frozenset({torch.ops.aten.detach.default})  # made by hooks, not by the model


class _Enough(Exception):
    """Everything that backward needs was made again; the rest of the forward is not run."""


Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]  # pack and unpack what is saved


class ByProgram(NamedTuple):
    """A call that an op-level runner makes: what it keeps for backward goes through the hooks of the segment."""

    runner: Callable[..., Any]
    module: torch.nn.Module
    forward: Forward

    def run(self, args: Any, kwargs: Any, hooks: Hooks) -> Any:
        return self.runner(self.module, self.forward, args, kwargs, hooks=hooks)


class Promise:
    """What autograd holds in the place of a tensor that can be computed again."""

    __slots__ = ("__weakref__", "like", "segment", "value")

    def __init__(self, segment: Segment, like: tuple[Any, ...]) -> None:
        self.segment = segment
        self.like = like
        self.value: torch.Tensor | None = None


class Made(NamedTuple):
    """A tensor that an earlier call of the same segment returned."""

    call: int
    leaf: int


class Result:
    """What a call returned, without holding it: enough to see it come back as the input of a later call."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._like = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor._version)

    def equals(self, tensor: torch.Tensor) -> bool:
        """The same bytes in the same layout, not changed since; a full slice of it counts, another view does not."""
        if self._storage() is not tensor.untyped_storage():
            return False
        return self._like == (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor._version)


class Input:
    """One tensor that a call was given; `park` lets another tier hold it until the replay."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._parked: Any = None
        self._like = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.requires_grad)

    def park(self, entry: Any) -> None:
        """From here on the bytes are `entry`'s business; `entry.fetch()` gives their storage back."""
        self._parked, self._tensor = entry, None

    def take(self) -> torch.Tensor:
        if self._tensor is not None:
            return self._tensor
        dtype, shape, stride, offset, requires_grad = self._like
        storage = self._parked.fetch()
        tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
        return tensor.requires_grad_(requires_grad)

    def storage(self) -> torch.UntypedStorage | None:
        return None if self._tensor is None else self._tensor.untyped_storage()


class Call:
    """One module call of a segment, as it happened."""

    def __init__(
        self, module: torch.nn.Module, forward: Forward | ByProgram, state: Sequence[torch.Tensor], keep: frozenset[str]
    ) -> None:
        self.forward = forward
        self.module = type(module).__name__
        self.inputs: list[Input | Made | CacheBefore | Any] = []
        self.spec: Any = None
        self.results: list[Result | None] = []
        self.promises: dict[int, weakref.ref[Promise]] = {}  # by the number of the saved tensor
        self.keep = keep
        self.kept: dict[str, Any] = {}
        self.drawn: dict[str, RandomState] = {}  # random state after a kept op that drew
        self.state = list(state)  # buffers that the call changes
        self.before = [b.detach().clone() for b in state]
        self.random: RandomState | None = None
        self.autocast: list[tuple[str, bool, torch.dtype]] = []


class Segment:
    """Consecutive calls that are replayed together."""

    def __init__(self, inner: tuple[Nest, ...] = ()) -> None:
        self.calls: list[Call] = []
        self.inner = inner
        self.done = False

    def run(
        self,
        module: torch.nn.Module,
        forward: Forward | ByProgram,
        args: Any,
        kwargs: Any,
        *,
        state: Sequence[torch.Tensor] = (),
        keep: frozenset[str] = frozenset(),
        only: frozenset[int] = frozenset(),
    ) -> tuple[Any, Call]:
        """Run one call, remembering how to run it again instead of what it saved (or of `only` these, by number)."""
        call = Call(module, forward, state, keep)
        leaves, call.spec = tree_flatten((args, kwargs))
        call.inputs = [self._reference(leaf) for leaf in leaves]
        call.random = _random_state(leaves)
        call.autocast = _autocast_state(leaves)
        numbers = itertools.count()

        def pack(tensor: torch.Tensor) -> Promise | torch.Tensor:
            number = next(numbers)
            if only and number not in only:
                return tensor
            promise = Promise(self, (tensor.shape, tensor.dtype))
            call.promises[number] = weakref.ref(promise)
            return promise

        with contextlib.ExitStack() as stack:
            if keep:
                stack.enter_context(_Keep(call))
            out = _called(forward, args, kwargs, (pack, unpack))
        for leaf, item in zip(leaves, call.inputs, strict=True):
            if isinstance(item, CacheBefore):
                item.settle(leaf)
        call.results = [Result(t) if isinstance(t, torch.Tensor) else None for t in tree_leaves(out)]
        self.calls.append(call)
        return out, call

    def _reference(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return CacheBefore(leaf) if is_cache(leaf) else leaf
        for number, call in enumerate(self.calls):
            for position, result in enumerate(call.results):
                if result is not None and result.equals(leaf):
                    return Made(number, position)
        return Input(leaf)

    def replay(self) -> None:
        """Run every call again that backward needs now, and keep what autograd had saved in it."""
        if self.done:
            raise Unsupported(
                "backward asked twice for a block that was already recomputed and released",
                hint="call backward with `retain_graph=False`, or keep this block",
            )
        self.done = True
        calls, self.calls = self.calls, []
        parts = self._parts(len(calls))
        final = max((n for n, call in enumerate(calls) if call.promises and n not in parts), default=-1)
        needed = max((first for _, first in parts.values()), default=0)  # calls before this one must return something
        end = max(final + 1, needed)
        made: dict[Made, Any] = {}  # results that a later call takes
        last_taker = {item: n for n, call in enumerate(calls) for item in call.inputs if isinstance(item, Made)}
        devices = sorted({d for call in calls if call.random for d in call.random[1]})
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            for number, call in enumerate(calls):
                if number in parts:
                    _defer(call, *parts[number], made)
                if number >= end:
                    continue
                leaves = [
                    item.take() if isinstance(item, (Input, CacheBefore)) else made[item] if isinstance(item, Made) else item
                    for item in call.inputs
                ]
                for item in [m for m in made if last_taker[m] == number]:
                    del made[item]
                results = tree_leaves(_run_again(call, leaves, deferred=number in parts, stop=number == final >= needed))
                made.update({m: results[m.leaf] for m in last_taker if m.call == number and m.leaf < len(results)})
                del results
        for call in calls:  # autograd's hooks still know the calls; what they hold is no longer needed
            call.inputs, call.before, call.kept = [], [], {}

    def _parts(self, count: int) -> dict[int, tuple[Segment, int]]:
        """Call -> the inner segment that it is in from now on, and that segment's first call."""
        parts = {}
        for nest in self.inner:
            part = Segment(nest.inner)
            parts.update(dict.fromkeys(range(nest.first, min(nest.last + 1, count)), (part, nest.first)))
        return parts


def _defer(call: Call, part: Segment, first: int, made: dict[Made, Any]) -> None:
    """The call becomes one of an inner segment: what backward needs of it is made when that one is replayed."""
    again = copy.copy(call)
    again.inputs = [_seen_from(first, item, made) for item in call.inputs]
    part.calls.append(again)
    for reference in call.promises.values():
        promise = reference()
        if promise is not None:
            promise.segment = part


def _seen_from(first: int, item: Any, made: dict[Made, Any]) -> Any:
    """An input of a call, for a segment that begins at call `first`."""
    if not isinstance(item, Made):
        return item
    if item.call >= first:
        return Made(item.call - first, item.leaf)
    tensor = made[item]
    return Input(tensor.detach().requires_grad_(tensor.requires_grad)) if isinstance(tensor, torch.Tensor) else tensor


def _called(forward: Forward | ByProgram, args: Any, kwargs: Any, hooks: Hooks) -> Any:
    if isinstance(forward, ByProgram):
        return forward.run(args, kwargs, hooks)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        return forward(*args, **kwargs)


def unpack(held: Promise | torch.Tensor) -> torch.Tensor:
    """What a promise stands for; the first that is asked for has its segment replayed."""
    if isinstance(held, torch.Tensor):
        return held
    while held.value is None:
        segment = held.segment
        segment.replay()
        if held.value is None and held.segment is segment:  # else it was handed to an inner segment
            raise Unsupported("a recomputed block did not make again what backward needs", hint="keep this block")
    return held.value


def _run_again(call: Call, leaves: list[Any], *, deferred: bool, stop: bool) -> Any:
    """One call, again. `deferred`: its promises stay open. `stop`: end it as soon as the last of them is kept."""
    last = max(call.promises, default=-1)
    seen = 0

    def pack(tensor: torch.Tensor) -> None:
        nonlocal seen
        reference = call.promises.get(seen)
        promise = None if reference is None else reference()
        seen += 1
        if promise is not None:
            if promise.like != (tensor.shape, tensor.dtype):
                raise Unsupported(
                    f"{call.module} saved {list(tensor.shape)} where it saved {list(promise.like[0])} before",
                    hint="its forward is not the same twice; keep this block",
                )
            if not deferred:
                promise.value = tensor.detach()
        if stop and seen == last + 1:
            raise _Enough

    with contextlib.ExitStack() as stack:
        _set_random_state(call.random)
        for device, enabled, dtype in call.autocast:
            stack.enter_context(torch.autocast(device, enabled=enabled, dtype=dtype))
        stack.enter_context(_put_back(call))
        if call.keep:
            stack.enter_context(_Retrieve(call, leave=deferred))
        args, kwargs = tree_unflatten(leaves, call.spec)
        leaves.clear()
        try:
            out = _called(call.forward, args, kwargs, (pack, _never))
        except _Enough:
            out = None
    if seen <= last:
        raise Unsupported(
            f"{call.module} saved {seen} tensors where it saved {last + 1} or more before",
            hint="its forward is not the same twice; keep this block",
        )
    return out


def _never(_: object) -> torch.Tensor:
    raise AssertionError("the graph of a replay has no backward")


@contextlib.contextmanager
def _put_back(call: Call) -> Iterator[None]:
    """Buffers as they were before the call, for the replay; as they are now, after it."""
    after = [b.detach().clone() for b in call.state]
    with torch.no_grad():
        for buffer, before in zip(call.state, call.before, strict=True):
            with _unsafe_preserve_version_counter(buffer):
                buffer.copy_(before)
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(call.state, after, strict=True):
                with _unsafe_preserve_version_counter(buffer):
                    buffer.copy_(value)


class _Counting(TorchDispatchMode):
    """Names each op of a call by what it is and how often it came: `aten.mm.default#3`."""

    supports_higher_order_operators = True

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call
        self.counts: dict[Any, int] = {}

    def label(self, func: Any) -> str:
        n = self.counts.get(func, 0)
        self.counts[func] = n + 1
        return f"{func}#{n}"


class _Keep(_Counting):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _IGNORED:
            label = self.label(func)
            if label in self.call.keep:
                self.call.kept[label] = tree_map_only(torch.Tensor, torch.Tensor.detach, out)
                if is_random(func, args, kwargs or {}):
                    self.call.drawn[label] = _random_state(tree_leaves((args, kwargs)))
        return out


class _Retrieve(_Counting):
    """`leave`: another replay will want the results too."""

    def __init__(self, call: Call, *, leave: bool) -> None:
        super().__init__(call)
        self.leave = leave

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _IGNORED:
            label = self.label(func)
            if label in self.call.kept:
                _set_random_state(self.call.drawn.get(label))  # who draws after it must draw the same
                if self.leave:  # autograd writes on what is returned here
                    return tree_map_only(torch.Tensor, torch.Tensor.detach, self.call.kept[label])
                return self.call.kept.pop(label)
        return func(*args, **(kwargs or {}))


def _random_state(leaves: Sequence[Any]) -> RandomState:
    devices, states = get_device_states(*[t for t in leaves if isinstance(t, torch.Tensor)])
    return torch.get_rng_state(), list(devices), list(states)


def _set_random_state(state: RandomState | None) -> None:
    if state is not None:
        torch.set_rng_state(state[0])
        set_device_states(state[1], state[2])


def _autocast_state(leaves: Sequence[Any]) -> list[tuple[str, bool, torch.dtype]]:
    kinds = {"cpu"} | {t.device.type for t in leaves if isinstance(t, torch.Tensor) and t.device.type in ("cpu", "cuda")}
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds)]
