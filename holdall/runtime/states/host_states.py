"""Optimizer states of a sharded model in host memory: at a step they pass through the device, piece by piece.

Parameters and gradients stay where torch's engine has them. Before the optimizer's own step, every piece is copied into a slot
on the device, its update is made there, and it is copied back, while the next is on its way into another slot. The update is
the user's rule over this rank's parts: plain tensors that share memory with the shards (`updates/parts.py`). The optimizer's
own step then updates what is left.

`optimizer.state` holds the states as ever, as DTensors whose local part is in host memory; when a step is over, so are its
copies. States that the loop loads or makes itself move there before they are next used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from holdall.errors import Unsupported
from holdall.runtime.states.packing import Layout, like
from holdall.sharded import forget_state_room, from_local, is_shard, local_of, part_of_parameter, set_state_room, spec_of
from holdall.tiers import Ticket, let_wait
from holdall.tiers._buffers import copy_tensor
from holdall.tiers._chaos import current
from holdall.tiers._keepers import Keepers
from holdall.updates.parts import ELEMENTWISE, Groups, Part, snapshot

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness

_State = dict[str, Any]


def put_states_on_host(harness: Harness, pieces: Sequence[Sequence[str]], *, slots: int) -> None:
    """For the model and the optimizer of a harness, until its plan leaves the model."""
    if harness.optimizer is None:
        return
    if type(harness.optimizer) not in ELEMENTWISE:
        raise Unsupported(
            f"{type(harness.optimizer).__name__} may not update parts of a parameter, which ranks do with states on the host",
            hint='use a rule of torch.optim, such as AdamW, or fit(..., allow=["recompute", "offload"])',
        )
    named = _updated(harness.model, harness.optimizer)

    def elsewhere() -> set[int]:
        return harness.ledger.elsewhere if harness.ledger is not None else set()

    made = StatesOnHost(
        harness.optimizer,
        [[named[name] for name in piece] for piece in pieces],
        store=Keepers(harness.stores, harness.stores.near),
        device=harness.device,
        slots=slots,
        quiet=harness.quiet,
        elsewhere=elsewhere,
    )
    harness.on_close(made.close)


def _updated(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
    """What the optimizer holds, by the names of parameters: these, or this rank's parts of them."""
    names = {id(p): name for name, p in model.named_parameters()}
    held = (p for group in optimizer.param_groups for p in group["params"])
    return {names[id(part_of_parameter(p))]: p for p in held if id(part_of_parameter(p)) in names}


@dataclass(slots=True, eq=False)
class StatePiece:
    """Parameters whose states are one piece of host memory."""

    parameters: Sequence[torch.nn.Parameter]
    part: Part
    ticket: Ticket | None = None
    layout: Layout = field(default_factory=lambda: Layout((), 0))
    there: dict[tuple[int, str], int] = field(default_factory=dict)  # (parameter, name of the state) -> address, in its order

    @property
    def due(self) -> list[int]:
        """Parameters with a gradient."""
        return [n for n, p in enumerate(self.parameters) if p.grad is not None]


class StatesOnHost:
    """`quiet`: a context whose memory is not counted as the device's. `elsewhere`: storages that are not counted either."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        pieces: Sequence[Sequence[torch.nn.Parameter]],
        *,
        store: Keepers,
        device: torch.device,
        slots: int,
        quiet: Callable[[], AbstractContextManager[object]],
        elsewhere: Callable[[], set[int]],
    ) -> None:
        self._optimizer = optimizer
        self._pieces = [StatePiece(parameters, Part(optimizer, parameters)) for parameters in pieces]
        self._own = {id(p) for piece in self._pieces for p in piece.parameters}
        self._lane = store.lane()
        self._device = device
        self._slots = slots
        self._quiet = quiet
        self._elsewhere = elsewhere
        self._loaded: dict[int, list[Ticket]] = {}  # id of a parameter -> room of states that a checkpoint has filled
        for p in (p for piece in self._pieces for p in piece.parameters):
            set_state_room(p, partial(self._make_room, p))
        self._aside: list[list[torch.Tensor]] = []  # the optimizer's groups, while its own step runs
        self._undo = [
            optimizer.register_step_pre_hook(self._before).remove,
            optimizer.register_step_post_hook(self._after).remove,
            optimizer.register_load_state_dict_post_hook(lambda _: self._adopt_all()).remove,
        ]

    def close(self) -> None:
        """Give the states back to the device."""
        for undo in self._undo:
            undo()
        self._after(self._optimizer, (), {})  # a step may have failed
        with self._quiet():
            for piece in self._pieces:
                for p, state in zip(piece.parameters, self._states(piece), strict=True):
                    for key, value in state.items():
                        if isinstance(value, torch.Tensor) and value.dim():
                            state[key] = _as(p, local_of(value).to(local_of(p).device, copy=True))
        for p in (p for piece in self._pieces for p in piece.parameters):
            forget_state_room(p)

    # around the optimizer's own step

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(a is not None for a in (*args[1:], *kwargs.values())):
            raise Unsupported(
                "`optimizer.step(closure)` cannot run under this plan", hint="run forward and backward, then `optimizer.step()`"
            )
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            raise Unsupported(
                "a GradScaler leaves the scale to a fused optimizer, whose states are on the host under this plan",
                hint="build the optimizer with `fused=False`",
            )
        self._update_all([_one_by_one(group) for group in snapshot(optimizer)])
        self._aside = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in self._own]

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        for group, params in zip(optimizer.param_groups, self._aside, strict=False):  # none but in a step
            group["params"] = params
        self._aside = []

    def _update_all(self, groups: Groups) -> None:
        chaos = current()
        due = [piece for piece in (self._pieces if chaos is None else chaos.shuffled(self._pieces)) if piece.due]
        for piece in due:
            self._adopt(piece)
        slots = self._room(due)
        try:
            for piece, views in self._passing(due, slots):
                self._update(piece, views, groups)
        finally:
            for piece in due:
                if piece.ticket is not None:
                    self._lane.wait(piece.ticket)  # the slots are free for others
                    self._lane.arrived(piece.ticket)  # the loop may read the states
            if chaos is not None:
                chaos.poison(*slots)
        for piece in due:
            self._adopt(piece)  # with states that are new

    def _room(self, due: Sequence[StatePiece]) -> list[torch.Tensor]:
        """Device memory, which pieces take by turns."""
        count = min(self._slots, len(due))
        sizes = [piece.layout.nbytes for piece in due]
        slots = [torch.empty(max(sizes[n::count]), dtype=torch.uint8, device=self._device) for n in range(count)]
        chaos = current()
        if chaos is not None:
            chaos.poison(*slots)
        return slots

    def _passing(
        self, due: Sequence[StatePiece], slots: Sequence[torch.Tensor]
    ) -> Iterator[tuple[StatePiece, list[torch.Tensor]]]:
        """Every piece with its states on the device, as they are when this goes on; they are then copied back."""
        coming = [self._fetch(piece, memory, None) for piece, memory in zip(due, slots, strict=False)]
        for n, piece in enumerate(due):
            memory = slots[n % len(slots)]
            if coming[n] is not None:
                let_wait(coming[n], self._device)
            yield piece, piece.layout.views(memory)
            free = None
            if piece.ticket is None:
                self._adopt(piece)  # its first states; those of the next are made in their place
            else:
                self._lane.push(piece.ticket, memory[: piece.layout.nbytes])
                free = piece.ticket.out
            if n + len(slots) < len(due):
                coming.append(self._fetch(due[n + len(slots)], memory, free))

    def _fetch(self, piece: StatePiece, memory: torch.Tensor, after: Any) -> Any:
        """The event after which its states are on the device. `after`: who used the memory before is through with it."""
        if piece.ticket is None:
            return None
        return self._lane.pull(piece.ticket, memory[: piece.layout.nbytes], after=after)

    def _update(self, piece: StatePiece, views: Sequence[torch.Tensor], groups: Groups) -> None:
        own, due = self._states(piece), piece.due
        states = [{k: local_of(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()} for state in own]
        there = dict(zip(piece.there, views, strict=True))
        for (n, key), view in there.items():
            states[n][key] = view
        values = [local_of(piece.parameters[n]).detach() for n in due]
        grads = [_gradient(piece.parameters[n]) for n in due]
        piece.part.update(values, grads, [states[n] for n in due], groups, due)
        for n in due:
            for key, value in states[n].items():
                here = there.get((n, key))
                if here is None:
                    own[n][key] = value  # a counter, or a state that is new
                elif value is not here:
                    here.copy_(value)
            self._optimizer.state[piece.parameters[n]] = own[n]

    # where states are

    def _states(self, piece: StatePiece) -> list[_State]:
        return [self._optimizer.state.get(p) or {} for p in piece.parameters]

    def _adopt_all(self) -> None:
        for piece in self._pieces:
            self._adopt(piece)

    def _adopt(self, piece: StatePiece) -> None:
        """Move states that are not in the piece's host memory there; all into another, if there are others than before."""
        states = self._states(piece)
        local = {
            (n, key): local_of(value)
            for n, state in enumerate(states)
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and value.dim()
        }
        before = piece.there
        if {at: t.data_ptr() for at, t in local.items()} == before:
            return
        layout, old = Layout.of(like(t) for t in local.values()), piece.ticket
        if not layout.nbytes:  # the loop has dropped them, or this rank has no part of any
            for (n, key), t in local.items():
                states[n][key] = _as(piece.parameters[n], t)
            piece.ticket, piece.layout, piece.there = None, layout, {}
            if old is not None:
                self._free(old)
            return
        is_same = old is not None and layout == piece.layout and local.keys() == before.keys()
        ticket = old if is_same else self._reserve(layout)
        assert ticket is not None
        for (n, key), view in zip(local, layout.views(self._lane.memory(ticket)), strict=True):
            if not is_same or local[n, key].data_ptr() != before[n, key]:
                copy_tensor(view, local[n, key])
                states[n][key] = _as(piece.parameters[n], view)
        if not is_same and old is not None:
            self._free(old)
        for p in piece.parameters:
            for loaded in self._loaded.pop(id(p), ()):
                self._free(loaded)
        piece.ticket, piece.layout = ticket, layout
        piece.there = {(n, key): local_of(states[n][key]).data_ptr() for n, key in local}

    def _make_room(self, parameter: torch.nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        """Room for a state that a checkpoint holds; see `sharded.state_room`."""
        layout = Layout.of([like(local_of(parameter), dtype)])
        if not layout.nbytes:
            return torch.zeros_like(parameter.detach(), dtype=dtype)
        ticket = self._reserve(layout)
        self._loaded.setdefault(id(parameter), []).append(ticket)
        (view,) = layout.views(self._lane.memory(ticket))
        return _as(parameter, view)

    def _reserve(self, layout: Layout) -> Ticket:
        ticket = self._lane.reserve(layout.nbytes)
        self._elsewhere().add(self._lane.memory(ticket).untyped_storage()._cdata)
        return ticket

    def _free(self, ticket: Ticket) -> None:
        self._elsewhere().discard(self._lane.memory(ticket).untyped_storage()._cdata)
        self._lane.free(ticket)


def _as(parameter: torch.nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    """A tensor of a rank's part, spread over ranks as the parameter is."""
    return from_local(local, spec_of(parameter)) if is_shard(parameter) else local


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    grad, shape = local_of(parameter.grad), local_of(parameter).shape
    if grad.shape != shape:
        raise Unsupported(
            f"a gradient has the shape {list(grad.shape)} on this rank, and its parameter {list(shape)}",
            hint='leave gradients in their shards, or use fit(..., allow=["recompute", "offload"])',
        )
    return grad


def _one_by_one(group: dict[str, Any]) -> dict[str, Any]:
    """As torch updates DTensors: one parameter after the other, unless the user has asked for more."""
    chosen = group.get("foreach") is not None or group.get("fused") or "foreach" not in group
    return group if chosen else {**group, "foreach": False}
