"""Lower bounds on the seconds of a step, known before it is simulated: they let a search skip candidates.

Three resources work in parallel, and a step ends when the last of them does: the device computes, the host updates, the link
copies. Each has a fixed amount of work, in any order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from holdall.actions.place import Place
from holdall.cost.link import link_rate
from holdall.cost.updates import host_seconds
from holdall.planning.menus import MenuLine
from holdall.types import Phase, Problem

_SAFE = 0.999  # of every bound, since sums of floats depend on their order


@dataclass(frozen=True, slots=True)
class Extra:
    """The extra work of actions on activations: device seconds, bytes from the device, bytes back."""

    seconds: float = 0.0
    out: int = 0
    back: int = 0

    @staticmethod
    def of(lines: Iterable[MenuLine]) -> Extra:
        found = list(lines)
        return Extra(sum(c.seconds for c in found), sum(c.out for c in found), sum(c.back for c in found))


class Bounds:
    """Lower bounds for the placements of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._known: dict[Place, tuple[float, int, int]] = {}
        self._units = {u.name: u for u in problem.trace.units}

    def step(self, place: Place | None, extra: Extra) -> float:
        """The bound for a step with this placement and this work beyond plain training."""
        compute, far = self._compute + extra.seconds, self._problem.hardware.far
        if far is None or not self._problem.hardware.overlap:
            return _SAFE * compute
        host, into, out = self._elsewhere(place) if place is not None else (0.0, 0, 0)
        link = max((into + extra.back) / self._rates[0], (out + extra.out) / self._rates[1])
        return _SAFE * max(compute, host, link)

    @cached_property
    def _rates(self) -> tuple[float, float]:
        """Bytes per second to the device and from it, over all links at once."""
        hardware, home = self._problem.hardware, self._problem.home
        names = [tier.name for tier in hardware.others]
        return sum(link_rate(hardware, name, home) for name in names), sum(link_rate(hardware, home, name) for name in names)

    @cached_property
    def _compute(self) -> float:
        """Seconds of forward and backward; updates may run elsewhere."""
        return sum(op.seconds for op in self._problem.trace.ops if op.site.phase is not Phase.STEP)

    def _elsewhere(self, place: Place) -> tuple[float, int, int]:
        """The work of a placement outside the device: host seconds, bytes to the device, bytes from it."""
        if place not in self._known:
            host, into, out = 0.0, 0, 0
            for name, weights, update in place.units:
                unit = self._units[name]
                if update == "device" or not unit.numel or not unit.grads:
                    continue
                grads, states = self._bytes(unit.grads), self._bytes(unit.states)
                out += grads
                if update == "host":
                    host += host_seconds(unit, self._problem.trace, self._problem.hardware)
                    into += 2 * self._bytes(unit.weights) if weights == "streamed" else grads
                else:
                    into += states + grads
                    out += states
            self._known[place] = host, into, out
        return self._known[place]

    def _bytes(self, tensors: tuple[int, ...]) -> int:
        return sum(self._problem.trace.tensors[x].nbytes for x in tensors)
