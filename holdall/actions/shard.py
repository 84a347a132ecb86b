"""Shard: split parameters, gradients and optimizer states over ranks, by torch's own engine.

After ZeRO (arXiv 1910.02054) and PyTorch FSDP (arXiv 2304.11277). A sharded step has other ops, collectives among them, so the
trace is already taken with the model sharded, as one rank (`about.shards` says how). The rewrite prices its collectives and
lets them overlap what does not wait for them. Installing the action shards the model, which stays sharded when the harness is
closed.

Exact in the sense of data parallelism: gradients are means over the ranks. Of two ranks they are the same bits as the mean of
two single processes; of more, sums are taken in another order (3.7e-9 on four ranks of a tiny Llama).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from holdall.cost.collectives import collective_seconds, sent_bytes
from holdall.errors import InvalidInput, Unsupported
from holdall.registry import member_class
from holdall.types import Collect, Facts, Mesh, Problem, Schedule, Trace, Wait
from holdall.types.info import CollectiveOp
from holdall.types.mesh import DIVIDING

if TYPE_CHECKING:
    import torch

    from holdall.runtime.harness import Harness


@dataclass(frozen=True, kw_only=True)
class Shard(Facts):
    mesh: tuple[tuple[str, int], ...]  # (name, size) of every dimension
    way: str  # as in `parallel.build`
    groups: tuple[str, ...]  # modules with collectives of their own

    name: ClassVar[str] = "shard"
    exact: ClassVar[bool] = False
    rank: ClassVar[int] = 1
    settles_states: ClassVar[bool] = True
    on_shards: ClassVar[bool] = True
    over_ranks: ClassVar[bool] = True

    @staticmethod
    def samples(trace: Trace) -> list[Shard]:
        """The sharding of the trace, if it has one."""
        shards = trace.about.shards
        if shards is None:
            return []
        if action := DIVIDING.get(shards.mesh.dims[0].name):
            return list(member_class("actions", action).samples(trace))
        return [Shard(mesh=tuple((d.name, d.size) for d in shards.mesh.dims), way=shards.way, groups=shards.groups)]

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:
        shards = problem.trace.about.shards
        if [self] != Shard.samples(problem.trace) or shards is None:
            raise Unsupported(
                f"the plan shards the model ({self.way} over {dict(self.mesh)}), but the trace has it otherwise",
                hint=f"trace with the model sharded alike: holdall.trace(..., mesh={dict(self.mesh)}, shard={self.way!r})",
            )
        schedule = schedule.copy()
        for found in shards.collectives:
            self._collect(schedule, found, shards.mesh)
        return schedule

    def _collect(self, schedule: Schedule, found: CollectiveOp, mesh: Mesh) -> None:
        """Put the collective in the place of the time of its op; who reads its tensors next waits for it."""
        dim, run = mesh.dim(found.dim), schedule.run(found.op)
        schedule.runs[found.op] = replace(run, seconds=0.0)
        touched = dict.fromkeys((*run.reads, *run.mutates, *run.writes))
        next_use = {x: use for x in touched if (use := _next_use(schedule, x, found.op)) is not None}
        collect = Collect(
            tensors=tuple(next_use),
            kind=found.kind,
            dim=found.dim,
            nbytes=sent_bytes(found.kind, found.nbytes, dim.size),
            seconds=collective_seconds(found.kind, found.nbytes, [dim]),
        )
        schedule.insert(found.op, [collect])
        if next_use:
            schedule.insert(min(next_use.values()) - 1, [Wait(tensors=tuple(next_use))])

    def build(self, model: torch.nn.Module, device_mesh: Any) -> None:
        """Do it to the model, on torch's mesh."""
        from holdall.parallel.build import shard_model

        shard_model(model, self.groups, device_mesh, self.way)

    def install(self, harness: Harness) -> None:
        from holdall.parallel.build import follow_parameters
        from holdall.parallel.checking import compare_if_asked
        from holdall.parallel.counting import CollectiveBytes
        from holdall.parallel.groups import device_mesh
        from holdall.sharded import sharded_parameter

        mesh = Mesh.of(dict(self.mesh))
        model, optimizer = harness.model, harness.optimizer
        if sharded_parameter(model):
            raise Unsupported("the model is sharded already", hint="build the model again, and call `fit` once")
        if optimizer is not None and optimizer.state:
            raise InvalidInput(
                "the optimizer has states of the unsharded model",
                hint="call `fit(..., mesh=...)` before the first step, and load states afterwards",
            )
        before = dict(model.named_parameters())
        self.build(model, device_mesh(mesh, harness.device.type))
        compare_if_asked()
        if optimizer is not None:
            follow_parameters(optimizer, before, model)
        counted = CollectiveBytes(mesh.dims[0].name, mesh.ranks)
        harness.around(counted)
        harness.stores.counters.append(counted.sent)


def _next_use(schedule: Schedule, tensor: int, after: int) -> int | None:
    return next((op for op in schedule.uses(tensor) if op > after), None)
