"""What AMSP, PaRO and MiCS would choose for a model on a cluster, by the closed form of `cost/sharding.py`.

The model's states and the computation of a step are those of its trace. What a rank needs besides states and gathered layers is
taken from the simulated step of `zero3` over all GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdall.cost.sharding import ModelStates, NodeLinks, ShardFactors, ShardStep, memory, sent, step_seconds
from holdall.errors import Infeasible
from holdall.parallel.sharding.amsp import amsp_factors
from holdall.parallel.sharding.by_rule import WIDTHS
from holdall.parallel.sharding.mics import mics_group
from holdall.parallel.sharding.paro import paro_factors, paro_triple
from holdall.types import Kind, Mesh, Phase, TensorInfo, Trace
from holdall.types.mesh import NODES, REPLICAS
from holdall.types.trace import Bytes, Seconds


@dataclass(frozen=True, kw_only=True)
class FactorChoice:
    """A system's choice. All figures are by the closed form."""

    system: str
    named: str  # as the system calls it
    factors: ShardFactors
    nbytes: Bytes  # of a rank
    sent: Bytes  # by a rank in a step
    seconds: Seconds  # of a step


@dataclass(frozen=True, kw_only=True)
class ClosedForm:
    """A model on a cluster."""

    model: ModelStates
    step: ShardStep
    links: NodeLinks

    @staticmethod
    def of(trace: Trace, groups: Sequence[str], mesh: Mesh, held: str | None) -> ClosedForm:
        """`trace`: of the plain model, with seconds; `mesh`: of nodes and the ranks inside, or of one node; `held`: the dtype
        of shards, gradients and states, where modules compute in another."""
        tensors = list(trace.tensors.values())
        params = sum(t.nbytes for t in tensors if t.kind is Kind.PARAM and t.born < 0)
        grads = sum(_held(t, held) for t in tensors if t.kind is Kind.GRAD)
        states = sum(_held(t, held) for t in tensors if t.kind is Kind.STATE and t.born < 0)
        masters = sum(_held(t, held) for t in tensors if t.kind is Kind.PARAM and t.born < 0) if held is not None else 0
        model = ModelStates(params=params, grads=grads, states=states + masters, units=len(groups) + 1)
        step = ShardStep(ranks=mesh.ranks, forward=_seconds(trace, Phase.FORWARD), backward=_seconds(trace, Phase.BACKWARD))
        near, far = mesh.dims[-1], mesh.dims[0]
        links = NodeLinks(per_node=near.size, inside=near.network, across=far.network, hierarchical=True)
        return ClosedForm(model=model, step=step, links=links)

    @property
    def whole(self) -> Bytes:
        """Of a rank where everything is sharded over all ranks."""
        return memory(ShardFactors(self.step.ranks, self.step.ranks, self.step.ranks), self.model, self.step)

    def choices(self, room: Bytes) -> Iterator[FactorChoice]:
        """Of the systems that find one with model states and gathered layers in `room` bytes of a rank."""
        try:
            yield self._made("AMSP", "", amsp_factors(self.model, self.step, self.links, room=room))
            if self.links.per_node < self.step.ranks:
                triple = paro_triple(self.model, self.step, self.links, group=self.links.per_node, room=room)
                yield self._made("PaRO", triple, paro_factors(triple, self.step.ranks, self.links.per_node))
            group = mics_group(self.model, self.step, per_node=self.links.per_node, room=room)
            yield self._made("MiCS", f"group of {group}", ShardFactors(group, group, group))
        except Infeasible:
            return

    def _made(self, system: str, named: str, factors: ShardFactors) -> FactorChoice:
        given = (factors, self.model, self.step)
        return FactorChoice(
            system=system,
            named=named,
            factors=factors,
            nbytes=memory(*given),
            sent=sent(*given),
            seconds=step_seconds(*given, self.links),
        )


def mesh_of_groups(mesh: Mesh, group: int) -> tuple[Mesh, tuple[str, ...]] | None:
    """The mesh with shards over groups of that many ranks, and the dimensions over which they are repeated; None: such groups
    are a dimension of the mesh already."""
    inside, across = mesh.dims[-1], mesh.dims[0]
    nodes = mesh.ranks // inside.size
    if group in (1, inside.size, mesh.ranks):
        return None
    if group < inside.size:
        sizes = {NODES: nodes, REPLICAS: inside.size // group, inside.name: group}
        joined = {NODES: across.network, REPLICAS: inside.network, inside.name: inside.network}
        repeated: tuple[str, ...] = (NODES, REPLICAS)
    else:
        sizes = {REPLICAS: mesh.ranks // group, NODES: group // inside.size, inside.name: inside.size}
        joined = {REPLICAS: across.network, NODES: across.network, inside.name: inside.network}
        repeated = (REPLICAS,)
    kept = {name: size for name, size in sizes.items() if size > 1}
    return Mesh.of(kept, joined), tuple(name for name in repeated if name in kept)


def _held(info: TensorInfo, held: str | None) -> Bytes:
    """The bytes of a state that was traced in the dtype of the modules."""
    if held is None or info.dtype not in ("bfloat16", "float16", "float32"):
        return info.nbytes
    return info.nbytes * WIDTHS[held] // WIDTHS[info.dtype]


def _seconds(trace: Trace, phase: Phase) -> Seconds:
    return sum(op.seconds for op in trace.ops if op.site.phase is phase)
