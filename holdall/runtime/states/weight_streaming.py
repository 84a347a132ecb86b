"""Weights that come and go: on the device only while a module uses them, the next module's already on their way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from holdall.runtime.states.unit import PlacedUnit
from holdall.tiers import let_wait
from holdall.tiers._keepers import Keepers


class Streaming:
    """Knows which module uses which units, and brings and releases those that are streamed."""

    def __init__(
        self,
        model: torch.nn.Module,
        units: Sequence[PlacedUnit],
        calls: Sequence[str],
        *,
        store: Keepers | None,
        device: torch.device,
        tell: Callable[[torch.UntypedStorage], None],
    ) -> None:
        self._streamed = [u for u in units if u.is_streamed]
        self._store = store
        self._device = device
        self._tell = tell  # a storage has changed its size
        self._copies: dict[str, Any] = {}  # unit -> event of the copy that brings its weights
        self._returning: set[str] = set()  # units that backward will ask for again
        self._users = _find_users(model, units)
        self.after = self._neighbours(calls)  # block call -> streamed units of the next call that has any
        self._before = self._neighbours(calls[::-1])

    @property
    def is_needed(self) -> bool:
        return bool(self._streamed)

    def used_by(self, call: str) -> Sequence[PlacedUnit]:
        """The units whose parameters are used inside the module of a block call (`path`, or `path#n`)."""
        return self._users.get(call.partition("#")[0], ())

    def fetch(self, unit: PlacedUnit) -> None:
        """Take memory for the weights and start copying them."""
        if unit.is_here or unit.is_cast or self._store is None:
            return
        assert unit.flat is not None and unit.source is not None
        unit.resize(True)
        self._tell(unit.flat.untyped_storage())
        self._copies[unit.name] = self._store.pull(unit.source, unit.flat)

    def arrive(self, unit: PlacedUnit) -> None:
        """The weights are on the device when this stream goes on."""
        if unit.is_cast and not unit.is_here:
            unit.resize(True)
            assert unit.flat is not None
            self._tell(unit.flat.untyped_storage())
            unit.cast()
        elif unit.is_streamed:
            self.fetch(unit)
            self._wait(unit)
        if unit.is_streamed:
            unit.check()

    def release(self, unit: PlacedUnit) -> None:
        """Give the memory back, if it was taken."""
        if unit.is_streamed and unit.is_here:
            self._wait(unit)
            assert unit.flat is not None
            unit.resize(False)
            self._tell(unit.flat.untyped_storage())

    @property
    def units(self) -> Sequence[PlacedUnit]:
        """Those whose weights come and go."""
        return self._streamed

    def here(self) -> list[PlacedUnit]:
        """Those that take memory of the device now."""
        return [u for u in self._streamed if u.is_here]

    def release_all(self, but: Collection[PlacedUnit] = ()) -> None:
        for unit in self._streamed:
            if unit not in but:
                self.release(unit)

    def expect_backward(self, call: str) -> None:
        """The backward will come to this block call; to those that nothing trained comes before, it does not."""
        self._returning |= {unit.name for unit in self.used_by(call)}

    def backward_begins(self, call: str) -> None:
        """The backward of this block call begins: its weights are there, those of the call before it may set out."""
        users = self.used_by(call)
        for unit in self._streamed:
            if unit not in users and unit.name not in self._copies:
                self.release(unit)
        for unit in users:
            self.arrive(unit)
        for earlier in self._before.get(call, ()):
            if earlier.name in self._returning:
                self.fetch(earlier)

    def wait_if_coming(self, unit: PlacedUnit) -> None:
        """If the weights are on their way, they are on the device when this stream goes on."""
        if unit.is_streamed:
            self._wait(unit)

    def _wait(self, unit: PlacedUnit) -> None:
        event = self._copies.pop(unit.name, None)
        if event is not None:
            let_wait(event, self._device)

    def _neighbours(self, calls: Sequence[str]) -> dict[str, list[PlacedUnit]]:
        found: dict[str, list[PlacedUnit]] = {}
        following: list[PlacedUnit] = []
        for call in reversed(calls):
            found[call] = following
            following = [u for u in self.used_by(call) if u.is_streamed and not u.is_cast] or following
        return found


def _find_users(model: torch.nn.Module, units: Sequence[PlacedUnit]) -> dict[str, list[PlacedUnit]]:
    """Module path -> units whose parameters are used inside it."""
    owners: dict[int, list[PlacedUnit]] = {}
    for unit in units:
        for m in unit.members:
            for slots, _ in m.slots:
                found = owners.setdefault(id(slots), [])
                if unit not in found:
                    found.append(unit)
    users: dict[str, list[PlacedUnit]] = {}
    for path, module in model.named_modules():
        found = []
        for inner in module.modules():
            found += [u for u in owners.get(id(inner._parameters), []) if u not in found]
        users[path] = found
    return users
