"""What a pipeline is to be, from the arguments of `start`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from holdall.errors import InvalidInput
from holdall.pipelines.cuts import check_bounds, even_cut
from holdall.pipelines.pipeline import ONE, Pipeline
from holdall.pipelines.running.budget.choosing import Some, Wishes, check_wishes
from holdall.pipelines.running.budget.rule_bytes import MakeOptimizer
from holdall.pipelines.running.mesh import PipeMesh
from holdall.pipelines.running.pieces import check_whole, pieces_of
from holdall.pipelines.running.stage_ranks.copies import Tied, refuse_divided, tied_over_ranks
from holdall.pipelines.running.stage_ranks.divided import Sample, sample_of
from holdall.pipelines.running.stage_ranks.unequal import UnequalMesh
from holdall.pipelines.schedules import pipeline
from holdall.types.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class PipePlan:
    """What a run is to be; making it takes no other rank."""

    made: Pipeline
    mesh: PipeMesh
    pieces: list[torch.nn.Module]
    bounds: tuple[int, ...]
    tied: list[Tied]
    wishes: Wishes
    optimizer: MakeOptimizer | None
    accumulate: int  # batches of a training step
    sample: Sample | None  # a micro-batch
    device: torch.device

    def cut(self, stage: int) -> tuple[int, int]:
        """The first layer of a stage, and the one after its last."""
        place = stage % self.made.chain
        return self.bounds[place], self.bounds[place + 1]


def made_plan(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    *,
    schedule: str = "1f1b",
    micro_batches: int | None = None,
    cut: Sequence[int] | None = None,
    optimizer: MakeOptimizer | None = None,
    group: Any = None,
    mesh: Mapping[str, int] | Mesh | None = None,
    shard: str | Sequence[str] = "ddp",
    replicas: Sequence[int] | None = None,
    sample: Any = None,
    recompute: Some = None,
    offload: Some = None,
    place: Some = None,
    budget: str | int | None = None,
    accumulate: int = 1,
    **options: Any,
) -> PipePlan:
    """See `holdall.pipelines.start`."""
    if micro_batches is None:
        raise InvalidInput("a pipeline needs a number of micro-batches", hint='use micro_batches=8, or mesh="auto"')
    if replicas is not None and (mesh is not None or shard != "ddp"):
        raise InvalidInput("`replicas` lays out all ranks, without `mesh` and `shard`", hint="leave one of them out")
    on = PipeMesh(mesh, shard, group) if replicas is None else UnequalMesh(replicas, group)
    made = pipeline(schedule, ranks=on.sizes["pp"], micro_batches=micro_batches, **options)
    on.check(made)
    if made.weights != ONE and optimizer is None:
        raise InvalidInput(
            f"`{made.name}` updates weights inside a step, so it makes the optimizer itself",
            hint="pass optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)",
        )
    pieces = pieces_of(model)
    on.sharing.check_pieces(len(pieces))
    sizes = [sum(p.numel() * p.element_size() for p in piece.parameters()) for piece in pieces]
    bounds = check_bounds(cut, len(pieces), made.chain) if cut is not None else even_cut(sizes, made.chain)
    tied = tied_over_ranks(pieces, bounds, made)
    refuse_divided(tied, is_whole=on.sharing.is_whole, dividing=on.dividing)
    wishes = check_wishes(Wishes.of(recompute, offload, place, budget, len(pieces)), made, on, optimizer)
    asks = replicas is not None or on.dividing in ("tp", "cp") or wishes.budget is not None
    device = device_of(pieces)
    check_backend(device, group)
    check_whole(model, pieces)
    on.check_pieces(pieces, device)
    part = sample_of(sample, micro_batches, device) if asks or sample is not None else None
    if part is not None:
        on.check_rows(len(part[0]))
    how: dict[str, Any] = {"tied": tied, "wishes": wishes, "optimizer": optimizer, "sample": part, "device": device}
    return PipePlan(made=made, mesh=on, pieces=pieces, bounds=tuple(bounds), accumulate=accumulate, **how)


def device_of(pieces: Sequence[torch.nn.Module]) -> torch.device:
    """The device of the model, all of which is on one."""
    found = list(dict.fromkeys(p.device for piece in pieces for p in piece.parameters()))
    if any(device.type == "meta" for device in found):
        raise InvalidInput("parameters of the model are on the meta device, as after a cut", hint="build the model again")
    if len(found) > 1:
        raise InvalidInput(
            f"the model's parameters are on {found[0]} and {found[1]}", hint="put all of it on this rank's device"
        )
    return found[0] if found else torch.device("cpu")


def check_backend(device: torch.device, group: Any) -> None:
    """Refuse a process group that sends nothing from the model's device."""
    kind = "nccl" if device.type == "cuda" else "gloo"
    backends = dist.get_backend_config(group)
    if f"{device.type}:{kind}" not in backends.split(","):
        raise InvalidInput(
            f"the model is on {device}, but the process group is of {backends}",
            hint=f'use torch.distributed.init_process_group("{device.type}:{kind}"), or put the model elsewhere',
        )
