"""Tensor: divide linear layers over ranks, by columns and then by rows; with them the heads of attention and the words.

After Megatron-LM (arXiv 1909.08053) and, with the way "sequence", Korthikanti et al. (arXiv 2205.05198), which divides what is
between the layers along the sequence. On a mesh of `tp` and `cp` the sequence of the model's calls is divided too, as by the
action `context`, and on one with `ep` the experts of mixtures, as by `experts`. The trace is taken with the model divided, as
one rank; `parallel/tensor.py` has all of it. All ranks but those along `ep` have the same batch. Installing the action divides
the model, which stays divided when the harness is closed.

Not the bits of one process, since sums over features are taken in parts: gradients differ by rounding (1e-15 in float64).
Dropout between the layers draws other numbers on every rank, and in the whole other ones than one process does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from holdall.actions.shard import Shard, of_step
from holdall.types import Trace
from holdall.types.info import TensorRegion

if TYPE_CHECKING:
    import torch

    from holdall.parallel.parts import Division


@dataclass(frozen=True, kw_only=True)
class Tensor(Shard):
    regions: tuple[TensorRegion, ...]
    vocabulary: tuple[str, ...]  # modules that are divided by words
    attention: tuple[str, ...] = ()  # modules whose attention is over a sequence that is divided too
    experts: tuple[str, ...] = ()  # stacks of experts that are divided too

    name: ClassVar[str] = "tensor"

    @staticmethod
    def samples(trace: Trace) -> list[Shard]:
        """The division of the trace, if it has one."""
        shards = trace.about.shards
        if shards is None or not shards.regions:
            return []
        own = {name: getattr(shards, name) for name in ("regions", "vocabulary", "attention", "experts")}
        return [Tensor(**of_step(shards), **own)]

    def divide(self, model: torch.nn.Module, meshes: Mapping[str, Any], ways: Sequence[str]) -> Division:
        from holdall.parallel.ways import divide_by

        found = {name: getattr(self, name) for name in ("vocabulary", "attention", "experts", "readers")}
        return divide_by(ways, model, meshes, regions=self.regions, stack=self.groups, **found)
