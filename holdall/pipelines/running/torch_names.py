"""torch's pipeline runtime: every private name of it that is used here, and the check that they are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from holdall.errors import Unsupported
from holdall.pipelines.pipeline import Pipeline
from holdall.pipelines.running.undone import as_if_not_run
from holdall.pipelines.tasks import OVERLAP, UPDATE, PipeTask

try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining import schedules as _schedules
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    _Runtime = _schedules._PipelineScheduleRuntime
    _Action = _schedules._Action
    _Kind = _schedules._ComputationType
    _MISSING = [
        n
        for n in (
            "_prepare_schedule_with_comms",
            "register_custom_function",
            "_step_microbatches",
            "_assert_unsharded",
            "_initialize_stages",
        )
        if not hasattr(_Runtime, n)
    ]
except (ImportError, AttributeError) as error:  # another version of torch
    raise Unsupported(
        f"torch {torch.__version__} has no pipeline runtime that holdall knows ({error})", hint="install torch 2.13"
    ) from None
if _MISSING:
    raise Unsupported(f"torch {torch.__version__}'s pipeline runtime lacks {_MISSING}", hint="install torch 2.13")


class ListRuntime(_Runtime):
    """Runs lowered lists on torch's runtime. Losses are kept by micro-batch: where there are two chains, each has some only."""

    def __init__(
        self,
        pipeline: Pipeline,
        lists: tuple[tuple[PipeTask, ...], ...],
        stages: list[Any],
        loss: Callable[..., torch.Tensor],
        update: Callable[[int, int], None] | None,
    ) -> None:
        super().__init__(stages, pipeline.micro_batches, loss_fn=loss, scale_grads=False)
        mapping = dict(enumerate(pipeline.rank_of))
        self.stage_index_to_group_rank = mapping
        for stage in stages:
            stage.stage_index_to_group_rank = mapping
        self.pipeline_order_with_comms = {rank: [_action(task) for task in tasks] for rank, tasks in enumerate(lists)}
        if update is not None:
            self.register_custom_function(_Kind.REDUCE_GRAD, lambda a, _: update(a.stage_index, a.microbatch_index))
        self.losses: dict[int, torch.Tensor] = {}  # micro-batch -> its loss, of this rank's last stages
        self._loss_of = loss
        self._graphs: dict[int, torch.Tensor] = {}

    @property
    def own_stages(self) -> list[Any]:
        """The stages of this rank."""
        return self._stages  # type: ignore[no-any-return]

    def _assert_unsharded(self, stage: Any) -> None:
        """`fully_shard`'s own hooks gather parameters where they are needed."""

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> Any:
        """torch finds shapes by a forward of uninitialised tensors, at the first step, which leaves nothing behind."""
        with as_if_not_run([stage.submod for stage in self._stages], self._stages[0].device):
            return super()._initialize_stages(*args, **kwargs)

    def _maybe_compute_loss(self, stage: Any, output: Any, target_mbs: Any, mb_index: int, *_: Any) -> None:
        if stage.is_last:
            loss = self._loss_of(output, target_mbs[mb_index])
            self._graphs[mb_index] = loss
            self.losses[mb_index] = loss.detach().clone()  # some losses lie in as many bytes as what they are of

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> torch.Tensor | None:
        return self._graphs.pop(mb_index) if stage.is_last else None

    def _update_losses(self, stages: Any, losses: Any) -> None:
        """Losses are read from `losses`."""


class ChainedStage(PipelineStage):
    """A stage of one of several chains: the last stage of one hands nothing to the first of the next."""

    def __init__(self, module: torch.nn.Module, index: int, pipeline: Pipeline, device: torch.device, group: Any) -> None:
        self.pipeline = pipeline
        super().__init__(module, index, pipeline.stages, device, group=group)

    @property
    def is_first(self) -> bool:
        return self.pipeline.before(self.stage_index) is None

    @property
    def is_last(self) -> bool:
        return self.pipeline.after(self.stage_index) is None

    def set_local_fwd_input(self, *given: Any) -> None:
        if not self.is_first:
            super().set_local_fwd_input(*given)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return () if self.is_first else super().get_local_bwd_output(mb_index)

    def set_local_bwd_input(self, *given: Any) -> None:
        if not self.is_last:
            super().set_local_bwd_input(*given)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """torch tells the first stage, which has no gradients of inputs, by its number 0; the second chain's has another."""
        index = self.stage_index
        self.stage_index = 0 if self.is_first else index
        try:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        finally:
            self.stage_index = index


class ShardedStage(ChainedStage):
    """A stage under `fully_shard`; gradients are whole until `reduce`. `again`: pieces of it that gather parameters for every
    micro-batch."""

    def __init__(
        self,
        module: torch.nn.Module,
        index: int,
        pipeline: Pipeline,
        device: torch.device,
        group: Any,
        *,
        again: Sequence[int],
    ) -> None:
        super().__init__(module, index, pipeline, device, group)
        pieces = list(module.children())
        self._again = [pieces[n] for n in again]

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        found = super().backward_maybe_with_nosync(*args, **kwargs)
        for piece in self._again:
            _reshard(piece)
        return found

    def reduce(self) -> None:
        """Scatter the sums of gradients over the replicas, as means, and let gathered parameters go."""
        self.perform_reduce_grad(1)
        _reshard(self.submod)


def _reshard(module: torch.nn.Module) -> None:
    for inner in module.modules():
        if isinstance(inner, FSDPModule):
            inner.reshard()


def backward_of_inputs(outputs: list[torch.Tensor], inputs: list[Any], module: torch.nn.Module, grads: Any = None) -> Any:
    """The first part of a backward in two, from gradients of ones; returns what the second part needs of the graph."""
    return stage_backward_input(outputs, grads, inputs, module.parameters())[1]


def backward_of_weights(module: torch.nn.Module, rest: Any) -> None:
    """The second part; `rest`: what the first has returned."""
    stage_backward_weight(module.parameters(), rest)


def _action(task: PipeTask) -> Any:
    if task.kind == OVERLAP:
        return _Action(-1, _Kind.OVERLAP_F_B, None, tuple(map(_action, task.parts)))
    kind = _Kind.REDUCE_GRAD if task.kind == UPDATE else _Kind.from_str(task.kind)
    return _Action(task.stage, kind, task.batch)
