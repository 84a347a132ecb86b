"""Optimizer states of a sharded model in host memory: at a step they pass through the device, piece by piece.

Parameters and gradients stay where torch's engine has them. Before the optimizer's own step, every piece is copied into a slot
on the device, its update is made there, and it is copied back, while the next is on its way into another slot. The update is
the user's rule over this rank's parts: plain tensors that share memory with the shards (`updates/parts.py`). The optimizer's own
step then updates what is left.

`optimizer.state` holds the states as ever, as DTensors whose local part is in host memory; when a step is over, so are its
copies. States that the loop loads or makes itself move there before they are next used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from holdall.errors import Unsupported
from holdall.runtime.states.packing import Layout, like
from holdall.sharded import from_local, is_shard, local_of, spec_of
from holdall.tiers import Ticket, let_wait
from holdall.tiers._buffers import copy_tensor
from holdall.tiers._chaos import current
from holdall.tiers._keepers import Keepers
from holdall.updates.parts import Groups, Part, snapshot

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness

_State = dict[str, Any]


def put_states_on_host(harness: Harness, pieces: Sequence[Sequence[str]], *, slots: int) -> None:
    """For the model and the optimizer of a harness, until its plan leaves the model."""
    if harness.optimizer is None:
        return
    named = dict(harness.model.named_parameters())

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


@dataclass(slots=True, eq=False)
class Piece:
    """Parameters whose states are one piece of host memory."""

    parameters: Sequence[torch.nn.Parameter]
    part: Part
    ticket: Ticket | None = None
    layout: Layout = field(default_factory=lambda: Layout((), 0))
    keys: list[tuple[int, str]] = field(default_factory=list)  # in the layout's order: (parameter, name of the state)

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
        self._pieces = [Piece(parameters, Part(optimizer, parameters)) for parameters in pieces]
        self._own = {id(p) for piece in self._pieces for p in piece.parameters}
        self._lane = store.lane()
        self._device = device
        self._slots = slots
        self._quiet = quiet
        self._elsewhere = elsewhere
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
        with self._quiet():
            for piece in self._pieces:
                for p, state in zip(piece.parameters, self._states(piece), strict=True):
                    for key, value in state.items():
                        if isinstance(value, torch.Tensor) and value.dim():
                            state[key] = _as(p, local_of(value).to(local_of(p).device, copy=True))
                self._free(piece)

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
        for group, params in zip(optimizer.param_groups, self._aside, strict=True):
            group["params"] = params

    def _update_all(self, groups: Groups) -> None:
        due = [piece for piece in self._pieces if piece.due]
        for piece in due:
            self._adopt(piece)
        slots = self._room(due)
        try:
            for _ in self._passing(due, slots):
                self._update(*_, groups)
        finally:
            for piece in due:
                if piece.ticket is not None:
                    self._lane.wait(piece.ticket)  # the slots are free for others
                    self._lane.arrived(piece.ticket)  # the loop may read the states
            chaos = current()
            if chaos is not None:
                chaos.poison(*slots)
        for piece in due:
            self._adopt(piece)  # states that this step has made

    def _room(self, due: Sequence[Piece]) -> list[torch.Tensor]:
        """Device memory, which pieces take by turns."""
        count = min(self._slots, len(due))
        sizes = [piece.layout.nbytes for piece in due]
        slots = [torch.empty(max(sizes[n::count]), dtype=torch.uint8, device=self._device) for n in range(count)]
        chaos = current()
        if chaos is not None:
            chaos.poison(*slots)
        return slots

    def _passing(self, due: Sequence[Piece], slots: Sequence[torch.Tensor]) -> Iterator[tuple[Piece, list[torch.Tensor]]]:
        """Every piece with its states on the device, as they are when this goes on; they are then copied back."""
        coming = [self._fetch(piece, memory, None) for piece, memory in zip(due, slots, strict=False)]
        for n, piece in enumerate(due):
            memory = slots[n % len(slots)]
            if coming[n] is not None:
                let_wait(coming[n], self._device)
            yield piece, piece.layout.views(memory)
            if piece.ticket is None:
                free = None
            else:
                self._lane.push(piece.ticket, memory[: piece.layout.nbytes])
                free = piece.ticket.out
            if n + len(slots) < len(due):
                coming.append(self._fetch(due[n + len(slots)], memory, free))

    def _fetch(self, piece: Piece, memory: torch.Tensor, after: Any) -> Any:
        """The event after which its states are on the device. `after`: who used the memory before is through with it."""
        if piece.ticket is None:
            return None
        return self._lane.pull(piece.ticket, memory[: piece.layout.nbytes], after=after)

    def _update(self, piece: Piece, views: Sequence[torch.Tensor], groups: Groups) -> None:
        own, due = self._states(piece), piece.due
        states = [dict(state) for state in own]
        there = dict(zip(piece.keys, views, strict=True))
        for (n, key), view in there.items():
            states[n][key] = view
        values = [local_of(piece.parameters[n]).detach() for n in due]
        grads = [_gradient(piece.parameters[n]) for n in due]
        piece.part.update(values, grads, [states[n] for n in due], groups, due)
        for n in due:
            for key, value in states[n].items():
                view = there.get((n, key))
                if view is None:
                    own[n][key] = value  # a counter, or a state that is new
                elif value is not view:
                    view.copy_(value)
            self._optimizer.state[piece.parameters[n]] = own[n]

    # where states are

    def _states(self, piece: Piece) -> list[_State]:
        return [self._optimizer.state.get(p) or {} for p in piece.parameters]

    def _adopt_all(self) -> None:
        for piece in self._pieces:
            self._adopt(piece)

    def _adopt(self, piece: Piece) -> None:
        """Move states that are not in the piece's host memory there; into another piece of it if there are others now."""
        states = self._states(piece)
        keys = [(n, key) for n, s in enumerate(states) for key, v in s.items() if isinstance(v, torch.Tensor) and v.dim()]
        if not keys and not piece.keys:
            return
        local = [local_of(states[n][key]) for n, key in keys]
        layout = Layout.of(like(t) for t in local)
        is_new = layout != piece.layout or keys != piece.keys
        ticket = self._lane.reserve(layout.nbytes) if is_new or piece.ticket is None else piece.ticket
        memory = self._lane.memory(ticket)
        self._elsewhere().add(memory.untyped_storage()._cdata)
        for (n, key), t, view in zip(keys, local, layout.views(memory), strict=True):
            if t.data_ptr() == view.data_ptr() and t.device == view.device:
                continue
            copy_tensor(view, t)
            with self._quiet():
                states[n][key] = _as(piece.parameters[n], view)
        if is_new:
            self._free(piece)
        piece.ticket, piece.layout, piece.keys = ticket, layout, keys

    def _free(self, piece: Piece) -> None:
        if piece.ticket is not None:
            self._elsewhere().discard(self._lane.memory(piece.ticket).untyped_storage()._cdata)
            self._lane.free(piece.ticket)
            piece.ticket = None


def _as(parameter: torch.nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    """A tensor of a rank's part, spread over ranks as the parameter is."""
    return from_local(local, spec_of(parameter)) if is_shard(parameter) else local


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    grad = local_of(parameter.grad)
    if grad.shape != local_of(parameter).shape:
        raise Unsupported(
            f"a gradient of shape {list(grad.shape)} is not in the shards of its parameter, which is {list(local_of(parameter).shape)} here",
            hint='leave gradients as they are, or use fit(..., allow=["recompute", "offload"])',
        )
    return grad


def _one_by_one(group: dict[str, Any]) -> dict[str, Any]:
    """As torch updates DTensors: one parameter after the other, unless the user has asked for more."""
    chosen = group.get("foreach") is not None or group.get("fused") or "foreach" not in group
    return group if chosen else {**group, "foreach": False}
