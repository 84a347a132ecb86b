"""Context ranks: the sequence of a stage is divided by `parallel/context.py`, and stages send each rank's part of it.

The first piece of the model gets whole inputs on every context rank, since it may add what depends on positions, and what it
returns is cut; the last piece's parts are joined, so that the loss is the user's own, which may shift or weigh positions. All
pieces but the first compute on parts: attention together (`F.scaled_dot_product_attention`), the rest position by position. The
layers of Hugging Face's decoders are told which positions they have. Dropout draws other numbers on each rank.

Every rank has all parameters of its stage, with a part of their gradients; the sums are taken after the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_iter, tree_map_only

from holdall.errors import Unsupported
from holdall.parallel.context import all_positions, attention_over, own_positions, ring_of
from holdall.parallel.parts import Division, Fork, wrap
from holdall.pipelines.running.mesh import PipeMesh
from holdall.pipelines.running.pieces import DecoderPiece
from holdall.pipelines.running.stage_ranks.divided import Divider, Sample

_SHORTEST = 2  # positions of a part: models take a single one for a step of generation, which masks nothing


class ByContext(Divider):
    """Lets this rank's stages compute on its part of the sequence."""

    def __init__(
        self,
        pieces: Sequence[torch.nn.Module],
        sample: Sample,  # noqa: ARG002
        before: Sequence[Any],
        loss: Any,  # noqa: ARG002
        mesh: PipeMesh,
    ) -> None:
        on = mesh.on["cp"]
        self._way, self._division = mesh.division, Division(on)
        self._ring = ring_of(self._division, self._way)
        self._last = len(pieces) - 1
        inner = torch.nn.Sequential(*pieces[1:])
        norms = [path for path, m in inner.named_modules() if isinstance(m, _BatchNorm)]
        if norms:
            raise Unsupported(
                f"`{norms[0]}` takes averages over all positions, and is not divided along the sequence",
                hint='leave `cp` out of the mesh, and use {"pp": ..., "dp": ...}',
            )
        super().__init__([before[0], *map(self._own, before[1:-1]), before[-1]], self._division.group)

    def _divide(self, module: torch.nn.Module, low: int, high: int) -> None:
        for n, piece in zip(range(low, high), module.children(), strict=True):
            wrap(piece, self._first if n == 0 else self._inner(is_last=n == self._last))
            if isinstance(piece, DecoderPiece):
                piece.places = self._places
                piece.longest = None if piece.longest is None else piece.longest // self._ring.ranks

    def _first(self, plain: Callable[..., Any], *args: Any) -> Any:
        return self._own(plain(*args)) if self._last else plain(*args)

    def _inner(self, *, is_last: bool) -> Callable[..., Any]:
        def forward(plain: Callable[..., Any], *args: Any) -> Any:
            drawn = Fork(self._division)
            drawn.begin()
            try:
                with attention_over(self._ring, self._way):
                    found = plain(*args)
            finally:
                drawn.end()
            return self._whole(found, _length(args)) if is_last else found

        return forward

    def _own(self, value: Any) -> Any:
        """This rank's part of all that lies along the sequence."""
        length = _length(value)
        pieces = self._ring.ranks * (2 if self._ring.zigzag else 1)
        if length % pieces or length < _SHORTEST * pieces:
            raise Unsupported(
                f"a sequence of {length} positions cannot be divided into {pieces} pieces",
                hint=f"use tensors of (rows, positions, ...) with a multiple of {pieces} positions, and no fewer than "
                f"{_SHORTEST * pieces}",
            )
        return _along(lambda t: own_positions(t, self._ring), value, length)

    def _whole(self, value: Any, length: int) -> Any:
        return _along(lambda t: all_positions(t, self._ring), value, length)

    def _places(self, length: int, device: torch.device) -> torch.Tensor:
        return own_positions(torch.arange(length * self._ring.ranks, device=device)[None], self._ring)[0]


def _length(value: Any) -> int:
    """Positions of what a piece gets or returns; 0: there are none."""
    return next((t.shape[1] for t in tree_iter(value) if isinstance(t, torch.Tensor) and t.dim() > 1), 0)


def _along(change: Callable[[torch.Tensor], torch.Tensor], value: Any, length: int) -> Any:
    """The value with its tensors along the sequence changed."""
    return tree_map_only(torch.Tensor, lambda t: change(t) if t.dim() > 1 and t.shape[1] == length else t, value)
