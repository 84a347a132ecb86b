"""Streams weights: on the device only while a module uses them, with those of the next modules prefetched."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from holdall.runtime.states.unit import PlacedUnit
from holdall.tiers import let_wait
from holdall.tiers._keepers import Keepers


class Streaming:
    """Knows which module uses which units, and fetches and frees the streamed ones."""

    def __init__(
        self,
        model: torch.nn.Module,
        units: Sequence[PlacedUnit],
        calls: Sequence[str],
        *,
        store: Keepers | None,
        device: torch.device,
        tell: Callable[[torch.UntypedStorage], None],
        prefetch: int = 1,
    ) -> None:
        self._streamed = [u for u in units if u.is_streamed]
        self._store = store
        self._device = device
        self._tell = tell  # called when a storage changes its size
        self._copies: dict[str, Any] = {}  # unit -> event of the copy that fetches its weights
        self._returning: set[str] = set()  # units that backward will need again
        self._users = _find_users(model, units)
        self.after = self._neighbours(calls, prefetch)  # block call -> streamed units of the next calls that have any
        self._before = self._neighbours(calls[::-1], prefetch)

    @property
    def is_needed(self) -> bool:
        return bool(self._streamed)

    def used_by(self, call: str) -> Sequence[PlacedUnit]:
        """The units whose parameters are used inside the module of a block call (`path`, or `path#n`)."""
        return self._users.get(call.partition("#")[0], ())

    def fetch(self, unit: PlacedUnit) -> None:
        """Allocate memory for the weights and start the copy."""
        if unit.is_here or unit.is_cast or self._store is None:
            return
        assert unit.flat is not None and unit.source is not None
        unit.resize(True)
        self._tell(unit.flat.untyped_storage())
        self._copies[unit.name] = self._store.pull(unit.source, unit.flat)

    def arrive(self, unit: PlacedUnit) -> None:
        """Make the current stream wait until the weights are on the device; fetch them first if necessary."""
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
        """Free the device memory, if allocated."""
        if unit.is_streamed and unit.is_here:
            self._wait(unit)
            assert unit.flat is not None
            unit.resize(False)
            self._tell(unit.flat.untyped_storage())

    @property
    def units(self) -> Sequence[PlacedUnit]:
        """The streamed units."""
        return self._streamed

    def here(self) -> list[PlacedUnit]:
        """The streamed units on the device."""
        return [u for u in self._streamed if u.is_here]

    def release_all(self, but: Collection[PlacedUnit] = ()) -> None:
        for unit in self._streamed:
            if unit not in but:
                self.release(unit)

    def expect_backward(self, call: str) -> None:
        """The backward will reach this block call; it skips calls that nothing trained precedes."""
        self._returning |= {unit.name for unit in self.used_by(call)}

    def backward_begins(self, call: str) -> None:
        """The backward of this block call begins: wait for its weights and prefetch those of the previous calls."""
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
        """If the weights are being fetched, make the current stream wait for them."""
        if unit.is_streamed:
            self._wait(unit)

    def _wait(self, unit: PlacedUnit) -> None:
        event = self._copies.pop(unit.name, None)
        if event is not None:
            let_wait(event, self._device)

    def _neighbours(self, calls: Sequence[str], count: int) -> dict[str, list[PlacedUnit]]:
        """Call -> the units of the next `count` calls that stream any, the nearest first."""
        found: dict[str, list[PlacedUnit]] = {}
        following: list[list[PlacedUnit]] = []
        for call in reversed(calls):
            found[call] = [unit for units in following for unit in units]
            streams = [u for u in self.used_by(call) if u.is_streamed and not u.is_cast]
            following = [streams, *following][:count] if streams else following
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
