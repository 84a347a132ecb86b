"""The ranks of pipelines as a mesh: `pp` of a pipeline, `dp` pipelines beside one another, and `tp`, `cp` or `ep` that divide
what a stage computes (`stage_ranks`).

Ranks are laid out in that order, so that those that divide are neighbours: of {"pp": 2, "dp": 2, "tp": 2}, ranks 0 and 1 divide
the first stage of the first replica, 2 and 3 that of the second, 4 to 7 have the last stage. Ranks of one replica have the same
batch, replicas have their own, and so have the ranks of `ep`. How replicas share a stage says `stage_ranks/sharing.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from holdall.errors import InvalidInput, TraceMismatch, Unsupported, unknown_name
from holdall.parallel.agree import share_random_numbers, timeout_of
from holdall.parallel.checks.values import batch_digest
from holdall.parallel.ways import DIVIDED as DIVISIONS
from holdall.parallel.ways import split_way
from holdall.pipelines.hybrid.starting import is_split
from holdall.pipelines.pipeline import ONE, Pipeline
from holdall.pipelines.running.stage_ranks.copies import Tied
from holdall.pipelines.running.stage_ranks.sharing import DDP, ZERO3, Sharing
from holdall.runtime.notes import Notes
from holdall.sharded import is_shard, local_of
from holdall.types.mesh import ONE_BATCH, Mesh

DIVIDED = {"tp": DIVISIONS["tp"][:1], "cp": DIVISIONS["cp"], "ep": DIVISIONS["ep"]}  # ways; the first is the default
DIMS = ("pp", "dp", *DIVIDED)  # the slowest network first; of those that divide there is one at most
_COUNTER = 4  # bytes in which ranks say of a parameter whether it has a gradient
BATCHES = ("dp", "ep")  # those whose ranks have batches of their own


class PipeMesh:
    """This rank's place, and the groups that it is of."""

    def __init__(self, sizes: Mapping[str, int] | Mesh | None, shard: str | Sequence[str], group: Any) -> None:
        self.pipe_group, self.sizes = group, dict.fromkeys(DIMS, 1) | {"pp": dist.get_world_size(group)}
        self.on: Any = None  # torch's mesh; None: a pipeline and nothing beside it
        if sizes is not None:
            self.sizes = _checked(Mesh.of(sizes), group)
        self.dividing = next((name for name in DIVIDED if self.sizes[name] > 1), "")
        self.parts = self.sizes.get(self.dividing, 1)
        self.sharing, self.division = _ways(shard, self.dividing)
        self.replicas = prod(self.sizes[name] for name in BATCHES)
        if not self.sharing.is_whole and self.sizes["dp"] == 1:
            raise InvalidInput(
                f"shard={_written(shard)} is for stages that several ranks share",
                hint='use mesh={"pp": 2, "dp": 2}, or leave it out',
            )
        if self.sharing.is_mixed and self.dividing in ("tp", "ep"):
            raise Unsupported(
                f"pieces that are divided over `{self.dividing}` are sharded in one way all", hint='use shard="zero2"'
            )

    @property
    def is_alone(self) -> bool:
        """Is there a pipeline and nothing beside it?"""
        return self.replicas == self.parts == 1

    def connect(self, device: torch.device) -> None:
        """Make the groups; all ranks must come here."""
        from torch.distributed.device_mesh import init_device_mesh

        if not self.is_alone:
            there = [name for name in DIMS if name == "pp" or self.sizes[name] > 1]
            self.on = init_device_mesh(device.type, tuple(self.sizes[name] for name in there), mesh_dim_names=tuple(there))
            self.pipe_group = self.on.get_group("pp")
            for name in there:  # torch gives groups of a mesh its own default
                limit = timedelta(seconds=timeout_of())
                dist.distributed_c10d._set_pg_timeout(limit, self.on.get_group(name))

    @property
    def place_in_pipe(self) -> int:
        """This rank's number in its pipeline."""
        return dist.get_rank(self.pipe_group)

    @property
    def holders(self) -> int:
        """Ranks that have each stage, or parts of it."""
        return prod(self.sizes.values()) // self.sizes["pp"]

    def rows(self, value: Any) -> Any:
        """What this rank has of the rows of a micro-batch."""
        return value

    def check_rows(self, rows: int) -> None:
        """Refuse micro-batches of so many rows if they do not split."""

    def check_pieces(self, pieces: Sequence[torch.nn.Module], device: torch.device) -> None:
        """Refuse models whose rows do not split."""

    def place(self, dim: str) -> int:
        """This rank's number along a dimension."""
        return int(self.on.get_local_rank(dim)) if self.on is not None and self.sizes[dim] > 1 else 0

    @property
    def replica(self) -> int:
        """The number of this rank's batches."""
        return self.place("dp") * self.sizes["ep"] + self.place("ep")

    def check(self, made: Pipeline) -> None:
        """Refuse what a schedule does not do on such a mesh."""
        if self.is_alone:
            return
        if made.weights != ONE:
            raise Unsupported(
                f"`{made.name}` updates inside a step, which ranks beside a pipeline do not do together",
                hint="use a schedule that flushes, such as 1f1b",
            )
        if made.copies > 1 and (self.dividing in ("tp", "ep") or not self.sharing.is_whole):
            raise Unsupported(
                f"`{made.name}` has two copies of every stage, which are neither divided nor sharded",
                hint='use shard="ddp" and neither `tp` nor `ep`, or a schedule with one copy, such as 1f1b',
            )
        if ZERO3 in self.sharing and is_split(made):
            raise Unsupported(
                f"`{made.name}` computes gradients of weights later than those of inputs, when zero3 has let the weights go",
                hint='use shard="zero2"',
            )

    def refuse_other_batches(self, batch: Sequence[torch.Tensor]) -> None:
        """Refuse, on all ranks, a batch in which the ranks of a replica differ."""
        own = (self.replica, batch_digest(batch))
        group = self.pipe_group if self.on is None else None
        said: list[tuple[int, str]] = [own] * dist.get_world_size(group)
        dist.all_gather_object(said, own, group=group)
        first = {replica: (rank, told) for rank, (replica, told) in reversed(list(enumerate(said)))}
        for rank, (replica, told) in enumerate(said):
            if told != first[replica][1]:
                raise TraceMismatch(
                    f"the batch of rank {rank} differs from that of rank {first[replica][0]}, but they are of one pipeline",
                    hint="give all ranks of a pipeline the same batch: `pipe.replica` is its number, of `pipe.replicas`",
                )

    def share_random_numbers(self, device: torch.device) -> None:
        """Ranks that divide stages of one batch draw those of the first of them."""
        if self.dividing in ONE_BATCH:
            rows = self.on.mesh.reshape(-1, self.parts).tolist()  # that dimension is the last
            firsts = {rank: row[0] for row in rows for rank in row}
            share_random_numbers([firsts[rank] for rank in sorted(firsts)], device, Notes([]))

    def reduce(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Average gradients over the ranks with other batches, and sum those of parts of a sequence; shards are averaged
        already, and divided experts have all that there is."""
        found = [p for p in parameters if p.requires_grad]
        self._reduce([p for p in found if self.sharing.is_whole_on_all(p)], "dp", mean=True)
        self._reduce([p for p in found if not is_shard(p) or p.placements[-1].is_replicate()], "ep", mean=True)  # type: ignore[attr-defined]
        self._reduce(found, "cp", mean=False)

    def reducing(self, trained: Sequence[torch.nn.Parameter], made: Pipeline, tied: Sequence[Tied]) -> int:
        """Bytes that it takes to add gradients up after the last micro-batch, besides these: of the flat copies."""
        flat: dict[torch.dtype, int] = {}
        for p in trained:
            flat[p.dtype] = flat.get(p.dtype, 0) + local_of(p).nbytes
        over_ranks = max(flat.values(), default=0) + _COUNTER * len(trained) if self.is_summed else 0
        twins = 3 * sum(flat.values()) if made.copies > 1 else 0
        mine = {id(p) for p in trained}
        shared = ((len(one.ranks) + 1) * one.parameter.nbytes for one in tied if id(one.parameter) in mine)
        return max(over_ranks, twins, *shared, 0)

    @property
    def is_summed(self) -> bool:
        """Do ranks add their gradients up?"""
        return self.replicas > 1 or self.sizes["cp"] > 1

    in_advance = True  # is there a buffer for every message?

    def _reduce(self, parameters: Sequence[torch.nn.Parameter], dim: str, *, mean: bool) -> None:
        if self.sizes[dim] > 1:
            sum_gradients(parameters, self.on.get_group(dim), mean_of=self.sizes[dim] if mean else 1)

    def same_buffers(self, module: torch.nn.Module) -> None:
        """Give all replicas the first one's buffers, such as averages of batch norms, as DistributedDataParallel does."""
        for dim in self._with_others():
            for inner in module.modules():
                for name, buffer in inner.named_buffers(recurse=False):
                    if name not in inner._non_persistent_buffers_set:
                        dist.broadcast(buffer, group=self.on.get_group(dim), group_src=0)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over the replicas of a value of a pipeline."""
        for dim in self._with_others():
            dist.all_reduce(value, group=self.on.get_group(dim))
            value /= self.sizes[dim]
        return value

    def _with_others(self) -> list[str]:
        """The dimensions whose ranks have other batches."""
        return [name for name in BATCHES if self.sizes[name] > 1]


def sum_gradients(parameters: Sequence[torch.nn.Parameter], group: Any, *, mean_of: int = 1) -> None:
    """Add gradients over the ranks of a group, in one all-reduce for each dtype, and divide them by `mean_of`."""
    if not parameters:
        return
    device = local_of(parameters[0]).device
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=device)
    dist.all_reduce(used, group=group)  # a parameter that no rank used has no gradient
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for p, count in zip(parameters, used.tolist(), strict=True):
        if count:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            by_dtype.setdefault(p.grad.dtype, []).append(local_of(p.grad))
    for grads in by_dtype.values():
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat, group=group)
        if mean_of > 1:
            flat /= mean_of
        for g, total in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(total.view_as(g))


def _ways(asked: str | Sequence[str], dividing: str) -> tuple[Sharing, str]:
    """How replicas share a stage, and how the others divide it; what is left out is the first that there is."""
    data, named = split_way(asked) if isinstance(asked, str) else (asked, ())
    division = "+".join(named)
    ways = DIVIDED.get(dividing, ())
    if division and division not in ways:
        if not ways:
            raise Unsupported(f"shard={_written(asked)} is for ranks that divide a stage", hint='use mesh={"pp": 2, "cp": 2}')
        raise unknown_name(f"way to divide a stage over `{dividing}`", division, ways)
    return Sharing(data or DDP), division or next(iter(ways), "")


def _written(asked: str | Sequence[str]) -> str:
    """As Python, with double quotes."""
    return repr(asked).replace("'", '"')


def _checked(asked: Mesh, group: Any) -> dict[str, int]:
    """The sizes of all dimensions."""
    named = {dim.name: dim.size for dim in asked.dims}
    if "pp" not in named or set(named) - set(DIMS) or sum(named.get(name, 1) > 1 for name in DIVIDED) > 1:
        raise Unsupported(
            f"a mesh of pipelines has `pp`, and where they are wanted `dp` and one of {', '.join(DIVIDED)}, "
            f"not {' x '.join(named)}",
            hint='use mesh={"pp": 2, "dp": 2}, or `holdall.fit` for a mesh without pipelines',
        )
    if group is not None:
        raise InvalidInput("`mesh` lays out all ranks, so there is no `group` of some", hint="leave one of them out")
    if asked.ranks != dist.get_world_size():
        raise InvalidInput(
            f"the mesh has {asked.ranks} ranks, but the process group {dist.get_world_size()}",
            hint=f"start with `torchrun --nproc-per-node {asked.ranks}`, or use another mesh",
        )
    return {name: named.get(name, 1) for name in DIMS}
