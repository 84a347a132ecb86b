"""Units at run time: where parameters live, and what modules compute with.

The user's parameter stays where its unit's update is made, in its own precision: the master. Where that is
not the device, or the model computes in a lower precision, modules get a *working* parameter while a step runs: a view into one
flat buffer per unit on the device, so that a unit moves by one copy.

    master    p.data, `optimizer.param_groups`, `state_dict()`     on the device, or in host memory
    working   `module._parameters[...]` from forward to the end of backward; autograd's leaf
    buffer    in host memory: the gradient on its way to the update, then the new weights on their way back
    chunk     in host memory: masters and optimizer states of a unit that is updated via the device
    sections  in a farther tier: masters and optimizer states of a unit that is updated in stretches
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdall.errors import HoldallError, Unsupported
from holdall.runtime.states.packing import Layout, like
from holdall.runtime.states.torn import check_whole
from holdall.runtime.states.weights.slots import Slots
from holdall.tiers import Ticket
from holdall.tiers._buffers import copy_tensor
from holdall.tiers._chaos import current
from holdall.tiers._keepers import Keepers

RESIDENT, STREAMED = "resident", "streamed"
DEVICE, HOST, VIA_DEVICE = "device", "host", "via_device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The plan's placement of a unit."""

    unit: str
    params: tuple[str, ...]
    weights: str = RESIDENT  # or streamed: on the device only while they are used
    update: str = DEVICE  # or host, or through the device with states that live on the host
    tier: str = ""  # where the rest of it lies; empty: in the nearest tier
    states: str = ""  # where masters and states of a host update lie; empty: in the nearest tier


@dataclass(slots=True, eq=False)
class Member:
    """One parameter of a unit."""

    master: torch.nn.Parameter
    working: torch.nn.Parameter  # `master` itself if the module can compute with it
    slots: list[tuple[dict[str, Any], str]]  # where modules hold it
    trained: bool
    came_from: torch.device
    version: int = 0  # version of the master when the working copy was last made
    required: bool = True  # `requires_grad` of both when the module last got the working copy
    is_heard: bool = False  # the working copy has a gradient hook

    @property
    def is_swapped(self) -> bool:
        return self.working is not self.master

    def hand_over(self, *, instead: bool = False) -> None:
        """Move a gradient of the working copy that no unit's update waits for to the master, where the loop expects it."""
        grad, self.working.grad = self.working.grad, None
        if grad is None:
            return
        with torch.no_grad():
            grad = grad.detach().to(device=self.master.device, dtype=self.master.dtype)
            if self.master.grad is None or instead:
                self.master.grad = grad
            else:
                self.master.grad.add_(grad)


class PlacedUnit:
    """Parameters that move together. The engine decides what happens to them and when."""

    def __init__(self, placement: Placement, members: list[Member], *, device: torch.device, dtype: torch.dtype | None) -> None:
        self.name = placement.unit
        self.placement = placement
        self.members = members
        self.device = device
        self.trained = [m for m in members if m.trained]
        self.is_narrow = dtype is not None and any(m.master.dtype == torch.float32 for m in members)
        self._dtype = dtype
        self.layout = Layout.of(like(m.master, self.width(m)) for m in members)
        self.grads = Layout.of(like(m.master, self.width(m)) for m in self.trained)
        self.wide = Layout.of(like(m.master) for m in self.trained)  # in the masters' precision
        self.flat: torch.Tensor | None = None  # working weights
        self.buffer: Ticket | None = None
        self.source: Ticket | None = None  # host memory that working weights are fetched from
        self.masters: Ticket | None = None  # host memory of the masters
        self.far_masters: Ticket | None = None  # trained ones in a farther tier, if they are updated in stretches
        self.is_torn = False  # an error interrupted an update in stretches: some are new, some are old
        self.is_here = True  # the working weights are on the device or being fetched
        self.updated: tuple[int, ...] = ()  # trained members changed by the latest update
        self.is_doubtful = False  # the masters may have been written without a new version
        self.follows = True  # remake working copies when the masters are written
        self.due = 0  # number of updates requested
        self.made = 0  # number of the update that the working weights, or their source on the host, are from
        self.fetched = 0  # the same for streamed weights at their last fetch
        self.turn = -1  # the forward in which its weights were last found up to date on the device (`weights/slots.py`)

    def width(self, member: Member) -> torch.dtype:
        """The dtype that the module computes with."""
        narrow = self._dtype is not None and member.master.dtype == torch.float32
        return self._dtype if narrow and self._dtype is not None else member.master.dtype

    @property
    def update(self) -> str:
        return self.placement.update

    @property
    def is_streamed(self) -> bool:
        return self.placement.weights == STREAMED

    @property
    def is_cast(self) -> bool:
        """Are the working weights cast from masters on the device at each use?"""
        is_whole = bool(self.trained) and len(self.trained) == len(self.members)
        return self.is_streamed and self.update == DEVICE and self.is_narrow and is_whole

    @property
    def stays(self) -> bool:
        """Are the masters on the device?"""
        return self.update == DEVICE and (self.is_cast or not self.is_streamed)

    @property
    def is_away(self) -> bool:
        """Are masters and states in a farther tier, and updated in stretches?"""
        return bool(self.placement.states) and self.update == HOST and bool(self.trained)

    @property
    def needs_working(self) -> bool:
        """Do modules get working copies instead of the masters?"""
        return self.is_narrow or self.update != DEVICE or self.is_streamed

    def keeps(self, member: Member) -> bool:
        """Is a member's master on the device? Frozen masters in a higher precision are not."""
        return self.stays and (member.trained or not self.is_narrow)

    @property
    def is_whole(self) -> bool:
        """Does every member get a gradient that the unit's update waits for?"""
        return all(m.trained and m.working.requires_grad for m in self.members)

    @property
    def expected(self) -> int:
        """Number of gradients per backward: trained members that the loop has not frozen since."""
        return sum(m.working.requires_grad for m in self.trained)

    # setting up and taking down

    def far_bytes(self, *, into_store: bool, share: bool) -> dict[str, int]:
        """Bytes that it will ask of each tier's store when it is set up."""
        in_store = not self.stays and (into_store or not self.is_narrow)
        masters = Layout.of(like(m.master) for m in at_home(self)).nbytes if in_store else 0
        buffer = self.grads.nbytes if self.update != DEVICE and self.trained else 0
        shared = share and buffer == self.layout.nbytes
        is_fetched = self.is_streamed and self.is_narrow and not self.is_cast
        source = self.layout.nbytes if is_fetched and not shared else 0
        asked = {self.placement.tier: buffer + source}
        asked[self._tier_of_masters] = asked.get(self._tier_of_masters, 0) + masters
        if self.is_away:
            asked[self.placement.states] = asked.get(self.placement.states, 0) + self.wide.nbytes
        return asked

    @property
    def _tier_of_masters(self) -> str:
        """Homes that are wider than the weights lie with the states, where the host updates them."""
        return "" if self.is_narrow else self.placement.tier

    def settle_homes(self, store: Keepers | None, *, into_store: bool) -> None:
        """Bring every master to where its update happens. `into_store`: the host's memory is only what the store gives."""
        if self.is_away:
            _settle_masters(self, store)
        if self.stays or store is None or (self.is_narrow and not into_store):
            for m in at_home(self):
                to = self.device if self.keeps(m) else torch.device("cpu")
                if m.master.device != to:
                    m.master.data = m.master.data.to(to)
            return
        if not at_home(self):
            return
        layout = Layout.of(like(m.master) for m in at_home(self))
        self.masters = store.reserve(layout.nbytes, pinned=not self.is_narrow, tier=self._tier_of_masters)
        for m, view in zip(at_home(self), layout.views(store.memory(self.masters)), strict=True):
            copy_tensor(view, m.master.data)
            m.master.data = view
        if not self.is_narrow:
            self.source = self.masters

    def make_work(self) -> None:
        """Create the working parameters and fill them from the masters."""
        if not self.needs_working:
            return
        self.flat = torch.empty(self.layout.nbytes, dtype=torch.uint8, device=self.device)
        for m, view in zip(self.members, self.layout.views(self.flat), strict=True):
            copy_tensor(view, m.master.data)
            m.working = torch.nn.Parameter(view, requires_grad=m.master.requires_grad)
            m.version, m.required = m.master._version, m.master.requires_grad

    def make_buffers(self, store: Keepers, *, share: bool) -> None:
        """Room on the host for gradients, and for weights that are fetched again and again."""
        if self.update != DEVICE and self.trained:
            self.buffer = store.reserve(self.grads.nbytes, tier=self.placement.tier)
        if self.is_streamed and not self.is_cast and self.source is None:
            shared = share and self.buffer is not None and self.buffer.nbytes == self.layout.nbytes
            self.source = self.buffer if shared else store.reserve(self.layout.nbytes, tier=self.placement.tier)
            assert self.flat is not None and self.source is not None
            copy_tensor(store.memory(self.source), self.flat)

    def begin_update(self, which: Iterable[int]) -> None:
        """Mark the working weights of these trained members as stale, also for graphs that saved them."""
        self.due += 1
        self.turn = -1
        torch.autograd.graph.increment_version([self.trained[n].working for n in which if self.trained[n].is_swapped])
        chaos = current()
        if chaos is not None and self.flat is not None and self.is_here:
            views = [v for v, m in zip(self.layout.views(self.flat), self.members, strict=True) if m.trained]
            chaos.poison(*(views[n] for n in which))

    def end_update(self) -> None:
        """The latest update is finished: its weights can be used or fetched."""
        self.made = self.due

    def check(self) -> None:
        """Raise if the weights are stale or not on the device."""
        check_whole(self)
        of = self.fetched if self.is_streamed and not self.is_cast else self.made
        if of != self.due or self.made != self.due or (self.needs_working and not self.is_here):
            what = f"they are of update {of}, not of {self.due}" if self.is_here else "they are not on the device"
            raise HoldallError(
                f"the weights of `{self.name}` cannot be computed with: {what}",
                hint='this is a bug in holdall: please report it; fit(..., allow={"recompute", "offload"}) may avoid it',
            )
        if self.flat is not None and self._was_replaced(self.flat):
            raise Unsupported(
                f"the memory of a weight of `{self.name}` was replaced during a forward (`p.data = ...`, `p.set_(...)`)",
                hint='write into it instead (`p.copy_(...)`), or use fit(..., allow={"recompute", "offload"})',
            )

    def _was_replaced(self, flat: torch.Tensor) -> bool:
        """Does a working weight no longer share the memory that is fetched into?"""
        with torch._C.DisableTorchFunction():
            return any(
                m.is_swapped and m.working.untyped_storage()._cdata != flat.untyped_storage()._cdata for m in self.members
            )

    def was_written(self) -> bool:
        """Was a master written to since the working copies were made?"""
        return self.follows and (self.is_doubtful or any(m.version != m.master._version for m in self.members))

    def note_versions(self) -> None:
        for m in self.members:
            m.version = m.master._version

    def note_update(self) -> None:
        """The update made the working copies of the members it changed; writes by the loop to others are still pending."""
        for n in self.updated:
            self.trained[n].version = self.trained[n].master._version
        self.is_doubtful &= len(self.updated) < len(self.members)

    def copy_from_homes(self, store: Keepers | None) -> None:
        """The masters have new values; what was made from them follows."""
        if not self.needs_working:
            return
        self.note_versions()
        self.is_doubtful = False
        if self.is_here:
            assert self.flat is not None
            for view, m in zip(self.layout.views(self.flat), self.members, strict=True):
                copy_tensor(view, m.master.data)
        if self.is_streamed and not self.is_cast and self.source not in (self.masters, self.far_masters):
            assert store is not None and self.source is not None
            for view, m in zip(self.layout.views(store.memory(self.source)), self.members, strict=True):
                copy_tensor(view, m.master.data)

    # locations

    def check_slots(self) -> None:
        """Raise if a module no longer holds a parameter that was placed."""
        for m in self.members:
            for slots, name in m.slots:
                if m.is_swapped and slots.get(name) is not m.master:
                    raise Unsupported(
                        f"`{name}` of `{self.name}` is another parameter than when the plan was applied",
                        hint="write into it (`p.copy_(...)`), or call `harness.close()`, replace it, and call `fit` again",
                    )

    def swap_in(self) -> bool:
        """Give modules the working copies; returns whether `requires_grad` of any has changed."""
        is_changed = False
        for m in self.members:
            if m.is_swapped:
                for slots, name in m.slots:
                    slots[name] = m.working
                    if isinstance(slots, Slots):
                        slots.units[name] = self
                if m.master.requires_grad != m.required:
                    m.required = m.master.requires_grad
                    m.working.requires_grad_(m.required)
                    is_changed = True
        return is_changed

    def swap_out(self) -> None:
        for m in self.members:
            if m.is_swapped:
                for slots, name in m.slots:
                    slots[name] = m.master
                    if isinstance(slots, Slots):
                        slots.units.pop(name, None)
                if m.working.requires_grad != m.required:  # changed by the loop since
                    m.master.requires_grad_(m.working.requires_grad)

    def resize(self, present: bool) -> None:
        """Allocate or free the device memory of the working weights."""
        assert self.flat is not None
        chaos = current()
        if chaos is not None and not present and self.is_here:
            chaos.poison(self.flat)
        self.flat.untyped_storage().resize_(self.layout.nbytes if present else 0)
        if chaos is not None and present:
            chaos.poison(self.flat)
        self.is_here = present
        self.fetched = self.made
        self.turn = -1

    def cast(self) -> None:
        """Fill the working weights from masters on the device."""
        assert self.flat is not None
        with torch.no_grad():
            torch._foreach_copy_(self.layout.views(self.flat), [m.master.detach() for m in self.members])

    def weights(self) -> list[torch.Tensor]:
        """The working weights of the trained members."""
        return [m.working.detach() for m in self.trained]

    @property
    def returns_in_buffer(self) -> bool:
        """Do the new working weights overwrite the gradient on the host?"""
        return self.is_narrow and (not self.is_streamed or self.source is self.buffer)

    def host_weights(self, store: Keepers) -> list[torch.Tensor]:
        """Where the new working weights of the trained members are written on the host; empty: the masters are they."""
        if not self.is_narrow:
            return []
        if self.is_streamed and self.source is not None and self.source is not self.buffer:
            every = self.layout.views(store.memory(self.source))
            return [v for v, m in zip(every, self.members, strict=True) if m.trained]
        assert self.buffer is not None
        return self.grads.views(store.memory(self.buffer))


def at_home(unit: PlacedUnit) -> list[Member]:
    """Members whose masters are not in a farther tier."""
    return [m for m in unit.members if not (unit.is_away and m.trained)]


def _settle_masters(unit: PlacedUnit, store: Keepers | None) -> None:
    """Masters that are updated in stretches, to their tier; working weights of the same precision come from there."""
    assert store is not None and (unit.is_narrow or len(unit.trained) == len(unit.members))
    unit.far_masters = store.reserve(unit.wide.nbytes, tier=unit.placement.states)
    for m, view in zip(unit.trained, unit.wide.views(store.memory(unit.far_masters)), strict=True):
        copy_tensor(view, m.master.data)
        m.master.data = view
    if not unit.is_narrow:
        unit.source = unit.far_masters


def find_members(model: torch.nn.Module, names: Sequence[str], trained: set[int]) -> Iterator[Member]:
    """The parameters of these names, with every place where a module holds them."""
    slots: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                slots.setdefault(id(p), []).append((module._parameters, name))
    for name in names:
        p = model.get_parameter(name)
        yield Member(master=p, working=p, slots=slots[id(p)], trained=id(p) in trained and p.requires_grad, came_from=p.device)
