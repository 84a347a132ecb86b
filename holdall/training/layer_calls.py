"""A layer over all micro-batches of a step: one node of autograd's graph, which keeps inputs and runs the layer again.

Autograd runs a node's backward when all gradients of its results are there. With one node for all micro-batches that is the
order of layers, whatever the model does between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from holdall.errors import Unsupported
from holdall.runtime.states.unit import PlacedUnit
from holdall.tiers import Store, Ticket
from holdall.training.lockstep import Meeting

ORDER = "use plain accumulation, where micro-batches go through the model one by one"
SKIPS = "the part after the last block reads results from before it, so layers are not a sequence"


class Weights(Protocol):
    """Who moves the weights and gradients of layers."""

    device: torch.device
    store: Store
    is_ending: bool

    def load(self, layer: Layer, following: Layer | None) -> None: ...

    def drop(self, layer: Layer) -> None: ...

    def ship(self, layer: Layer) -> None: ...

    def quiet(self) -> AbstractContextManager[object]:
        """Inside of it, memory of the host is not counted as the device's."""
        ...

    def tell(self, storage: torch.UntypedStorage) -> None:
        """These bytes are on the device now."""
        ...


@dataclass(slots=True, eq=False)
class StashedInput:
    """An input of a layer: on the device, or in the store while it waits for backward."""

    tensor: torch.Tensor | None
    like: tuple[Any, ...]
    ticket: Ticket | None = None


@dataclass(slots=True, eq=False)
class LayerCall:
    """A layer's call for one micro-batch."""

    spec: Any
    leaves: list[Any]  # tensors are `StashedInput`
    wants: list[bool]  # for every tensor: does it need a gradient?
    random: tuple[torch.Tensor, Any, Any] | None = None  # the state of the generators before it
    results: int = 0  # tensors that the call returned
    out: Any = None  # what it returned, with numbers in the place of tensors


@dataclass(eq=False)
class Layer:
    """A block: its weights, and what its calls keep for backward."""

    unit: PlacedUnit
    module: torch.nn.Module
    run: Callable[..., Any]
    owner: Weights
    stashes: bool  # inputs wait on the host
    before: Layer | None = None
    after: Layer | None = None
    calls: list[LayerCall] = field(default_factory=list)
    autocast: list[tuple[str, bool, torch.dtype]] = field(default_factory=list)
    updated: Callable[[Layer], None] = lambda _: None

    @property
    def name(self) -> str:
        return self.unit.name

    def forward(self, meetings: Sequence[Meeting]) -> list[Any]:
        """The layer's results for all micro-batches."""
        self.owner.load(self, self.after)
        self.autocast = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda")]
        flat: list[torch.Tensor] = []
        for meeting in meetings:
            leaves, spec = tree_flatten((meeting.args, meeting.kwargs))
            tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
            self.calls.append(LayerCall(spec, leaves, [t.requires_grad for t in tensors]))
            flat += tensors
        anchor = torch.zeros((), device=self.owner.device, requires_grad=True)
        made = list(_Node.apply(self, anchor, *flat))  # type: ignore[no-untyped-call]
        self.owner.drop(self)
        outs = []
        for call in self.calls:
            own, made = made[: call.results], made[call.results :]
            leaves, spec = tree_flatten(call.out)
            outs.append(tree_unflatten([own[n.number] if isinstance(n, _Number) else n for n in leaves], spec))
            call.out = None
        return outs

    def compute(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """In the node's forward: every call, without a graph; what backward needs of it is kept."""
        made: list[torch.Tensor] = []
        leaving: list[Ticket] = []  # copies that the next call hides
        at = 0
        with uncached():
            for call in self.calls:
                own = [t.detach() for t in tensors[at : at + len(call.wants)]]
                at += len(own)
                call.random = torch.get_rng_state(), *get_device_states(*own)
                out = self._called(call, own)
                self._wait(leaving)
                kept = iter([self._keep(t, wants) for t, wants in zip(own, call.wants, strict=True)])
                call.leaves = [next(kept) if isinstance(leaf, torch.Tensor) else leaf for leaf in call.leaves]
                leaving = [k.ticket for k in call.leaves if isinstance(k, StashedInput) and k.ticket is not None]
                leaves, spec = tree_flatten(out)
                numbers = [_Number(n) for n in range(sum(isinstance(t, torch.Tensor) for t in leaves))]
                call.results, count = len(numbers), iter(numbers)
                call.out = tree_unflatten([next(count) if isinstance(t, torch.Tensor) else t for t in leaves], spec)
                made += [t for t in leaves if isinstance(t, torch.Tensor)]
            self._wait(leaving)
        return made

    def _wait(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self.owner.store.wait(ticket)

    def backward(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of all inputs; those of the weights go to the host, and the weights are dropped."""
        if self.owner.is_ending:
            raise Unsupported(SKIPS, hint=ORDER)
        self.owner.load(self, self.before)
        calls, self.calls = self.calls, []
        found: list[torch.Tensor | None] = []
        now = torch.get_rng_state()
        buffers = [(b, b.clone()) for b in self.module.buffers()]
        for call in calls:
            own, grads = grads[: call.results], grads[call.results :]
            found += self._backward_of(call, own)
        torch.set_rng_state(now)
        for buffer, was in buffers:  # running means were updated in forward
            buffer.copy_(was)
        self.leave()
        return found

    def leave(self) -> None:
        """After backward: the weights are dropped, the gradients go to the host."""
        self.owner.drop(self)
        self.owner.ship(self)
        self.updated(self)

    def _backward_of(self, call: LayerCall, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        tensors = [self._fetch(kept) for kept in call.leaves if isinstance(kept, StashedInput)]
        inputs = [t.detach().requires_grad_(wants) for t, wants in zip(tensors, call.wants, strict=True)]
        assert call.random is not None
        torch.set_rng_state(call.random[0])
        set_device_states(call.random[1], call.random[2])
        with torch.enable_grad(), ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            leaves, _ = tree_flatten(self._called(call, inputs))
        made = [t for t in leaves if isinstance(t, torch.Tensor)]
        pairs = [(t, g) for t, g in zip(made, grads, strict=True) if g is not None and t.requires_grad]
        del leaves, made
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        return [t.grad for t in inputs]

    def _called(self, call: LayerCall, tensors: Sequence[torch.Tensor]) -> Any:
        own = iter(tensors)
        leaves = [next(own) if isinstance(leaf, (torch.Tensor, StashedInput)) else leaf for leaf in call.leaves]
        args, kwargs = tree_unflatten(leaves, call.spec)
        return self.run(*args, **kwargs)

    def _keep(self, tensor: torch.Tensor, wants: bool) -> StashedInput:
        like = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
        if not (self.stashes and wants):
            return StashedInput(tensor, like)
        with self.owner.quiet():
            return StashedInput(None, like, self.owner.store.put(tensor.untyped_storage()))

    def _fetch(self, kept: StashedInput) -> torch.Tensor:
        if kept.tensor is None:
            assert kept.ticket is not None
            dtype, shape, stride, offset = kept.like
            with self.owner.quiet():
                storage = self.owner.store.get(kept.ticket, self.owner.device)
                self.owner.store.wait_in(kept.ticket)
                self.owner.store.free(kept.ticket)
            self.owner.tell(storage)
            kept.ticket = None
            return torch.empty(0, dtype=dtype, device=self.owner.device).set_(storage, offset, shape, stride)
        tensor, kept.tensor = kept.tensor, None
        return tensor

    def forget(self) -> None:
        """After an error: give back what is still kept."""
        for call in self.calls:
            for kept in call.leaves:
                if isinstance(kept, StashedInput) and kept.ticket is not None:
                    self.owner.store.free(kept.ticket)
        self.calls, self.updated = [], lambda _: None


@dataclass(frozen=True, slots=True)
class _Number:
    """Stands for the tensor of this number among a call's results."""

    number: int


class _Node(torch.autograd.Function):
    """A layer over all micro-batches: autograd runs its backward when the gradients of all of them are there."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ARG004
        ctx.layer = layer
        ctx.set_materialize_grads(False)
        made = layer.compute(tensors)
        ctx.mark_non_differentiable(*(t for t in made if not (t.is_floating_point() or t.is_complex())))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.layer.backward(grads)


@contextmanager
def uncached() -> Iterator[None]:
    """Casts of weights are not kept by autocast: the weights leave."""
    was = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)
