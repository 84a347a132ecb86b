"""A rank's layers in their ways: installed on its stages, predicted and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from holdall.pipelines.running.budget.choosing import refuse_together
from holdall.pipelines.running.budget.rank_choice import RankChoice
from holdall.pipelines.running.budget.saved import KEEP, HeldBytes, StageLayers, keep_counted
from holdall.pipelines.running.host.memory import host_of
from holdall.runtime.activations.offload import storages_of
from holdall.runtime.budget.meter import device_context

if TYPE_CHECKING:
    from holdall.pipelines.running.starting import PipePlan


class StageSaving(RankChoice):
    """`held`: what autograd holds, and has held at most in the last step."""

    def __init__(
        self, plan: PipePlan, modules: dict[int, torch.nn.Module], rank: int, before: Sequence[Any] | None, loss: Any
    ) -> None:
        super().__init__(plan, modules, rank, before, loss)
        if plan.wishes.budget is not None and not plan.mesh.is_alone:
            self._agree_on_ways()
        self.held = HeldBytes()
        store = host_of(plan.device)
        for stage, module in modules.items():
            layers = self._trials[stage].layers if self._trials else []
            changed = [layer.changed for layer in layers[: self._counts[stage]]] if self._trials else None
            StageLayers(module, self.ways[stage], self.held, store, changed)
        self._plan = replace(plan, sample=None)  # lets the batch go

    def _agree_on_ways(self) -> None:
        """Ranks of one stage do the same about its layers, inside of which they may talk: as the one that changes most."""
        own = (self._rank, sum(self.layers.values()) + len(self.place), self.ways, self.place)
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, own)
        _, _, self.ways, self.place = max((told for told in said if told[0] == self._rank), key=lambda told: told[1])
        self.predict()

    def agree(self) -> None:
        """Refuse, on all ranks, a budget that one of them cannot keep."""
        if self._wishes.budget is not None:
            refuse_together(self._wishes, self.fits, self.smallest)

    @property
    def whole(self) -> dict[str, int]:
        """The most bytes of the device in each part of a training step, with those that are not of tensors."""
        device = self._plan.device
        outside = self._besides + (device_context(device) if device.type == "cuda" else 0)
        return {part: nbytes + outside for part, nbytes in self.parts.items()}

    @property
    def peak(self) -> int | None:
        """The most of them; None: the optimizer or a sample is missing."""
        return max(self.whole.values(), default=None)

    @property
    def by_layer(self) -> dict[int, str]:
        """The way of each of this rank's layers, by its number in the model."""
        return {self._firsts[s] + n: way for s, ways in self.ways.items() for n, way in enumerate(ways)}

    @property
    def layers(self) -> dict[int, int]:
        """Stage -> how many of its layers do not just keep what they save."""
        return {stage: sum(way != KEEP for way in ways) for stage, ways in self.ways.items()}

    def counted(self, loss: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
        """The loss, with what autograd saves of it counted."""

        def run(output: Any, target: torch.Tensor) -> torch.Tensor:
            return keep_counted(loss, (output, target), {}, set(storages_of(target)), self.held)  # type: ignore[no-any-return]

        return run
