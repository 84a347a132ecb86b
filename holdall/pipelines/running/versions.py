"""A stage whose micro-batches compute with versions of its weights: PipeDream's stashes, 2BW's two, XPipe's predictions.

The stage's own parameters, which the optimizer updates, are the newest version. A forward runs with working parameters that
share their memory; an update first moves the own parameters to new memory if a micro-batch still needs the old, so there are
never more copies than versions.
"""

from __future__ import annotations

from typing import Any

import torch

from holdall.errors import Unsupported
from holdall.pipelines.holding import WeightVersions
from holdall.pipelines.pipeline import DOUBLE, PREDICTED, Pipeline
from holdall.pipelines.running.torch_names import ChainedStage
from holdall.pipelines.schedules.xpipe import updates_ahead


class VersionedStage(ChainedStage):
    def __init__(
        self,
        module: torch.nn.Module,
        index: int,
        pipeline: Pipeline,
        device: torch.device,
        group: Any,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        super().__init__(module, index, pipeline, device, group)
        found = [(m._parameters, name, p) for m in module.modules() for name, p in m._parameters.items() if p is not None]
        self._slots = [(slots, name) for slots, name, _ in found]
        self._own = [p for _, _, p in found]
        self._optimizer = optimizer
        self.begin()

    def begin(self) -> None:
        """Forget all versions: a run of micro-batches is over, or begins."""
        self._versions = WeightVersions(self.pipeline)
        self._working: dict[int, list[torch.nn.Parameter]] = {}
        self.most = 1  # versions at once, so far
        self.used: list[int] = []  # version of every micro-batch, in the order of their forwards
        self.gaps: list[int] = []  # updates between each prediction and the update that it is for

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        version = self._versions.forward(fwd_chunk_id)
        self.used.append(version)
        self._swap_in(self._parameters_of(version))
        try:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        finally:
            self._swap_in(self._own)
            self.most = max(self.most, self._count())

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._versions.backward(bwd_chunk_id)

    def update(self) -> None:
        """One step of the optimizer with the gradients since the last."""
        per = self.pipeline.per_update
        totals: list[torch.Tensor | None] = [None] * len(self._own)
        for version in sorted(self._working):
            for i, p in enumerate(self._working[version]):
                total = totals[i]
                if p.grad is not None:
                    totals[i] = p.grad if total is None else total + p.grad
                    p.grad = None
        newest = self._versions.newest
        if self.pipeline.weights == DOUBLE:
            self._parameters_of(newest)  # the next micro-batches may use it though none has yet
        self._versions.update()
        if self.pipeline.weights != PREDICTED and newest in self._working and self._versions.is_needed(newest):
            for p in self._own:
                p.data = p.data.clone()
        for version in [v for v in self._working if not self._versions.is_needed(v)]:
            del self._working[version]
        for p, total in zip(self._own, totals, strict=True):
            p.grad = None if total is None else total.div_(per)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.most = max(self.most, self._count())

    def _parameters_of(self, version: int) -> list[torch.nn.Parameter]:
        if version not in self._working:
            if self.pipeline.weights == PREDICTED:
                ahead = updates_ahead(self.stage_index, self.pipeline.ranks, self.pipeline.per_update)
                self.gaps.append(version - self._versions.newest)
                ahead = min(ahead, self.gaps[-1])  # a run begins with fewer under way
                values = [predicted(self._optimizer, p, ahead) for p in self._own]
            else:
                values = [p.data for p in self._own]
            self._working[version] = [torch.nn.Parameter(v) for v in values]
        return self._working[version]

    def _swap_in(self, parameters: list[torch.nn.Parameter]) -> None:
        for (slots, name), p in zip(self._slots, parameters, strict=True):
            slots[name] = p

    def _count(self) -> int:
        """Distinct memories of the weights."""
        return len({p.data_ptr() for p in (self._own[0], *(working[0] for working in self._working.values()))})


def check_predictable(optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, (torch.optim.SGD, torch.optim.Adam)):  # AdamW is an Adam
        raise Unsupported(
            f"XPipe cannot predict the weights of {type(optimizer).__name__}", hint="use SGD with momentum, Adam or AdamW"
        )


@torch.no_grad()
def predicted(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter, updates: int) -> torch.Tensor:
    """The weights after so many more updates like the last one."""
    (group,) = [g for g in optimizer.param_groups if any(q is p for q in g["params"])]
    state = optimizer.state.get(p, {})
    rate = updates * group["lr"]
    if not updates or not state:
        return p.detach().clone()
    if isinstance(optimizer, torch.optim.SGD):
        momentum = state.get("momentum_buffer")
        return p.detach().clone() if momentum is None else p - rate * momentum
    step = float(state["step"])
    beta1, beta2 = group["betas"]
    mean = state["exp_avg"] / (1 - beta1**step)
    root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt()
    ahead: torch.Tensor = p - rate * mean / (root + group["eps"])
    return ahead
