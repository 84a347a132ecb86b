"""Plans over many GPUs from one trace: which mesh, which way to shard, and what each rank then recomputes or keeps on its host.

Every candidate is the step of one rank (`parallel/sharding/by_rule.py`), simulated with its collectives over the networks of
its mesh. All figures are simulated; networks by name have assumed latencies (`machine/networks.py`). Beside them stands what
AMSP, PaRO and MiCS choose by a closed form (`shard_factors.py`); the group of MiCS is simulated like the other ways.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from holdall.actions.host_states import HostStates, obstacle, pieces_of
from holdall.actions.recompute import Recompute
from holdall.analysis.shard_factors import ClosedForm, FactorChoice, mesh_of_groups
from holdall.cost.roofline import cost_trace
from holdall.errors import Infeasible, InvalidInput, Unsupported
from holdall.machine.networks import network
from holdall.parallel.sharding.by_rule import sharded_by_rule
from holdall.planners.auto import Auto
from holdall.planners.chen import Chen
from holdall.planners.nop import Nop
from holdall.planning.finish import finish, outcome_or_never, over_budget
from holdall.problem import Budget, bare_problem
from holdall.types import Action, Hardware, Mesh, Outcome, Plan, Problem, Progress, Trace
from holdall.types.mesh import REPLICAS
from holdall.types.plan import silent
from holdall.units import format_bytes

PER_NODE = 8
INSIDE, ACROSS = "nvlink-4", "infiniband-ndr"
_QUICK = 4000  # ops of a step above which the last word is not `auto`'s, which takes minutes there, as with states on the host


@dataclass(frozen=True, kw_only=True)
class GpuCluster:
    """GPUs that are joined in nodes, and these with each other."""

    gpus: int
    per_node: int = PER_NODE
    inside: str = INSIDE  # network of the GPUs of a node
    across: str = ACROSS  # network of the nodes: one port for each GPU

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.per_node < 1:
            raise InvalidInput(f"{self.gpus} GPUs, {self.per_node} in a node", hint="give --gpus 64 and --per-node 8")

    @property
    def mesh(self) -> Mesh:
        if self.gpus > self.per_node and self.gpus % self.per_node:
            raise InvalidInput(
                f"{self.gpus} GPUs do not fill nodes of {self.per_node}",
                hint=f"use a multiple of {self.per_node}, or --per-node",
            )
        if self.gpus <= self.per_node:
            return Mesh.of({"dp": self.gpus}, {"dp": network(self.inside)})
        sizes = {"nodes": self.gpus // self.per_node, "dp": self.per_node}
        return Mesh.of(sizes, {"nodes": network(self.across), "dp": network(self.inside)})


@dataclass(frozen=True, kw_only=True)
class ShardWay:
    """A way to shard over a mesh."""

    mesh: Mesh
    shard: str
    replicate: tuple[str, ...] = ()

    def __str__(self) -> str:
        cut = [f"{d.name} {d.size}" for d in self.mesh.dims if d.name not in self.replicate]
        repeated = [d for d in self.mesh.dims if d.name in self.replicate]
        copies = [f"{d.size} groups" if d.name == REPLICAS else f"{d.name} {d.size}" for d in repeated]
        if self.shard == "ddp":
            return f"ddp over {' x '.join(cut)}"
        return f"{self.shard} over {' x '.join(cut)}" + (f", replicated over {' x '.join(copies)}" if copies else "")


@dataclass(frozen=True, kw_only=True)
class ShardTrial:
    """A way that was simulated: keeping everything, with every block recomputed where that does not fit, and with all optimizer
    states on the host where that does not either."""

    way: ShardWay
    outcome: Outcome
    recomputes: bool
    on_host: bool
    fits: bool

    @property
    def peak(self) -> int:
        return needed_by(self.outcome)


@dataclass(frozen=True, kw_only=True)
class OverRanks:
    way: ShardWay
    plan: Plan
    trials: tuple[ShardTrial, ...]  # fastest first
    held: str | None = None  # dtype of the shards, where modules compute in another
    factors: tuple[FactorChoice, ...] = ()  # what published searches choose, by a closed form


def needed_by(outcome: Outcome) -> int:
    return max(next(iter(outcome.peak.values())), outcome.reserved or 0)


def ways(cluster: GpuCluster) -> Iterator[ShardWay]:
    """Over all GPUs; and, with several nodes, shards inside a node that are repeated in the others."""
    mesh = cluster.mesh
    for shard in ("ddp", "zero2", "fsdp", "zero3"):
        yield ShardWay(mesh=mesh, shard=shard)
    if len(mesh.dims) > 1:
        for shard in ("zero2", "fsdp", "zero3"):
            yield ShardWay(mesh=mesh, shard=shard, replicate=("nodes",))


def plan_over_ranks(
    trace: Trace,
    groups: Sequence[str],
    cluster: GpuCluster,
    machine: Hardware,
    *,
    budget: Budget = "auto",
    held: str | None = None,
    choices: Sequence[ShardWay] | None = None,
    progress: Progress = silent,
) -> OverRanks:
    """The fastest way that fits `budget` on every rank. `trace`: of the plain model on the batch of one rank; `groups`, `held`:
    see `sharded_by_rule`. Raises `Infeasible` with the smallest peak found."""
    found: list[ShardTrial] = []
    listed = list(ways(cluster)) if choices is None else list(choices)

    def problem_of(way: ShardWay) -> Problem:
        sharded = sharded_by_rule(trace, way.mesh, way.shard, groups, replicate=way.replicate, held=held)
        return bare_problem(cost_trace(sharded, machine), machine, budget=budget)

    problems: dict[ShardWay, Problem] = {}

    def try_way(way: ShardWay) -> None:
        progress("ways to shard", len(found), len(listed), "")
        problem = problems[way] = problem_of(way)
        outcome = outcome_or_never(problem, [])
        is_over = bool(over_budget(problem, outcome))
        if is_over:
            outcome = outcome_or_never(problem, _recomputed(problem, None))
        on_host = bool(over_budget(problem, outcome)) and _can_leave(problem)
        if on_host:
            outcome = outcome_or_never(problem, _on_host(problem, None))
        fits = not over_budget(problem, outcome)
        found.append(ShardTrial(way=way, outcome=outcome, recomputes=is_over, on_host=on_host, fits=fits))

    for way in listed:
        try_way(way)
    factors: tuple[FactorChoice, ...] = ()
    if choices is None:
        form = ClosedForm.of(cost_trace(trace, machine), groups, cluster.mesh, held)
        whole = next(t for t in found if t.way == ShardWay(mesh=cluster.mesh, shard="zero3"))
        limit = problems[whole.way].limit(problems[whole.way].home)
        factors = tuple(form.choices(limit - max(0, whole.peak - form.whole)))
        groups_of_ranks = [mesh_of_groups(cluster.mesh, f.factors.params) for f in factors if f.system == "MiCS"]
        for mesh, repeated in (g for g in groups_of_ranks if g is not None):
            try_way(ShardWay(mesh=mesh, shard="zero3", replicate=repeated))
    found.sort(key=lambda t: (not t.fits, t.outcome.seconds if t.fits else t.peak))
    best = found[0]
    problem = problems[best.way]
    if not best.fits:
        raise Infeasible(
            f"no way to shard over {cluster.gpus} GPUs fits {format_bytes(problem.limit(problem.home))} on each; "
            f"the smallest needs {format_bytes(best.peak)}",
            hint="use more GPUs, a smaller --batch or --seq, or another --gpu",
            smallest=best.peak,
        )
    if not best.recomputes:
        return OverRanks(way=best.way, plan=Nop()(problem), trials=tuple(found), held=held, factors=factors)
    plan = _fewest_on_host(problem, progress) if best.on_host else _least_recomputed(problem, progress)
    if len(problem.trace.ops) <= _QUICK and not best.on_host:
        try:
            other = Auto()(problem)
        except (Infeasible, Unsupported):
            other = plan
        plan = min(plan, other, key=lambda p: p.predicted.seconds)
    return OverRanks(way=best.way, plan=plan, trials=tuple(found), held=held, factors=factors)


def _chen(count: int | None) -> Chen:
    return Chen(variant="all", last=True, count=count)


def _recomputed(problem: Problem, count: int | None) -> list[Action]:
    return [Recompute.of(problem.trace, segment) for segment in _chen(count).chosen(problem.trace)]


def _least_recomputed(problem: Problem, progress: Progress) -> Plan:
    """Recompute the fewest blocks that suffice, from the first."""

    def fits(count: int) -> bool:
        progress(f"recomputing {count} blocks", 0, 0, "")
        return not over_budget(problem, outcome_or_never(problem, _recomputed(problem, count)))

    enough = _fewest(len(_chen(None).chosen(problem.trace)), fits)
    return min((_chen(enough)(problem), _chen(None)(problem)), key=lambda p: p.predicted.seconds)


def _can_leave(problem: Problem) -> bool:
    """Can optimizer states be on the host?"""
    return problem.hardware.far is not None and problem.permits(HostStates) and not obstacle(problem.trace)


def _on_host(problem: Problem, count: int | None) -> list[Action]:
    """The states of the first `count` pieces (None: all) on the host, and every block recomputed."""
    every = len(pieces_of(problem.trace))
    return [*_recomputed(problem, None), HostStates.first(problem, every if count is None else count)]


def _fewest_on_host(problem: Problem, progress: Progress) -> Plan:
    """As few states on the host as suffice."""
    began, every = time.perf_counter(), len(pieces_of(problem.trace))

    def fits(count: int) -> bool:
        progress(f"{count} of {every} pieces of states on the host", 0, 0, "")
        return not over_budget(problem, outcome_or_never(problem, _on_host(problem, count)))

    count = _fewest(every, fits)
    why = [f"every block is recomputed, and {count} of {every} pieces of optimizer states are on the host"]
    return finish(Auto(), problem, _on_host(problem, count), why=why, began=began)


def _fewest(enough: int, fits: Callable[[int], bool]) -> int:
    """The least count from 1 that fits, where `enough` does."""
    few = 0
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if fits(middle) else (middle, enough)
    return enough
