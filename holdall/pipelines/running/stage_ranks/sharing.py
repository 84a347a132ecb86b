"""How the replicas of a pipeline share the pieces of a stage, all in one way or each in its own.

    ddp     each has all of it; gradients are averaged once, after the last micro-batch
    zero2   parameters and gradients are in shards between steps: gathered once in a step, scattered after its last micro-batch
    zero3   parameters are gathered again for every forward and backward of a micro-batch, layer by layer; gradients are whole
            until the last micro-batch, as torch's pipelines have them; "fsdp" is the same

The last two are torch's `fully_shard`. Where pieces differ, those of ddp have DTensors too (replicated), so that optimizers and
norms see one kind of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdall.errors import InvalidInput, unknown_name
from holdall.parallel.parts import Division, Made, avoid_fast_paths, replicate
from holdall.parallel.sharding.build import shard_model

DDP, ZERO2, ZERO3 = "ddp", "zero2", "zero3"
WAYS = (DDP, ZERO2, ZERO3, "fsdp")


class Sharing:
    """`ways`: of the pieces in their order; one for all, if it is one."""

    def __init__(self, asked: str | Sequence[str]) -> None:
        each = (asked,) if isinstance(asked, str) else tuple(asked)
        for way in each:
            if way not in WAYS:
                raise unknown_name("way to share a stage", way, WAYS)
        found = tuple(ZERO3 if way == "fsdp" else way for way in each)
        self.count = None if isinstance(asked, str) else len(found)  # of pieces that were named
        self.ways = found[:1] if len(set(found)) == 1 else found

    def __contains__(self, way: str) -> bool:
        return way in self.ways

    @property
    def is_mixed(self) -> bool:
        return len(self.ways) > 1

    @property
    def is_whole(self) -> bool:
        """Is nothing in shards?"""
        return self.ways == (DDP,)

    def check_pieces(self, pieces: int) -> None:
        if self.count not in (None, pieces):
            raise InvalidInput(
                f"`shard` names {self.count} ways, but the model is cut into {pieces} pieces",
                hint='name one for each piece, or one for all: shard="zero2"',
            )

    def of(self, low: int, high: int) -> tuple[str, ...]:
        """Of some pieces."""
        return self.ways[low:high] if self.is_mixed else self.ways * (high - low)

    def share(self, module: torch.nn.Module, ways: Sequence[str], over: Any) -> None:
        """Share a stage's module over a mesh of replicas, in place. `ways`: of its pieces."""
        if self.is_whole:
            return
        if not self.is_mixed:
            shard_model(module, [name for name, _ in module.named_children()], over, self.ways[0])
            return
        from torch.distributed.fsdp import fully_shard

        division, made = Division(over), Made()
        for piece, way in zip(module.children(), ways, strict=True):
            if way != DDP:
                shard_model(piece, [], over, way)
                continue
            for inner in list(piece.modules()):
                if next(inner.parameters(recurse=False), None) is not None:
                    replicate(inner, division, made)
            avoid_fast_paths(piece)
        fully_shard(module, mesh=over, ignored_params=set(made.values()))  # for torch's stages, which ask the outermost

    def is_whole_on_all(self, p: Any) -> bool:
        """Do all replicas have the whole parameter, and gradients of their own batches?"""
        return bool(p.placements[0].is_replicate()) if self.is_mixed else self.is_whole
