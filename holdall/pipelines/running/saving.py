"""A rank's layers in their ways: chosen, installed on its stages, predicted and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from holdall.pipelines.running.choosing import RankBytes, Ways, chosen, refuse_together
from holdall.pipelines.running.host.memory import host_of
from holdall.pipelines.running.saved import KEEP, HeldBytes, LayerSaves, StageLayers, keep_counted, try_stage
from holdall.pipelines.tasks import INPUT
from holdall.runtime.activations.offload import storages_of

if TYPE_CHECKING:
    from holdall.pipelines.running.pipe import PipePlan


class StageSaving:
    """`ways`: stage -> the way of each layer. `predicted`: the most bytes that autograd will hold on this rank; None: no sample
    was given. `held`: what it holds and has held at most in the last step."""

    def __init__(
        self, plan: PipePlan, modules: dict[int, torch.nn.Module], rank: int, before: Sequence[Any] | None, loss: Any
    ) -> None:
        """`before`: what every piece gets in a forward of the sample; None: there is no sample."""
        made, wishes = plan.made, plan.wishes
        self.held = HeldBytes()
        self._wishes, self._fits, self._smallest = wishes, True, 0
        self.predicted: int | None = None
        firsts = {stage: plan.cut(stage)[0] for stage in modules}
        self._firsts = firsts
        counts = {stage: len(list(module.children())) for stage, module in modules.items()}
        self.ways: Ways = {stage: wishes.plainly(firsts[stage], counts[stage]) for stage in modules}
        saves: dict[int, list[LayerSaves]] = {}
        if before is not None and plan.sample is not None:
            for stage, module in modules.items():
                inputs = _as_received(before[firsts[stage]], is_first=made.before(stage) is None)
                is_last = made.after(stage) is None
                ends = (loss, plan.sample[1]) if is_last else (None, None)
                in_two = made.before(stage) is not None and any(w.kind == INPUT for t in made.lists[rank] for w in t.works)
                saves[stage] = try_stage(module, inputs, plan.device, *ends, in_two=in_two)
            bytes_of = RankBytes(made, rank, saves)
            if wishes.budget is not None:
                found, self._smallest = chosen(wishes, bytes_of, firsts, counts)
                self._fits, self.ways = found is not None, found or self.ways
            self.predicted = bytes_of.peak(self.ways)
        store = host_of(plan.device)
        for stage, module in modules.items():
            changed = [layer.changed for layer in saves[stage][: counts[stage]]] if stage in saves else None
            StageLayers(module, self.ways[stage], self.held, store, changed)

    def agree(self) -> None:
        """Refuse, on all ranks, a budget that one of them cannot keep."""
        if self._wishes.budget is not None:
            refuse_together(self._wishes, self._fits, self._smallest)

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


def _as_received(value: Any, *, is_first: bool) -> Any:
    """What a stage gets, with gradients where a stage before it wants them."""

    def own(t: torch.Tensor) -> torch.Tensor:
        return t.detach().clone().requires_grad_(t.is_floating_point() and not is_first)

    return torch.utils._pytree.tree_map_only(torch.Tensor, own, value)
