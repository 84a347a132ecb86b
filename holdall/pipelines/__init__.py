"""Pipeline parallelism: published schedules as lists of tasks, their simulator, cuts into stages, and runs.

    from holdall.pipelines import pipeline, simulate

    made = pipeline("1f1b", ranks=4, micro_batches=8)
    print(simulate(made).bubble)

Simulating needs no torch. `holdall.pipelines.running` runs a model; docs/pipelines.md shows both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdall.pipelines.costs import PipeCosts, StageCosts
from holdall.pipelines.lowering import lower
from holdall.pipelines.pipeline import Pipeline, PipeSchedule
from holdall.pipelines.schedules import pipeline, schedule, schedule_names
from holdall.pipelines.simulator import PipeTimeline, simulate
from holdall.pipelines.tasks import PipeTask, read_task

if TYPE_CHECKING:
    from holdall.pipelines.running.pipe import PipeRun
    from holdall.types.mesh import Mesh

__all__ = [
    "PipeCosts",
    "PipeSchedule",
    "PipeTask",
    "PipeTimeline",
    "Pipeline",
    "StageCosts",
    "lower",
    "pipeline",
    "read_task",
    "schedule",
    "schedule_names",
    "simulate",
    "start",
]


def start(
    model: Any,
    *,
    schedule: str = "1f1b",
    micro_batches: int | None = None,
    loss: Callable[[Any, Any], Any],
    cut: Sequence[int] | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    group: Any = None,
    mesh: Mapping[str, int] | Mesh | str | None = None,
    shard: str | Sequence[str] = "ddp",
    replicas: Sequence[int] | None = None,
    sample: Any = None,
    recompute: bool | Sequence[int] | None = None,
    offload: bool | Sequence[int] | None = None,
    place: bool | Sequence[int] | None = None,
    budget: str | int | None = None,
    accumulate: int = 1,
    **options: Any,
) -> PipeRun:
    """Cut a model over the ranks of a run and return this rank's part; every rank calls it with the same model, on the device
    that the rank computes on (CPUs by gloo, GPUs by nccl).

    `model`: an `nn.Sequential`, a list of modules, or a Hugging Face decoder laid out like Llama or GPT-2. `schedule`: one of
    `schedule_names()`, with options as in "interleaved:chunks=3". `loss`: a function `(output, target) -> scalar`, a mean over
    the rows. `cut`: numbers of the pieces at which stages begin, without 0; by default stages have about equal parameter bytes.
    `optimizer`: a function `parameters -> optimizer`: schedules that update inside a step (pipedream, 2bw, xpipe) use it there,
    for others `pipe.optimizer()` makes the optimizer by it.
    `group`: the process group, by default all ranks.

    `mesh`: sizes of `pp` and, beside it, of `dp` (pipelines with batches of their own) and of one of `tp`, `cp` and `ep` (ranks
    that divide the layers, the sequence or the experts of a stage); "auto" chooses mesh, schedule, number of micro-batches, cut
    and `shard` for the ranks that run, by `budget`, `optimizer`, and `sample`, which is then the batch of all replicas.
    `shard`: how data ranks share a stage: "ddp", "zero2", or "zero3" ("fsdp"), or a list with one of them for each piece of
    the model; for `cp` also how attention is divided: "ring", "zero2+ring". `replicas`, in place of a mesh: ranks of each rank
    of the pipeline, as in [2, 1], which split the rows of every micro-batch. `sample`: a batch `(inputs, targets)`, as `step`
    takes it: needed for `tp`, `cp`, `replicas` and `budget`, and for a prediction.
    `recompute`, `offload`, `place`: True, or numbers of pieces; `place`: whose optimizer states are in host memory, with the
    optimizer of `pipe.optimizer()`. `budget`: bytes of this rank's device in a training step of `accumulate` batches, with
    `sample` and `optimizer`: as few pieces as will do are recomputed, and where `offload` and `place` say that they may be,
    offloaded and placed. `pipe.report()` compares what was predicted and measured.
    """
    from holdall.pipelines.running.pipe import start as start_here

    given: dict[str, Any] = {"loss": loss, "cut": cut, "optimizer": optimizer, "group": group, "mesh": mesh, "shard": shard}
    given["replicas"] = replicas
    saving = {"sample": sample, "recompute": recompute, "offload": offload, "place": place, "budget": budget}
    saving["accumulate"] = accumulate
    return start_here(model, schedule=schedule, micro_batches=micro_batches, **given, **saving, **options)
