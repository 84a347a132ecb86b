"""Makes every read of a weight find the latest value on the device.

A module looks up its parameters in `module._parameters`. While the engine is on, that is a `Slots`: any code that reads a
working weight (the module's forward, its parent, a hook, a lazy tensor) gets one whose update is finished and which is on the
device. A block call's weights are fetched before the call, so a lookup there compares two integers; every other reader waits
here. (DeepSpeed's ZeRO-3 detects reads from outside a parameter's module in the same way.)

Iterating over all parameters waits for their updates but fetches nothing: most iterations ask for a dtype or a device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from holdall.runtime.states.unit import PlacedUnit


class WeightReads:
    """Shared by all slots of a model: the number of the forward, and the functions that bring a unit up to date."""

    __slots__ = ("bring", "turn", "wait")

    def __init__(self, bring: Callable[[PlacedUnit], None], wait: Callable[[PlacedUnit], None]) -> None:
        self.turn = 0  # units with this `turn` can be read
        self.bring = bring  # finishes the update and fetches the unit
        self.wait = wait  # finishes the update


class Slots(dict[str, Any]):
    """The parameters of one module."""

    __slots__ = ("reads", "units")

    def __init__(self, values: dict[str, Any], reads: WeightReads) -> None:
        super().__init__(values)
        self.reads = reads
        self.units: dict[str, PlacedUnit] = {}  # name -> the unit of the working weight there now

    def __getitem__(self, name: str) -> Any:
        unit = self.units.get(name)
        if unit is not None and unit.turn != self.reads.turn:
            self.reads.bring(unit)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:  # type: ignore[override]
        return self[name] if name in self else default  # noqa: SIM401 - this is what `get` is

    def items(self) -> Any:
        self._wait()
        return super().items()

    def values(self) -> Any:
        self._wait()
        return super().values()

    def _wait(self) -> None:
        for unit in self.units.values():
            if unit.turn != self.reads.turn:
                self.reads.wait(unit)

    # a copy of the module gets a plain dict

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: copy.deepcopy(value, memo) for name, value in self.items()}

    def __reduce__(self) -> Any:
        return dict, (list(self.items()),)

    def __copy__(self) -> dict[str, Any]:
        return dict(self.items())

    def copy(self) -> dict[str, Any]:
        return dict(self.items())


def put_slots(model: torch.nn.Module, reads: WeightReads) -> Callable[[], None]:
    """Replace the parameter dict of every module by `Slots`; call the result to undo it."""
    before: list[tuple[torch.nn.Module, dict[str, Any]]] = []
    for module in _with_parameters(model):
        before.append((module, module._parameters))
        module.__dict__["_parameters"] = Slots(module._parameters, reads)

    def undo() -> None:
        for module, plain in before:
            now = dict.items(module._parameters)
            plain.clear()
            plain.update(now)
            module.__dict__["_parameters"] = plain

    return undo


def weights_of(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """What `model.parameters()` yields, without waiting for updates: for whoever looks at identities and not at values."""
    found: dict[int, torch.nn.Parameter] = {}
    for module in _with_parameters(model):
        found.update((id(p), p) for p in dict.values(module._parameters) if p is not None)
    return list(found.values())


def _with_parameters(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    return (module for module in model.modules() if module._parameters)
