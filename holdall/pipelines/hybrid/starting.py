"""A plan over a mesh as the call of `holdall.pipelines.start` that runs it, where there is one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from holdall.errors import HoldallError, Unsupported
from holdall.pipelines.hybrid.plans import HybridPlan
from holdall.pipelines.hybrid.strategies import DDP, ZERO3
from holdall.pipelines.pipeline import Pipeline
from holdall.pipelines.schedules import pipeline
from holdall.pipelines.tasks import WEIGHT

_HINT = "ask another search, or run the nearest mesh that can be run"


def start_arguments(plan: HybridPlan, model: Any) -> dict[str, Any]:
    """What `start` is to be called with, besides model, loss and a sample; `Unsupported` says why it cannot be."""
    from holdall.pipelines.running.pieces import pieces_of
    from holdall.pipelines.running.stage_ranks.copies import refuse_divided, tied_over_ranks

    mesh = plan.mesh
    if mesh is None and not _is_unequal(plan):
        raise Unsupported(
            "layers are divided differently, or stages have different numbers of GPUs and are sharded", hint=_HINT
        )
    if plan.pipes == 1:
        raise Unsupported("there is one stage, so it is no pipeline", hint=_HINT)
    each = [s.way if mesh is not None and mesh["dp"] > 1 else DDP for s in plan.strategies]
    ways = set(each)
    if mesh is not None and mesh["tp"] > 1 and len(ways) > 1:
        what = f"layers are sharded differently ({', '.join(sorted(ways))}), and tensor ranks divide them"
        raise Unsupported(what, hint=_HINT)
    made = pipeline(plan.schedule, ranks=plan.pipes, micro_batches=plan.micro_batches)
    if mesh is None and is_split(made):
        raise Unsupported(f"`{made.name}` does not run on stages with different numbers of GPUs", hint=_HINT)
    if ZERO3 in ways and is_split(made):
        raise Unsupported(f"`{made.name}` does not run with zero3", hint=_HINT)
    pieces = pieces_of(model)
    if len(pieces) != len(plan.strategies):
        raise Unsupported(f"the model is cut into {len(pieces)} pieces, not {len(plan.strategies)} layers", hint=_HINT)
    tied = tied_over_ranks(pieces, plan.cut, made)
    is_undivided = mesh is not None and mesh["tp"] == 1
    refuse_divided(tied, is_whole=is_undivided and ways == {DDP}, dividing="")
    again = [n for n, s in enumerate(plan.strategies) if s.recompute]
    found: dict[str, Any] = {
        "schedule": plan.schedule,
        "micro_batches": plan.micro_batches,
        "cut": list(plan.cut[1:-1]),
    }
    if mesh is None:
        found["replicas"] = list(plan.devices)
    else:
        found["mesh"] = {name: size for name, size in mesh.items() if name == "pp" or size > 1}
    if ways != {DDP}:
        found["shard"] = each if len(ways) > 1 else each[0]
    if again:
        found["recompute"] = True if len(again) == len(pieces) else again
    return found


def _is_unequal(plan: HybridPlan) -> bool:
    """Have stages different numbers of ranks, each of which has all of its stage?"""
    found = [
        (plan.strategies[n], own) for own, (a, b) in zip(plan.devices, pairwise(plan.cut), strict=True) for n in range(a, b)
    ]
    return all(s.tensor == 1 and s.data == own and (s.way == DDP or own == 1) for s, own in found)


def start_call(plan: HybridPlan, model: Any) -> tuple[str, str]:
    """(the call, or nothing; why there is none)."""
    try:
        given = start_arguments(plan, model)
    except HoldallError as error:
        return "", error.fact
    sample = ", sample=batch" if "tp" in given.get("mesh", ()) or "replicas" in given else ""
    words = ", ".join(f"{name}={_written(value)}" for name, value in given.items())
    return f"holdall.pipelines.start(model, loss=loss, {words}{sample})", ""


def is_split(made: Pipeline) -> bool:
    """Are gradients of weights computed later than those of inputs?"""
    return any(work.kind == WEIGHT for tasks in made.lists for task in tasks for work in task.works)


def _written(value: Any) -> str:
    """As Python, with double quotes."""
    return repr(value).replace("'", '"')
