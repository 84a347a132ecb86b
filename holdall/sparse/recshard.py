"""RecShard (Sethi et al., ASPLOS 2022): which GPU has which embedding table, and which rows of it, by how often rows are used.

Rows of a table are used by a power law, and many never. So the rows used most are in a GPU's memory, the others on the host,
from which the GPU reads them slowly. What decides is measured from a sample of lookups (`TableUse`): counts of rows, how many
a sample looks up (pooling), and how many samples look up at all (coverage). For every table the curve "rows that serve a share
of the lookups" is cut into `steps` points, and an integer program chooses one point and one GPU for each, so that the GPU with
most to do does least. The load of a table is

    coverage * pooling * row bytes * batch * (share / device rate + (1 - share) / host rate)

seconds: predicted, of lookups alone. `hot_rows.py` is a table that runs so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import torch

from holdall.errors import Infeasible, InvalidInput
from holdall.types.trace import Bytes, Seconds
from holdall.units import format_bytes


class RowSplit(NamedTuple):
    """So many of the rows used most, and their share of the lookups."""

    rows: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TableUse:
    """A table, and how a sample of lookups used it."""

    counts: torch.Tensor  # of lookups, row by row
    row_bytes: Bytes
    pooling: float = 1.0  # rows that a sample looks up, if it does
    coverage: float = 1.0  # share of samples that look up

    @staticmethod
    def measured(indices: torch.Tensor, offsets: torch.Tensor, *, rows: int, row_bytes: Bytes) -> TableUse:
        """From lookups as `nn.EmbeddingBag` takes them: bag n begins at `offsets[n]`."""
        if not len(offsets):
            raise InvalidInput("there is no bag to count", hint="give a sample of the lookups")
        lengths = torch.diff(offsets, append=offsets.new_tensor([len(indices)]))
        present = int((lengths > 0).sum())
        return TableUse(
            counts=torch.bincount(indices, minlength=rows),
            row_bytes=row_bytes,
            pooling=len(indices) / max(1, present),
            coverage=present / len(offsets),
        )

    @property
    def rows(self) -> int:
        return len(self.counts)

    @property
    def nbytes(self) -> Bytes:
        return self.rows * self.row_bytes

    def splits(self, steps: int) -> list[RowSplit]:
        """Points of the curve, from no row to all: the fewest rows that serve each share of the lookups, in equal steps."""
        curve = torch.cumsum(self.counts.sort(descending=True).values.double(), 0)
        total = float(curve[-1]) if self.rows else 0.0
        found = {0: 0.0}
        if total:
            for step in range(1, steps + 1):
                rows = min(int(torch.searchsorted(curve, total * step / steps)) + 1, self.rows)
                found[rows] = float(curve[rows - 1]) / total
        found[self.rows] = 1.0
        return [RowSplit(rows, share) for rows, share in sorted(found.items())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memories:
    """Of one GPU: room and bytes per second of its own memory, and of the host's, as the GPU sees it."""

    device: Bytes
    device_rate: float
    host: Bytes
    host_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlan:
    """For each table its GPU and its split; the seconds of every GPU's lookups, predicted."""

    gpus: tuple[int, ...]
    splits: tuple[RowSplit, ...]
    loads: tuple[Seconds, ...]

    @property
    def slowest(self) -> Seconds:
        return max(self.loads)


def load_of(table: TableUse, split: RowSplit, memories: Memories, batch: int) -> Seconds:
    sent = table.coverage * table.pooling * table.row_bytes * batch
    return sent * (split.share / memories.device_rate + (1 - split.share) / memories.host_rate)


def recshard(
    tables: Sequence[TableUse], memories: Memories, *, gpus: int, batch: int, steps: int = 100, time_limit: float = 60.0
) -> TablePlan:
    """The plan of the integer program; with the time limit reached, the best found, never worse than the greedy one."""
    options = [table.splits(steps) for table in tables]
    try:
        near: TablePlan | None = recshard_greedy(tables, memories, gpus=gpus, batch=batch, steps=steps)
    except Infeasible:
        near = None
    found = _solved(tables, options, memories, gpus, batch, time_limit)
    plans = [plan for plan in (found, near) if plan is not None]
    if not plans:
        need, room = sum(t.nbytes for t in tables), gpus * (memories.device + memories.host)
        raise Infeasible(
            f"tables of {format_bytes(need)} do not fit {gpus} GPUs with {format_bytes(room)} of their own and the host's",
            hint="use more GPUs, or smaller tables",
            smallest=need,
        )
    return min(plans, key=lambda plan: plan.slowest)


def recshard_greedy(tables: Sequence[TableUse], memories: Memories, *, gpus: int, batch: int, steps: int = 100) -> TablePlan:
    """Without a solver: tables with most to do first, each to the GPU with least; rows by lookups per byte; then tables move
    from the slowest GPU as long as that helps. Never slower than whole tables by size."""
    options = [table.splits(steps) for table in tables]
    order = sorted(range(len(tables)), key=lambda j: -load_of(tables[j], RowSplit(0, 0.0), memories, batch))
    where = [0] * len(tables)
    busy, filled = [0.0] * gpus, [0] * gpus
    for j in order:
        room = memories.device + memories.host - tables[j].nbytes
        fitting = [m for m in range(gpus) if filled[m] <= room]
        where[j] = min(fitting or range(gpus), key=lambda m: busy[m])
        busy[where[j]] += load_of(tables[j], RowSplit(0, 0.0), memories, batch)
        filled[where[j]] += tables[j].nbytes
    best = _filled(tables, options, where, memories, gpus, batch)
    while best is not None:
        slow = max(range(gpus), key=best.loads.__getitem__)
        moved = [
            _filled(tables, options, [m if k == j else g for k, g in enumerate(best.gpus)], memories, gpus, batch)
            for j in range(len(tables))
            if best.gpus[j] == slow
            for m in range(gpus)
            if m != slow
        ]
        better = min((p for p in moved if p is not None), key=lambda p: p.slowest, default=None)
        if better is None or better.slowest >= best.slowest:
            break
        best = better
    try:
        plain: TablePlan | None = by_size(tables, memories, gpus=gpus, batch=batch)
    except Infeasible:
        plain = None
    plans = [plan for plan in (best, plain) if plan is not None]
    if not plans:
        raise Infeasible("no greedy placement fits", hint="use `recshard`, more GPUs, or smaller tables")
    return min(plans, key=lambda plan: plan.slowest)


def by_size(tables: Sequence[TableUse], memories: Memories, *, gpus: int, batch: int) -> TablePlan:
    """The baseline: whole tables, largest first, each on the GPU with most room; where it does not fit, on the host."""
    device, host = [memories.device] * gpus, [memories.host] * gpus
    where, splits = [0] * len(tables), [RowSplit(0, 0.0)] * len(tables)
    for j in sorted(range(len(tables)), key=lambda j: -tables[j].nbytes):
        size = tables[j].nbytes
        m = max(range(gpus), key=device.__getitem__)
        if device[m] >= size:
            device[m] -= size
            splits[j] = RowSplit(tables[j].rows, 1.0)
        else:
            m = max(range(gpus), key=host.__getitem__)
            if host[m] < size:
                raise Infeasible("whole tables do not fit by size", hint="use `recshard`, which splits them")
            host[m] -= size
        where[j] = m
    return _plan(tables, where, splits, memories, gpus, batch)


def _plan(
    tables: Sequence[TableUse], where: Sequence[int], splits: Sequence[RowSplit], memories: Memories, gpus: int, batch: int
) -> TablePlan:
    loads = [0.0] * gpus
    for table, m, split in zip(tables, where, splits, strict=True):
        loads[m] += load_of(table, split, memories, batch)
    return TablePlan(gpus=tuple(where), splits=tuple(splits), loads=tuple(loads))


def _filled(
    tables: Sequence[TableUse],
    options: Sequence[Sequence[RowSplit]],
    where: Sequence[int],
    memories: Memories,
    gpus: int,
    batch: int,
) -> TablePlan | None:
    """Tables on these GPUs: the next point of the curve that saves most seconds per byte, as long as one fits. None: the host
    has no room for the rest."""
    at = [0] * len(tables)
    for m in range(gpus):
        mine = [j for j, g in enumerate(where) if g == m]
        room = memories.device
        while True:
            gains = []
            for j in mine:
                if at[j] + 1 < len(options[j]):
                    now, later = options[j][at[j]], options[j][at[j] + 1]
                    size = (later.rows - now.rows) * tables[j].row_bytes
                    saved = load_of(tables[j], now, memories, batch) - load_of(tables[j], later, memories, batch)
                    if size <= room:
                        gains.append((saved / max(1, size), -j, size))
            if not gains:
                break
            _, back, size = max(gains)
            at[-back] += 1
            room -= size
        left = sum((tables[j].rows - options[j][at[j]].rows) * tables[j].row_bytes for j in mine)
        if left > memories.host:
            return None
    splits = [some[n] for some, n in zip(options, at, strict=True)]
    return _plan(tables, where, splits, memories, gpus, batch)


def _solved(
    tables: Sequence[TableUse],
    options: Sequence[Sequence[RowSplit]],
    memories: Memories,
    gpus: int,
    batch: int,
    time_limit: float,
) -> TablePlan | None:
    """One column for each table, split and GPU, of which a table has one; and the seconds of the slowest GPU."""
    import numpy as np

    from holdall.planning.highs import Model, solve

    choices = [(j, m, split) for j, some in enumerate(options) for m in range(gpus) for split in some]
    tables_of, gpus_of = (np.array([c[n] for c in choices]) for n in (0, 1))
    loads = np.array([load_of(tables[j], split, memories, batch) for j, _, split in choices])
    near = np.array([split.rows * tables[j].row_bytes for j, _, split in choices], float)
    far = np.array([(tables[j].rows - split.rows) * tables[j].row_bytes for j, _, split in choices], float)
    unit = float(loads.max()) or 1.0
    model = Model()
    columns = model.add_columns(len(choices), whole=True)
    slowest = model.add_columns(1, cost=1.0, upper=inf)
    nothing = np.full(max(len(tables), gpus), -1)
    one = model.add_rows([(nothing[: len(tables)], 0.0)], lower=1.0, upper=1.0)
    model.add_entries(one[tables_of], columns, 1.0)
    for sizes, room in ((near, memories.device), (far, memories.host)):
        rows = model.add_rows([(nothing[:gpus], 0.0)], upper=1.0)
        model.add_entries(rows[gpus_of], columns, sizes / max(1, room))
    rows = model.add_rows([(np.repeat(slowest, gpus), -1.0)], upper=0.0)
    model.add_entries(rows[gpus_of], columns, loads / unit)
    found = solve(model, time_limit=time_limit)
    if found.x is None:
        return None
    where, splits = [0] * len(tables), [RowSplit(0, 0.0)] * len(tables)
    for (j, m, split), value in zip(choices, found.x[: len(choices)], strict=True):
        if value > 0.5:
            where[j], splits[j] = m, split
    return _plan(tables, where, splits, memories, gpus, batch)
