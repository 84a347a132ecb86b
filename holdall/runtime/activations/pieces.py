"""Runs a token-wise module on a piece of the sequence at a time, in forward and in backward; or a module of convolutions on a
piece of the batch (`by="samples"`).

Forward computes each piece without a graph and saves the module's input alone. Backward computes each piece again with a graph
and differentiates it at once; gradients of weights are added up over the pieces.

The input is saved by a node of its own (`_Remember`), before the forward: a recomputation of the block around it ends there if
nothing after it is needed, and the module is then computed twice in a step, as without pieces.

Tolerance, measured on a CPU with an MLP and an RMS norm of 8192 positions, as the norm of the difference over the norm of the
reference. Outputs and gradients of inputs are the same bits; kernels that sum a product of fewer rows in another order, and
inputs with other users, whose gradients are then added in another order, may change the last ones. Gradients of weights are
sums of sums: in float32 4e-7 from those of the whole sequence; in bfloat16 5e-3 from exact arithmetic over 8 pieces, 8e-3 over
32 and 1.4e-2 over 128, against 4e-3 without pieces, because each sum is rounded, as over micro-batches. Convolutions of fewer
samples may be computed by another algorithm: in float32 all that holds for outputs and gradients of weights alike is 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from holdall.errors import Unsupported
from holdall.runtime.activations.surroundings import autocast_state
from holdall.runtime.patching import put_method

_CHECKED = 4  # rows on which pieces are compared with the whole before the first step


def split(
    module: torch.nn.Module, path: str, rows: int, quiet: Callable[[], AbstractContextManager[object]], by: str = "positions"
) -> Callable[[], None]:
    """Run the module in pieces of so many rows, positions or samples; returns the function that undoes it. `quiet`: memory
    inside is not counted."""
    layout = _Samples() if by == "samples" else _Positions()
    forward = module.forward
    is_checked = False

    def in_pieces(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal is_checked
        call = _Call(module, path, forward, rows, layout, args, kwargs)
        x = call.take()
        if not is_checked:
            with quiet(), torch.no_grad():
                call.check(x)
            is_checked = True
        weights = call.weights()
        if not torch.is_grad_enabled() or not (x.requires_grad or weights):
            with torch.no_grad():
                return call.whole(x)
        token = _Remember.apply(x, *weights)
        out: torch.Tensor = _Split.apply(call, token, x, *weights)
        return out

    return put_method(module, "forward", in_pieces)


class _Positions:
    """Rows are positions: all dimensions but the last count them."""

    what = "position"
    across = -2  # the dimension along which pieces lie

    def count(self, x: torch.Tensor) -> int:
        return x.numel() // x.shape[-1]

    def fits(self, piece: torch.Tensor, out: torch.Tensor) -> bool:
        return out.shape[:-1] == piece.shape[:-1]

    def whole(self, x: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
        """Memory for the results of all rows of the input."""
        return piece.new_empty(*x.shape[:-1], piece.shape[-1])

    def rows_of(self, t: torch.Tensor, rows: slice) -> torch.Tensor:
        """Some rows, with as many dimensions as the whole."""
        return t.reshape(*[1] * (t.dim() - 2), -1, t.shape[-1]).narrow(-2, rows.start, rows.stop - rows.start)


class _Samples(_Positions):
    """Rows are samples: the first dimension counts them."""

    what = "sample"
    across = 0

    def count(self, x: torch.Tensor) -> int:
        return x.shape[0]

    def fits(self, piece: torch.Tensor, out: torch.Tensor) -> bool:
        return out.shape[0] == piece.shape[0]

    def whole(self, x: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
        return piece.new_empty(x.shape[0], *piece.shape[1:])

    def rows_of(self, t: torch.Tensor, rows: slice) -> torch.Tensor:
        return t.narrow(0, rows.start, rows.stop - rows.start)


class _Call:
    """One call of the module, without its input."""

    def __init__(
        self,
        module: torch.nn.Module,
        path: str,
        forward: Callable[..., Any],
        rows: int,
        layout: _Positions,
        args: Any,
        kwargs: Any,
    ) -> None:
        self._module, self._path, self._forward, self._rows, self._layout = module, path, forward, rows, layout
        self._leaves, self._spec = tree_flatten((args, kwargs))
        self._autocast: list[tuple[str, bool, torch.dtype]] = []

    def take(self) -> torch.Tensor:
        """The input, which is not kept here."""
        at = [n for n, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]
        if len(at) != 1 or self._leaves[at[0]].dim() < 2:
            raise Unsupported(f"`{self._path}` is called with {len(at)} tensors, and runs in pieces of one", hint=_WITHOUT)
        x: torch.Tensor = self._leaves[at[0]]
        self._at, self._leaves[at[0]] = at[0], None
        self._autocast = autocast_state([x])
        return x

    def weights(self) -> list[torch.Tensor]:
        """The trained weights as they are now."""
        return [p for p in self._module.parameters() if p.requires_grad]

    def run(self, piece: torch.Tensor) -> torch.Tensor:
        leaves = list(self._leaves)
        leaves[self._at] = piece
        args, kwargs = tree_unflatten(leaves, self._spec)
        out = self._forward(*args, **kwargs)
        if not isinstance(out, torch.Tensor) or not self._layout.fits(piece, out):
            raise Unsupported(f"`{self._path}` does not return a row for every {self._layout.what}", hint=_WITHOUT)
        return out

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """The output, a piece at a time, without a graph."""
        out: torch.Tensor | None = None
        for rows in self._pieces(x):
            piece = self.run(self._layout.rows_of(x, rows))
            if out is None:
                out = self._layout.whole(x, piece)
            self._layout.rows_of(out, rows).copy_(piece)
            del piece
        assert out is not None
        return out

    def gradients(self, x: torch.Tensor, incoming: torch.Tensor, *, wants_input: bool) -> list[torch.Tensor | None]:
        """Gradients of the input and of the weights."""
        weights = self.weights()
        rows_of = self._layout.rows_of
        for_input: torch.Tensor | None = None
        totals: list[torch.Tensor | None] = []
        for rows in self._pieces(x):
            piece = rows_of(x, rows).detach().requires_grad_(wants_input)
            asked = [piece, *weights] if wants_input else weights
            found: list[torch.Tensor | None] = list(
                torch.autograd.grad(self._again(piece), asked, rows_of(incoming, rows), allow_unused=True)
            )
            if wants_input:
                if for_input is None:
                    for_input = torch.empty_like(x, memory_format=torch.contiguous_format)
                rows_of(for_input, rows).copy_(found.pop(0))  # type: ignore[arg-type]
            if not totals:
                totals = _own(found, incoming)
                continue
            for total, more in zip(totals, found, strict=True):
                if total is not None and more is not None:
                    total.add_(more)
            del found, total, more
        return [for_input, *totals]

    def _again(self, piece: torch.Tensor) -> torch.Tensor:
        """The module on a piece, with a graph, under the autocast of the forward."""
        with ExitStack() as stack:
            for device, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, enabled=enabled, dtype=dtype))
            stack.enter_context(torch.enable_grad())
            return self.run(piece)

    def check(self, x: torch.Tensor) -> None:
        """Raise if the module does not treat rows separately, as the trace said."""
        layout = self._layout
        few = min(_CHECKED, layout.count(x))
        try:
            whole = self.run(layout.rows_of(x, slice(0, few)))
            alone = [self.run(layout.rows_of(x, slice(n, n + 1))) for n in range(few)]
        except RuntimeError as error:
            raise Unsupported(f"`{self._path}` cannot run on a few {layout.what}s ({error})", hint=_WITHOUT) from error
        near = 1e-2 if whole.dtype in (torch.bfloat16, torch.float16) else 1e-4
        if not torch.allclose(whole, torch.cat(alone, layout.across), rtol=near, atol=near, equal_nan=True):
            raise Unsupported(f"`{self._path}` mixes {layout.what}s, so it cannot run in pieces", hint=_WITHOUT)

    def _pieces(self, x: torch.Tensor) -> Iterator[slice]:
        count = self._layout.count(x)
        return (slice(first, min(first + self._rows, count)) for first in range(0, count, self._rows))


_WITHOUT = 'plan without pieces: fit(..., allow=["recompute", "offload", "place", "head"])'


def _own(found: list[torch.Tensor | None], incoming: torch.Tensor) -> list[torch.Tensor | None]:
    """The gradients, to be added to: two weights that a module adds up have one gradient, and each needs its own."""
    seen = {incoming.untyped_storage()._cdata}

    def apart(gradient: torch.Tensor) -> torch.Tensor:
        storage = gradient.untyped_storage()
        is_shared = storage._cdata in seen or storage.nbytes() != gradient.nbytes
        mine = gradient.clone(memory_format=torch.contiguous_format) if is_shared else gradient
        seen.add(mine.untyped_storage()._cdata)
        return mine

    return [None if gradient is None else apart(gradient) for gradient in found]


class _Remember(torch.autograd.Function):
    """Saves the module's input for `_Split`, which comes after it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.inputs = 1 + len(weights)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[None, ...]:
        return (None,) * int(ctx.inputs)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, token: torch.Tensor, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        ctx.call, ctx.remembered = call, token.grad_fn
        return call.whole(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.remembered.saved_tensors
        return (None, None, *ctx.call.gradients(x, incoming, wants_input=ctx.needs_input_grad[2]))
