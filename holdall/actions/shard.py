"""Shard: split parameters, gradients and optimizer states over ranks, by torch's own engine.

After ZeRO (arXiv 1910.02054) and PyTorch FSDP (arXiv 2304.11277). A sharded step has other ops, collectives among them, so the
trace is already taken with the model sharded, as one rank (`about.shards` says how). The rewrite prices its collectives and
lets them overlap what does not wait for them. Installing the action shards the model, which stays sharded when the harness is
closed.

Exact in the sense of data parallelism: gradients are means over the ranks. Of two ranks they are the same bits as the mean of
two single processes; of more, sums are taken in another order (3.7e-9 on four ranks of a tiny Llama).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from holdall.cost.collectives import collective_seconds, sent_bytes
from holdall.errors import InvalidInput, Unsupported
from holdall.registry import member_class
from holdall.types import Collect, Facts, Mesh, Problem, Run, Schedule, Step, Trace, Wait
from holdall.types.info import CollectiveOp, ShardedStep
from holdall.types.mesh import ONE_BATCH, REPLICAS

if TYPE_CHECKING:
    import torch

    from holdall.parallel.parts import Division
    from holdall.runtime.harness import Harness


@dataclass(frozen=True, kw_only=True)
class Shard(Facts):
    mesh: tuple[tuple[str, int], ...]  # (name, size) of every dimension
    way: str  # as in `parallel.sharding.build`
    groups: tuple[str, ...]  # modules with collectives of their own
    replicate: tuple[str, ...] = ()  # dimensions over which shards are repeated, not cut further
    backwards: int = 1  # of a step: gradients are summed over replicas in the last
    data_groups: tuple[str, ...] = ()  # modules with collectives of their own over data, where `groups` are of another division
    readers: tuple[tuple[str, str], ...] = ()  # modules that read parameters of one inside of them, in a model that is divided
    precision: str = ""  # dtype in which parameters are gathered and modules compute; empty: their own
    casts: tuple[str, ...] = ()  # modules that cast their inputs to it

    name: ClassVar[str] = "shard"
    exact: ClassVar[bool] = False
    rank: ClassVar[int] = 28  # after all that runs ops again, and moves them
    settles_states: ClassVar[bool] = True
    on_shards: ClassVar[bool] = True
    over_ranks: ClassVar[bool] = True

    @staticmethod
    def samples(trace: Trace) -> list[Shard]:
        """The sharding of the trace, if it has one."""
        shards = trace.about.shards
        if shards is None:
            return []
        if shards.mesh.division:
            return list(member_class("actions", shards.mesh.division).samples(trace))
        return [Shard(**of_step(shards))]

    def over_backwards(self, count: int) -> Shard:
        """The same for steps of so many backwards."""
        return replace(self, backwards=count) if self.replicate else self

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:
        shards = problem.trace.about.shards
        if [replace(self, backwards=1)] != Shard.samples(problem.trace) or shards is None:
            raise Unsupported(
                f"the plan shards the model ({self.way} over {dict(self.mesh)}), but the trace has it otherwise",
                hint=f"trace with the model sharded alike: holdall.trace(..., mesh={dict(self.mesh)}, shard={self.way!r})",
            )
        return _Collectives(schedule.copy(), shards.mesh).put(shards.collectives)

    def build(self, model: torch.nn.Module, device_mesh: Any) -> None:
        """Do it to the model, on torch's mesh."""
        import torch

        from holdall.casts import cast_inputs
        from holdall.parallel.checks.values import compare_if_asked
        from holdall.parallel.groups import split_mesh
        from holdall.parallel.sharding.build import shard_model
        from holdall.parallel.ways import split_way

        over_data, dividing = split_mesh(device_mesh, Mesh.of(dict(self.mesh)))
        data, division = split_way(self.way)
        dtype = getattr(torch, self.precision) if self.precision else None
        if dtype is not None:
            cast_inputs(model, dtype, self.casts)
        if division:
            divided = self.divide(model, dividing, division)  # parts go to the mesh's device by themselves
            model.to(device_mesh.device_type)
            compare_if_asked()
            divided.dtype = dtype
        if data:
            shard_model(model, self.data_groups if division else self.groups, over_data, data, self.precision)

    def divide(self, model: torch.nn.Module, meshes: Mapping[str, Any], ways: Sequence[str]) -> Division:
        """Divide the model itself, over torch's meshes of the dimensions that are for that, in these ways."""
        raise NotImplementedError

    def install(self, harness: Harness) -> None:
        from holdall.parallel.agree import share_at_first_forward
        from holdall.parallel.counting import CollectiveBytes
        from holdall.parallel.groups import device_mesh, group_dims
        from holdall.parallel.sharding.build import check_way, divide_update, follow_parameters, put_off_sums
        from holdall.parallel.ways import is_divided
        from holdall.sharded import sharded_parameter

        mesh = Mesh.of(dict(self.mesh))
        model, optimizer = harness.model, harness.optimizer
        if not is_divided(self.way):
            check_way(self.way, mesh)
        if self.replicate != mesh.replicas:
            raise Unsupported(
                f"the plan repeats shards over {', '.join(self.replicate)}, whose name says otherwise in a run",
                hint=f'use fit(..., mesh={{"{REPLICAS}": 2, "dp": 2}})',
            )
        if sharded_parameter(model):
            raise Unsupported("the model is sharded already", hint="build the model again, and call `fit` once")
        if optimizer is not None and optimizer.state:
            raise InvalidInput(
                "the optimizer has states of the unsharded model",
                hint="call `fit(..., mesh=...)` before the first step, and load states afterwards",
            )
        before = dict(model.named_parameters())
        on = device_mesh(mesh, harness.device.type)
        self.build(model, on)
        if optimizer is not None:
            follow_parameters(optimizer, before, model)
            divide_update(optimizer, model, on, self.way)
        if self.backwards > 1:
            put_off_sums(model, optimizer, self.backwards)
        if mesh.ranks == 1:
            return  # torch's engine calls no collectives
        if any(dim.name in ONE_BATCH for dim in mesh.dims):
            harness.on_close(share_at_first_forward(model, mesh, harness.device, harness.note()))
        groups = group_dims(on, mesh) if len(mesh.dims) > 1 else None
        counted = CollectiveBytes(mesh.dims[0].name, mesh.ranks, groups)
        harness.around(counted)
        harness.stores.counters.append(counted.sent)


def of_step(shards: ShardedStep) -> dict[str, Any]:
    """What the actions that divide a step have in common, as it was traced."""
    names = ("way", "groups", "replicate", "data_groups", "readers", "precision", "casts")
    return {"mesh": tuple((d.name, d.size) for d in shards.mesh.dims)} | {name: getattr(shards, name) for name in names}


_Place = tuple[int, int]  # (op, number among the steps after it); number -1: the op itself


class _Collectives:
    """Puts collectives in the place of their ops' time; who uses their tensors next, or frees them, waits."""

    def __init__(self, schedule: Schedule, mesh: Mesh) -> None:
        self.schedule, self.mesh = schedule, mesh
        self._inserted: dict[_Place, list[Step]] = {}  # before the step of this place

    def put(self, collectives: Sequence[CollectiveOp]) -> Schedule:
        schedule = self.schedule
        chains: dict[int, list[CollectiveOp]] = {}
        for found in collectives:
            chains.setdefault(found.op, []).append(found)
        placed = self._places(chains)
        runs = {place: self._run(place) for places in placed.values() for place in places}
        tensors = {x for run in runs.values() for x in (*run.reads, *run.mutates, *run.writes)}
        uses = self._uses(tensors)
        for op, chain in chains.items():
            for place in placed[op]:
                self._put(chain, place, runs[place], uses)
        for op in {op for op, _ in self._inserted}:
            steps = schedule.after.get(op, [])
            together = [[*self._inserted.get((op, n), ()), *steps[n : n + 1]] for n in range(len(steps) + 1)]
            schedule.after[op] = [step for some in together for step in some]
        return schedule

    def _put(self, chain: Sequence[CollectiveOp], place: _Place, run: Run, uses: dict[int, list[_Place]]) -> None:
        schedule = self.schedule
        self._replace(place, replace(run, seconds=0.0))
        waits: dict[_Place, list[int]] = {}
        for x in dict.fromkeys((*run.reads, *run.mutates, *run.writes)):
            following = next((use for use in uses[x] if use > place), None)
            if following is not None:
                waits.setdefault(following, []).append(x)
            elif (end := self._freed(x, place)) is not None:
                waits.setdefault(end, []).append(x)
        tensors = tuple(x for some in waits.values() for x in some)
        parts = [part for found in chain for part in self._parts(found, chain[0].dim)]
        collects: list[Step] = [*parts[:-1], replace(parts[-1], tensors=tensors)]  # one after the other: the last one ends it
        self._inserted.setdefault((place[0], place[1] + 1), [])[:0] = collects
        for before, some in waits.items():
            op, number = before if before[1] >= 0 else (before[0] - 1, len(schedule.after.get(before[0] - 1, ())))
            self._inserted.setdefault((op, number), []).append(Wait(tensors=tuple(some)))

    def _parts(self, found: CollectiveOp, lane: str) -> list[Collect]:
        """A collective over several networks, network by network: the slow ones carry what the fast ones leave to each rank."""
        parts, size = [], found.nbytes
        for dim in reversed([self.mesh.dim(name) for name in found.dim.split("+")]):
            seconds = collective_seconds(found.kind, size, [dim])
            sent = sent_bytes(found.kind, size, dim.size)
            parts.append(Collect(tensors=(), kind=found.kind, dim=dim.name, nbytes=sent, seconds=seconds, lane=lane))
            size //= dim.size
        return parts

    def _freed(self, tensor: int, place: _Place) -> _Place | None:
        """Where the engine waits before it frees the tensor; None: it outlives the step, or is freed at once."""
        ends = [op for op, again in self.schedule.held(tensor) if not again]
        last = max(ends, default=place[0])
        return (last + 1, -1) if place[0] < last < len(self.schedule.trace.ops) else None

    def _places(self, ops: Collection[int]) -> dict[int, list[_Place]]:
        """Where each of the ops runs: in its own place, unless it was moved to another; and again in replays."""
        found: dict[int, list[_Place]] = {op: [] if op in self.schedule.moved else [(op, -1)] for op in ops}
        for after, steps in self.schedule.after.items():
            for number, step in enumerate(steps):
                if isinstance(step, Run) and step.op in found:
                    found[step.op].append((after, number))
        return found

    def _run(self, place: _Place) -> Run:
        op, number = place
        found = self.schedule.run(op) if number < 0 else self.schedule.after[op][number]
        assert isinstance(found, Run)
        return found

    def _replace(self, place: _Place, run: Run) -> None:
        op, number = place
        if number < 0:
            self.schedule.runs[op] = run
        else:
            steps = self.schedule.after[op]
            self.schedule.after[op] = [*steps[:number], run, *steps[number + 1 :]]

    def _uses(self, tensors: set[int]) -> dict[int, list[_Place]]:
        """Where runs use the tensors, in order."""
        found: dict[int, list[_Place]] = {x: [] for x in tensors}
        for op in range(-1, len(self.schedule.trace.ops)):
            for number, step in enumerate([*([self.schedule.run(op)] if op >= 0 else []), *self.schedule.after.get(op, ())]):
                if isinstance(step, Run):
                    for x in dict.fromkeys((*step.reads, *step.writes, *step.mutates)):
                        if x in found:
                            found[x].append((op, number - (op >= 0)))
        return found
