"""Recomputes blocks in backward instead of keeping their saved tensors.

torch's own checkpoint wraps one call. A plan needs more: consecutive module calls as one segment, ops inside whose results are
kept, inputs that may be offloaded, and frees at points the simulator can predict. So each call is recorded (module, inputs,
random state), autograd's saved tensors are replaced by `Promise`s, and the first that backward unpacks replays the segment.

Segments nest: a replay may record some of its calls again instead of saving their tensors (`Nest`). Their promises then belong
to an inner segment, whose inputs the replay has made, and are fulfilled when backward unpacks one of them.

Ownership: autograd holds promises, promises hold the segment, the segment holds the inputs of its calls. The segment refers to
its promises weakly. When backward has released the last promise, everything is freed.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from holdall.attributes import Attributes
from holdall.errors import Unsupported
from holdall.ops import is_random
from holdall.runtime.activations.kv_cache import CacheBefore, is_cache
from holdall.runtime.activations.resident import CallSaves
from holdall.runtime.activations.surroundings import RandomState, autocast_state, random_state, set_random_state
from holdall.sharded import gather, local_of
from holdall.types.program import Nest

Forward = Callable[..., Any]
_WITHOUT = 'plan without recomputation: fit(..., allow={"offload", "place"})'
_IGNORED = frozenset({torch.ops.aten.detach.default})  # made by hooks, not by the model


class _Enough(Exception):
    ends_replay = True  # everything that backward needs has been recomputed


Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]  # pack and unpack what is saved


class ByProgram(NamedTuple):
    """A call that an op-level runner makes: what it keeps for backward goes through the hooks of the segment."""

    runner: Callable[..., Any]
    module: torch.nn.Module
    forward: Forward

    def run(self, args: Any, kwargs: Any, hooks: Hooks) -> Any:
        return self.runner(self.module, self.forward, args, kwargs, hooks=hooks)


class Promise:
    """Stands for a saved tensor that can be recomputed."""

    __slots__ = ("__weakref__", "like", "segment", "value")

    def __init__(self, segment: Segment, like: tuple[Any, ...]) -> None:
        self.segment = segment
        self.like = like
        self.value: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        """The first promise that is asked for has its segment replayed."""
        while self.value is None:
            (segment := self.segment).replay()
            if self.value is None and self.segment is segment:  # otherwise an inner segment has it
                raise Unsupported("a recomputed block did not save the same tensors again", hint=_WITHOUT)
        return self.value


class Made(NamedTuple):
    """A tensor returned by an earlier call of the same segment."""

    call: int
    leaf: int


class Result:
    """A weak record of a call's result, to recognise it as the input of a later call."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = weakref.ref(local_of(tensor).untyped_storage())
        self._like = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor._version)

    def equals(self, tensor: torch.Tensor) -> bool:
        """Same bytes in the same layout, unchanged since. A full slice counts as equal, another view does not."""
        if self._storage() is not local_of(tensor).untyped_storage():
            return False
        return self._like == (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor._version)


class Input:
    """One tensor input of a call; `park` offloads it until the replay."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor  # until it is offloaded
        self._fetch: Callable[[], torch.UntypedStorage] | None = None  # once it is offloaded
        self._like = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.requires_grad)

    def park(self, fetch: Callable[[], torch.UntypedStorage]) -> None:
        """Let go of the tensor; `fetch` returns the storage of its bytes."""
        self._fetch, self.tensor = fetch, None

    def take(self) -> torch.Tensor:
        if self.tensor is not None:
            return self.tensor
        dtype, shape, stride, offset, requires_grad = self._like
        assert self._fetch is not None
        storage = self._fetch()
        tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
        return tensor.requires_grad_(requires_grad)


class RecomputedCall:
    """One recorded module call of a segment."""

    def __init__(
        self,
        module: torch.nn.Module,
        forward: Forward | ByProgram,
        state: Sequence[torch.Tensor],
        keep: frozenset[str],
        alters: Collection[str] | None,
    ) -> None:
        self.forward = forward
        self.module = type(module).__name__
        self.gather = partial(gather, module)  # a replay does not run the module's own hooks
        self.inputs: list[Input | Made | CacheBefore | Any] = []
        self.spec: Any = None
        self.results: list[Result | None] = []
        self.promises: dict[int, weakref.ref[Promise]] = {}  # by index of the saved tensor
        self.keep = keep
        self.kept: dict[str, Any] = {}
        self.drawn: dict[str, RandomState] = {}  # random state after a kept op that drew random numbers
        self.state = list(state)  # buffers that the call changes
        self.before = [b.detach().clone() for b in state]
        self.attributes = Attributes(module, alters) if alters is None or alters else None
        self.random: RandomState | None = None
        self.autocast: list[tuple[str, bool, torch.dtype]] = []


class Segment:
    """Consecutive calls that are replayed together."""

    def __init__(self, inner: tuple[Nest, ...] = ()) -> None:
        self.calls: list[RecomputedCall] = []
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
        alters: Collection[str] | None = None,
        keep: frozenset[str] = frozenset(),
        only: frozenset[int] = frozenset(),
        saves: CallSaves | None = None,
        hold: Callable[[torch.Tensor, int | None], Any] = lambda tensor, _: tensor,
    ) -> tuple[Any, RecomputedCall]:
        """Run one call and record it instead of keeping its saved tensors. `only`: these numbers; `hold` takes the others.
        `alters`: the Python attributes that it changes, by path; None: not known, it may be any."""
        call = RecomputedCall(module, forward, state, keep, alters)
        leaves, call.spec = tree_flatten((args, kwargs))
        given = {id(leaf): self._reference(leaf) for leaf in leaves}  # a tensor given twice is one input: modules ask `k is v`
        call.inputs = [given[id(leaf)] for leaf in leaves]
        call.random = random_state(leaves)
        call.autocast = autocast_state(leaves)
        order = itertools.count()
        numbers = saves or CallSaves(())

        def pack(tensor: torch.Tensor) -> Any:
            at = next(order)
            if only and (number := numbers.number(tensor)) not in only:
                return hold(tensor, number)
            promise = Promise(self, (tensor.shape, tensor.dtype))
            call.promises[at] = weakref.ref(promise)
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
        """Run every call again that backward needs now, and fulfil its promises."""
        if self.done:
            raise Unsupported(
                "a second backward reached a block that was already recomputed and freed",
                hint=f"call backward once per forward; or {_WITHOUT}",
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
                taken = {id(item): item.take() for item in call.inputs if isinstance(item, (Input, CacheBefore))}
                leaves = [made[item] if isinstance(item, Made) else taken.get(id(item), item) for item in call.inputs]
                taken.clear()
                for item in [m for m in made if last_taker[m] == number]:
                    del made[item]
                results = tree_leaves(_run_again(call, leaves, deferred=number in parts, stop=number == final >= needed))
                made.update({m: results[m.leaf] for m in last_taker if m.call == number and m.leaf < len(results)})
                del results
        for call in calls:  # autograd's hooks still refer to the calls; free what they hold
            call.inputs, call.before, call.kept, call.attributes = [], [], {}, None

    def _parts(self, count: int) -> dict[int, tuple[Segment, int]]:
        """Call -> (the inner segment that it now belongs to, the index of that segment's first call)."""
        parts = {}
        for nest in self.inner:
            part = Segment(nest.inner)
            parts.update(dict.fromkeys(range(nest.first, min(nest.last + 1, count)), (part, nest.first)))
        return parts


def _defer(call: RecomputedCall, part: Segment, first: int, made: dict[Made, Any]) -> None:
    """Move the call into an inner segment, which recomputes it when backward needs it."""
    again = copy.copy(call)
    seen = {id(item): _seen_from(first, item, made) for item in call.inputs}
    again.inputs = [seen[id(item)] for item in call.inputs]
    part.calls.append(again)
    for reference in call.promises.values():
        promise = reference()
        if promise is not None:
            promise.segment = part


def _seen_from(first: int, item: Any, made: dict[Made, Any]) -> Any:
    """An input of a call, as seen by a segment that begins at call `first`."""
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


def unpack(held: Any) -> torch.Tensor:
    """The saved tensor: held itself, recomputed (`Promise`), or offloaded."""
    return held if isinstance(held, torch.Tensor) else held.tensor()  # type: ignore[no-any-return]


def _run_again(call: RecomputedCall, leaves: list[Any], *, deferred: bool, stop: bool) -> Any:
    """Run one call again. `deferred`: leave its promises open. `stop`: end it as soon as its last promise is fulfilled."""
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
                    f"the recomputation of {call.module} saved a tensor of {list(tensor.shape)}; "
                    f"the forward saved {list(promise.like[0])}",
                    hint=f"its forward is not repeatable; {_WITHOUT}",
                )
            if not deferred:
                promise.value = tensor.detach()
        if stop and seen == last + 1:
            raise _Enough

    with contextlib.ExitStack() as stack:
        set_random_state(call.random)
        for device, enabled, dtype in call.autocast:
            stack.enter_context(torch.autocast(device, enabled=enabled, dtype=dtype))
        stack.enter_context(_put_back(call))
        if call.keep:
            stack.enter_context(_Retrieve(call, leave=deferred))
        args, kwargs = tree_unflatten(leaves, call.spec)
        leaves.clear()
        call.gather()
        out = None
        with contextlib.suppress(_Enough):
            out = _called(call.forward, args, kwargs, (pack, _never))
    if seen <= last:
        raise Unsupported(
            f"the recomputation of {call.module} saved {seen} tensors; the forward saved at least {last + 1}",
            hint=f"its forward is not repeatable; {_WITHOUT}",
        )
    return out


def _never(_: object) -> torch.Tensor:
    raise AssertionError("the graph of a replay has no backward")


@contextlib.contextmanager
def _put_back(call: RecomputedCall) -> Iterator[None]:
    """Restore buffers and attributes from before the call for the replay; put the current values back after it."""
    after = [b.detach().clone() for b in call.state]
    with torch.no_grad():
        for buffer, before in zip(call.state, call.before, strict=True):
            with _unsafe_preserve_version_counter(buffer):
                buffer.copy_(before)
    try:
        with call.attributes.again() if call.attributes is not None else contextlib.nullcontext():
            yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(call.state, after, strict=True):
                with _unsafe_preserve_version_counter(buffer):
                    buffer.copy_(value)


class _Counting(TorchDispatchMode):
    """Names each op of a call by kind and count: `aten.mm.default#3`."""

    supports_higher_order_operators = True

    def __init__(self, call: RecomputedCall) -> None:
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
                    self.call.drawn[label] = random_state(tree_leaves((args, kwargs)))
        return out


class _Retrieve(_Counting):
    """Returns kept results instead of running their ops. `leave`: keep the results for another replay."""

    def __init__(self, call: RecomputedCall, *, leave: bool) -> None:
        super().__init__(call)
        self.leave = leave

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _IGNORED:
            label = self.label(func)
            if label in self.call.kept:
                set_random_state(self.call.drawn.get(label))  # later ops must draw the same numbers
                if self.leave:  # autograd writes on the tensor returned here
                    return tree_map_only(torch.Tensor, torch.Tensor.detach, self.call.kept[label])
                return self.call.kept.pop(label)
        return func(*args, **(kwargs or {}))
