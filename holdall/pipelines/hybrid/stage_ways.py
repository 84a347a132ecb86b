"""Picks a way to divide each layer of a stage: dynamic programming over layers, ways and the bytes that are left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from holdall.pipelines.hybrid.plans import stage_cost
from holdall.pipelines.hybrid.strategies import LayerCost, Pricing, Strategy

Picked = tuple[float, tuple[Strategy, ...]]  # seconds of a micro-batch, and the ways
_FEW = 6  # layers of a model for which finer steps are affordable


class StageWays:
    """For one number of micro-batches, and groups of devices with these ways."""

    def __init__(self, pricing: Pricing, choices: Sequence[Strategy], count: int, steps: int = 256) -> None:
        self.pricing, self.count, self.steps = pricing, count, steps
        self.size = pricing.model.batch // count
        self.choices = [s for s in choices if self.size % s.data == 0]
        self.layouts = sorted({s[:2] for s in self.choices})
        self.layout = np.array([self.layouts.index(s[:2]) for s in self.choices], dtype=np.intp)
        self.fine = len(pricing.model.layers) <= _FEW
        self._known: dict[tuple[tuple[int, ...], int], Picked | None] = {}
        self._changed: dict[int, npt.NDArray[np.float64]] = {}

    def least(self) -> float:
        """Seconds of a micro-batch of all layers, each in its fastest way."""
        kinds = self.pricing.model.kinds
        total = 0.0
        for kind, times in Counter(kinds).items():
            costs = [self.pricing.cost(kinds.index(kind), s, self.size) for s in self.choices]
            total += times * min((c.seconds for c in costs if c is not None), default=float("inf"))
        return total

    def stage(self, first: int, end: int, under_way: int) -> Picked | None:
        """For layers `first` to `end` with so many micro-batches under way; None: nothing fits."""
        key = (self.pricing.model.kinds[first:end], under_way)
        if key not in self._known:
            self._known[key] = self._solved(first, end, under_way)
        return self._known[key]

    def _solved(self, first: int, end: int, under_way: int) -> Picked | None:
        """What layers need for a while is set aside first, for a few values of it.

        Sums of gradients hide behind the backward of the layer, or behind others': both are tried.
        """
        table = [[self.pricing.cost(n, s, self.size) for s in self.choices] for n in range(first, end)]
        extras = sorted({c.extra for row in table for c in row if c is not None})
        least = max((min((c.extra for c in row if c is not None), default=float("inf")) for row in table), default=0.0)
        extras = [x for x in extras if least <= x < self.pricing.cluster.memory]
        most = len(extras) if self.fine else 3
        if len(extras) > most:
            extras = [extras[n * (len(extras) - 1) // (most - 1)] for n in range(most)]
        best: Picked | None = None
        for aside in extras:
            for late in (True, False):
                picked = self._programme(table, first, under_way, aside, late=late)
                if picked is not None:
                    tried = (self._seconds(picked, first, under_way), picked)
                    best = tried if best is None or tried[0] < best[0] else best
        return self._polished(best, first, under_way) if best is not None and self.fine else best

    def _seconds(self, picked: Sequence[Strategy], first: int, under_way: int) -> float:
        """Of a micro-batch, with its share of what comes once in a step; infinite: it does not fit."""
        cost = stage_cost(self.pricing, picked, first, self.size)
        if cost is None or cost.states + under_way * cost.held + cost.extra > self.pricing.cluster.memory:
            return float("inf")
        return cost.forward + cost.backward + (cost.lead + cost.tail + cost.update) / self.count

    def _polished(self, best: Picked, first: int, under_way: int) -> Picked:
        """Change one layer's way after another, or two neighbours', while that helps: sums overlap more than one layer."""
        while True:
            found = best
            for n in range(len(best[1])):
                for width in (1, 2):
                    for way in self.choices:
                        picked = (*best[1][:n], *(way for _ in best[1][n : n + width]), *best[1][n + width :])
                        found = min(found, (self._seconds(picked, first, under_way), picked), key=lambda entry: entry[0])
            if found[0] >= best[0]:
                return best
            best = found

    def _programme(
        self, table: Sequence[Sequence[LayerCost | None]], first: int, under_way: int, aside: float, *, late: bool
    ) -> tuple[Strategy, ...] | None:
        steps = max(self.steps * (2 if self.fine else 1), 16 * len(table))
        grain = (self.pricing.cluster.memory - aside) / steps
        size, columns = (len(self.choices), steps + 1), np.arange(steps + 1)
        best: npt.NDArray[np.float64] = np.zeros(size)  # (way of the last layer, bytes used at most)
        came: list[npt.NDArray[np.intp]] = []
        for n, row in enumerate(table):
            change = self._changes(first + n - 1) if n else np.zeros((len(self.layouts),) * 2)
            which = np.stack([own[best[own].argmin(axis=0)] for own in self._alike()])
            by_layout = best[which, columns]
            new, origin = np.full(size, np.inf), np.zeros(size, dtype=np.intp)
            reached: dict[int, tuple[npt.NDArray[np.float64], npt.NDArray[np.intp]]] = {}
            for j, cost in enumerate(row):
                used = _steps(cost, under_way, grain)
                if cost is None or cost.extra > aside or used > steps:
                    continue
                to = int(self.layout[j])
                if to not in reached:
                    sums = by_layout + change[:, to, None]
                    at = sums.argmin(axis=0)
                    reached[to] = (sums[at, columns], which[at, columns])
                value, via = reached[to]
                once = cost.once if late else cost.lead + cost.update
                new[j, used:] = value[: steps + 1 - used] + cost.seconds + once / self.count
                origin[j, used:] = via[: steps + 1 - used]
            best = new
            came.append(origin)
        j, left = int(best[:, steps].argmin()), steps
        if not np.isfinite(best[j, left]):
            return None
        picked: list[Strategy] = []
        for n in range(len(table) - 1, -1, -1):
            picked.append(self.choices[j])
            j, left = int(came[n][j, left]), left - _steps(table[n][j], under_way, grain)
        return tuple(reversed(picked))

    def _alike(self) -> list[npt.NDArray[np.intp]]:
        """Ways that divide the batch alike."""
        return [np.flatnonzero(self.layout == a) for a in range(len(self.layouts))]

    def _changes(self, layer: int) -> npt.NDArray[np.float64]:
        """(way before, way after) -> seconds to divide a layer's output anew."""
        nbytes, ways = self.pricing.model.layers[layer].output, [Strategy(*a) for a in self.layouts]
        if nbytes not in self._changed:
            pairs = [[self.pricing.relayout(layer, a, b, self.size) for b in ways] for a in ways]
            self._changed[nbytes] = np.array(pairs)
        return self._changed[nbytes]


def _steps(cost: LayerCost | None, under_way: int, grain: float) -> int:
    """Of memory, rounded up."""
    return 0 if cost is None else int(np.ceil((cost.states + under_way * cost.held) / grain - 1e-9))
