"""Meshes with pipelines and tensor ranks for a model: layers made of its trace, and a search over them.

A layer is a call of the model's longest row of numbered siblings (`longer.stack_of`); all before them is the first layer, all
after them the last. Seconds are those of the ops by the roofline, for smaller batches and for tensor ranks by rule:
arithmetic and activations in proportion, parameters whole, no op below a kernel's launch. Tensor ranks share what
`parallel/regions.py` finds. All of it is simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, prod
from typing import Any

import torch

from holdall.analysis.longer import stack_of
from holdall.analysis.over_ranks import GpuCluster
from holdall.cost.launching import launching, starts
from holdall.cost.roofline import KERNEL, cost_trace, op_seconds
from holdall.errors import Unsupported
from holdall.machine.networks import network
from holdall.parallel.regions import find_regions, find_vocabulary, width
from holdall.parallel.sharding.by_rule import WIDTHS
from holdall.pipelines.hybrid.layers import HybridLayer, HybridModel, StateBytes, Work
from holdall.pipelines.hybrid.plans import HybridPlan
from holdall.pipelines.hybrid.starting import start_call
from holdall.pipelines.meshes import Cluster
from holdall.pipelines.searches import search
from holdall.types import Hardware, Kind, Op, Phase, Trace

_KEPT = (Kind.PARAM, Kind.GRAD, Kind.STATE, Kind.BUFFER)


@dataclass(frozen=True, kw_only=True)
class OverMeshes:
    plan: HybridPlan
    model: HybridModel
    cluster: Cluster
    search: str
    call: str = ""  # of `holdall.pipelines.start`, which runs the plan; empty: there is none
    not_run: str = ""  # why


def plan_over_meshes(
    trace: Trace,
    model: torch.nn.Module,
    cluster: GpuCluster,
    machine: Hardware,
    *,
    batch: int,
    memory: int,
    held: str | None = None,
    name: str = "auto",
) -> OverMeshes:
    """What a search finds for the step of all GPUs, each with `batch` sequences, as in the trace. `memory`: bytes of a GPU."""
    _ = cluster.mesh  # refuses GPUs that do not fill their nodes
    layers = model_of(trace, model, machine, batch=batch, gpus=cluster.gpus, held=held)
    machines = Cluster(
        devices=cluster.gpus,
        per_node=min(cluster.per_node, cluster.gpus),
        memory=memory - machine.context - machine.resident,
        rate=max(machine.flops.values(), default=0.0),
        inside=network(cluster.inside),
        between=network(cluster.across),
    )
    plan = search(name, layers, machines)
    call, why = start_call(plan, model)
    return OverMeshes(plan=plan, model=layers, cluster=machines, search=name, call=call, not_run=why)


def model_of(
    trace: Trace, model: torch.nn.Module, machine: Hardware, *, batch: int, gpus: int, held: str | None = None
) -> HybridModel:
    """The layers of a traced model. Raises `Unsupported` if it has no row of layers."""
    return _Reading(cost_trace(trace, machine), model, machine, batch, held).made(gpus)


@dataclass
class _Part:
    """What belongs to one layer."""

    ahead: list[Op] = field(default_factory=list)
    back: list[Op] = field(default_factory=list)
    parameters: int = 0
    shared: int = 0  # those of them that tensor ranks divide
    saved: list[int] = field(default_factory=list)
    output: int = 0
    rows: int = 0  # sums over tensor ranks


class _Reading:
    def __init__(self, trace: Trace, model: torch.nn.Module, machine: Hardware, batch: int, held: str | None) -> None:
        self.trace, self.model, self.machine, self.batch, self.held = trace, model, machine, batch, held
        self.stack = [b for b in stack_of(trace) if b.backward is not None]
        if not self.stack:
            raise Unsupported("the model has no row of numbered layers", hint="use --search shard")
        self.parts = [_Part() for _ in range(len(self.stack) + 2)]
        self.paths = {b.module: n + 1 for n, b in enumerate(self.stack)}
        self.regions = find_regions(model, trace, 1)
        self.words = find_vocabulary(model, trace, 1)
        self.members = {path for r in self.regions for path in (*r.columns, r.row)} | set(self.words)
        self.rows = {r.row for r in self.regions}
        self.summing = self.rows | set(self.words[:-1])  # their outputs are sums over tensor ranks
        self.divided = self._divided()

    def made(self, gpus: int) -> HybridModel:
        self._share_out()
        numbers = sum(part.parameters for part in self.parts)
        step = sum(op.seconds for op in self.trace.ops if op.site.phase is Phase.STEP)
        return HybridModel(
            layers=tuple(self._layer(part) for part in self.parts),
            batch=self.batch * gpus,
            states=self._states(numbers),
            update=step / max(1, numbers),
            moving=1 / self.machine.bandwidth,
        )

    def _of(self, path: str) -> int | None:
        """The layer that a module or parameter is in; None: outside of all."""
        while path:
            if path in self.paths:
                return self.paths[path]
            path = path.rpartition(".")[0]
        return None

    def _share_out(self) -> None:
        first, last = self.stack[0].first, self.stack[-1].last
        place: dict[int, int] = {}  # op of forward -> its layer
        for op in self.trace.ops:
            if op.site.phase is Phase.FORWARD:
                if op.id < first:
                    place[op.id] = 0
                elif op.id > last:
                    place[op.id] = len(self.stack) + 1
                else:
                    place[op.id] = (
                        next((n + 1 for n, b in enumerate(self.stack) if b.first <= op.id <= b.last), 0)
                        if (own := self._of(op.site.module)) is None
                        else own
                    )
                self.parts[place[op.id]].ahead.append(op)
        begun = min((op.id for op in self.trace.backward_of(self.stack[-1].module)), default=0)
        for op in self.trace.ops:
            if op.site.phase is Phase.BACKWARD:
                own = self._of(op.site.module)
                self.parts[own if own is not None else (len(self.stack) + 1 if op.id < begun else 0)].back.append(op)
        self._share_tensors(place)

    def _share_tensors(self, place: dict[int, int]) -> None:
        readers = {x: place[op.id] for op in reversed(self.trace.ops) if op.id in place for x in op.reads}
        for t in self.trace.tensors.values():
            if t.kind is Kind.PARAM:
                own = self._of(t.name.rpartition(".")[0])
                part = self.parts[own if own is not None else readers.get(t.id, 0)]
                part.parameters += prod(t.shape)
                part.shared += prod(t.shape) if t.name.rpartition(".")[0] in self.members else 0
        seen: set[int] = set()
        for save in sorted(self.trace.saves, key=lambda s: s.packed):
            if save.tensor not in seen and self.trace.tensors[save.tensor].kind not in _KEPT:
                seen.add(save.tensor)
                self.parts[place.get(save.packed, 0)].saved.append(save.tensor)
        outputs = [max((self.trace.tensors[x].nbytes for x in b.outputs), default=0) for b in self.stack]
        handed = max((self.trace.tensors[x].nbytes for x in self.stack[0].inputs if x in self.trace.tensors), default=0)
        for part, nbytes in zip(self.parts, [handed, *outputs, outputs[-1]], strict=True):
            part.output = nbytes
        for path in self.rows:
            own = self._of(path)
            if own is not None:
                self.parts[own].rows += 1

    def _divided(self) -> set[int]:
        """Ops that tensor ranks share: the products, and what is computed between columns and rows, in both passes."""
        marked: set[int] = set()
        found: set[int] = set()
        for op in self.trace.ops:
            if op.site.phase is Phase.STEP:
                break
            path = op.site.module
            reads = any(x in marked for x in op.reads)
            if path in self.members or reads:
                found.add(op.id)
            back = op.site.phase is Phase.BACKWARD
            if ((path in self.summing) == back) if path in self.members else reads:
                marked.update(op.writes)
            else:
                marked.difference_update(op.writes)
        self.marked = marked
        return found

    def _states(self, numbers: int) -> StateBytes:
        dtypes = Counter(t.dtype for t in self.trace.tensors.values() if t.kind is Kind.PARAM)
        own = dtypes.most_common(1)[0][0]
        stays = self.held or own
        moments = sum(prod(t.shape) for t in self.trace.tensors.values() if t.kind is Kind.STATE and t.born < 0)
        each = round(moments / max(1, numbers))
        return StateBytes(held=WIDTHS[stays] * (1 + each), gradient=WIDTHS[stays], copy=WIDTHS[own])

    def _layer(self, part: _Part) -> HybridLayer:
        saved = sum(self.trace.tensors[x].nbytes for x in part.saved)
        shared = sum(self.trace.tensors[x].nbytes for x in part.saved if x in self.marked)
        return HybridLayer(
            forward=self._works(part.ahead),
            backward=self._works(part.back),
            parameters=part.parameters,
            output=part.output // self.batch,
            activations=saved // self.batch,
            divided=shared // self.batch,
            working=self._working(part) // self.batch,
            launch=(self._launch(part.ahead), self._launch(part.back)),
            reduces=part.rows or int(part.shared > 0),
            most_tensor=self._most_tensor() if part.shared else 1,
        )

    def _launch(self, ops: Iterable[Op]) -> float:
        each = starts(self.trace)
        return launching(self.machine) * sum(each[op.id] for op in ops)

    def _most_tensor(self) -> int:
        """What a number of tensor ranks must divide: heads, and the widths of all divided layers."""
        modules = dict(self.model.named_modules())
        widths = [width(modules[path], "out") for r in self.regions for path in r.columns]
        config: Any = getattr(self.model, "config", None)
        heads = [getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads", "n_head")]
        return gcd(*widths, *(n for n in heads if isinstance(n, int))) if widths else 1

    def _works(self, ops: Iterable[Op]) -> tuple[Work, ...]:
        counted: Counter[Work] = Counter()
        for op in ops:
            if op.flops or op.moved:
                counted[self._work(op)] += 1
        return tuple(replace(work, count=count) for work, count in counted.items())

    def _work(self, op: Op) -> Work:
        fixed = {x for x in (*op.reads, *op.writes, *op.mutates) if self.trace.tensors[x].kind in (Kind.PARAM, Kind.GRAD)}
        weights = min(op.moved, sum(self.trace.tensors[x].nbytes for x in fixed))
        return Work(
            arithmetic=self._alone(op, flops=op.flops, moved=0) / self.batch,
            moving=self._alone(op, flops=0, moved=op.moved - weights) / self.batch,
            weights=self._alone(op, flops=0, moved=weights),
            least=KERNEL if self.machine.device == "cuda" else 0.0,
            divided=op.id in self.divided,
        )

    def _alone(self, op: Op, *, flops: int, moved: int) -> float:
        """Seconds of an op's arithmetic, or of its bytes, by the rate for many of them: its launch is priced apart."""
        if not flops and not moved:
            return 0.0
        scale = 2**10
        return op_seconds(replace(op, flops=scale * flops, moved=scale * moved), self.machine) / scale

    def _working(self, part: _Part) -> int:
        """The most bytes at once that the layer's ops make and autograd does not keep."""
        return max((_peak(self.trace, ops) for ops in (part.ahead, part.back)), default=0)


def _peak(trace: Trace, ops: Sequence[Op]) -> int:
    changes: Counter[int] = Counter()
    for op in ops:
        for x in op.writes:
            t = trace.tensors[x]
            if not t.saved and t.kind not in _KEPT:
                end = trace.lifetime(x)[1]
                changes[op.id] += t.nbytes
                changes[(len(trace.ops) if end is None else end) + 1] -= t.nbytes
    most = now = 0
    for k in sorted(changes):
        now += changes[k]
        most = max(most, now)
    return most
