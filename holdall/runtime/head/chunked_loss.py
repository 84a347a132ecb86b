"""Cross entropy of a linear head in chunks of rows, so that the logits are never materialised whole.

For each chunk: logits, losses and, in the logits' memory, their gradient (the idea of Liger-Kernel, arXiv 2410.10989). The
logits may be soft-capped or scaled (`elementwise.py`). The softmax is computed in float32 and takes fewer rows at a time than
the three matrix products. The gradients of the hidden rows and of the weight are kept for backward. Two kinds of loss need the
incoming gradient first and recompute their logits in backward: one loss per row, and float16, whose gradients vanish unless
they are scaled.

Where ranks have a part of the words each (`divided_words.py`), they find the largest logit of every row and two or three sums
together; no rank has another's logits.

Tolerance, measured on a CPU as the norm of the difference over the norm of the reference. float32, 8 chunks against the whole:
loss 1e-7, gradients 4e-7. bfloat16 against exact arithmetic: loss 4e-5 and gradient of the hidden rows 4e-3, both the same as
without chunks (one chunk gives the same bits); gradient of the weight 5e-3 over 8 chunks, 7e-3 over 32 and 1e-2 over 128,
against 4e-3 without chunks, because bfloat16 sums are rounded once per chunk, as over micro-batches. Soft-capping and scaling
do not change these figures.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch

from holdall.runtime.head.divided_words import DividedWords
from holdall.runtime.head.elementwise import NO_CHAIN, Chain, Stretch

_WIDE = 2**27  # bytes of float32 softmax at a time: enough to keep a GPU busy, a quarter of a whole chunk's
Gradients = tuple["torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]  # of hidden, weight and bias


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The arguments of a call of `torch.nn.functional.cross_entropy`."""

    rows: int  # rows per chunk
    dtype: torch.dtype  # of the loss
    ignore_index: int
    reduction: str
    smoothing: float
    chain: Chain = NO_CHAIN  # elementwise ops on the logits before the loss; of this rank's words
    words: DividedWords | None = None  # of which this rank has a part; None: it has them all


def chunked_cross_entropy(
    hidden: torch.Tensor,  # [N, H], in the dtype of the logits
    weight: torch.Tensor,  # [V, H]
    bias: torch.Tensor | None,  # [V]
    labels: torch.Tensor,  # [N]
    importance: torch.Tensor | None,  # [V], the `weight` of the classes; without smoothing only
    asked: Asked,
) -> torch.Tensor:
    """`cross_entropy(linear(hidden, weight, bias), labels)`; differentiable once."""
    loss: torch.Tensor = _ChunkedLoss.apply(hidden, weight, bias, labels, importance, asked, torch.is_grad_enabled())
    return loss


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        importance: torch.Tensor | None,
        asked: Asked,
        live: bool,
    ) -> torch.Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        ignored = labels == asked.ignore_index
        labels = labels.masked_fill(ignored, 0)
        share = torch.ones_like(labels, dtype=wide) if importance is None else importance.to(wide)[labels]
        share.masked_fill_(ignored, 0)  # [N], the weight of each row
        total = share.sum()
        # if all rows are ignored, the mean is nan and its gradient zero, as in torch
        scale = (share / total).masked_fill_(ignored, 0) if asked.reduction == "mean" else share
        ctx.wants = tuple(live and needed for needed in ctx.needs_input_grad[:3])
        ctx.asked = asked
        ctx.group = None if asked.words is None else asked.words.group  # gradients of `hidden` are parts, whose sum it gets
        ctx.now = any(ctx.wants) and asked.reduction != "none" and hidden.dtype != torch.float16
        losses, gradients = _walk(hidden, weight, bias, labels, asked, scale if ctx.now else None, ctx.wants)
        if ctx.now:
            ctx.save_for_backward(*gradients)
        elif any(ctx.wants):
            ctx.save_for_backward(hidden, weight, bias, labels, scale)
        losses = losses.mul_(share).masked_fill_(ignored, 0)
        if asked.reduction != "none":
            losses = losses.sum()
        if asked.reduction == "mean":
            losses = losses / total
        return losses.to(asked.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, incoming: torch.Tensor) -> tuple[Any, ...]:
        if ctx.now:
            # a retained graph may be used again and needs unscaled gradients
            again = torch._C._autograd._get_current_graph_task_keep_graph()
            scaled = (g if g is None else g * incoming if again else g.mul_(incoming) for g in ctx.saved_tensors)
            return (*scaled, None, None, None, None)
        hidden, weight, bias, labels, scale = ctx.saved_tensors
        _, gradients = _walk(hidden, weight, bias, labels, ctx.asked, scale * incoming, ctx.wants)
        return (*gradients, None, None, None, None)


def _walk(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    asked: Asked,
    scale: torch.Tensor | None,
    wants: tuple[bool, bool, bool],
) -> tuple[torch.Tensor, Gradients]:
    """The loss of every row and, if `scale` gives their weights, the wanted gradients of the weighted sum."""
    tokens, vocab = hidden.shape[0], weight.shape[0]
    rows = min(asked.rows, tokens)
    with no_autocast(hidden.device.type):
        w = weight.to(hidden.dtype)
        b = None if bias is None else bias.to(hidden.dtype)
        narrow = hidden.new_empty(rows, vocab)  # the logits, then their gradient
        wide, few = narrow, rows
        if hidden.dtype in (torch.bfloat16, torch.float16):
            few = max(1, min(rows, _WIDE // (4 * vocab)))
            wide = narrow.new_empty(few, vocab, dtype=torch.float32)  # the softmax
        before = Stretch(asked.chain.before, narrow, differentiable=scale is not None)
        after = Stretch(asked.chain.after, wide, differentiable=scale is not None)
        losses = wide.new_empty(tokens)
        for_hidden = torch.empty_like(hidden) if scale is not None and wants[0] else None
        for_weight = _Sum(weight, hidden.dtype) if scale is not None and wants[1] else None
        for_bias = wide.new_zeros(vocab) if scale is not None and wants[2] else None
        for first in range(0, tokens, rows):
            some = slice(first, min(first + rows, tokens))
            h = hidden[some]
            z = narrow[: h.shape[0]]
            if b is None:
                torch.mm(h, w.t(), out=z)
            else:
                torch.addmm(b, h, w.t(), out=z)
            before.apply(z)
            shares = repeat(None) if scale is None else scale[some, None].split(few)
            for part in zip(z.split(few), labels[some, None].split(few), shares, losses[some].split(few), strict=False):
                _softmax(*part, wide, asked, after)
            if scale is None:
                continue
            before.pull_back(z)
            if for_hidden is not None:
                torch.mm(z, w, out=for_hidden[some])
            if for_weight is not None:
                for_weight.add(z.t(), h)
            if for_bias is not None:
                for_bias.add_(z.sum(0, dtype=for_bias.dtype))
    return losses, (
        for_hidden,
        None if for_weight is None else for_weight.total,
        None if for_bias is None or bias is None else for_bias.to(bias.dtype),
    )


def _softmax(
    z: torch.Tensor,
    label: torch.Tensor,
    share: torch.Tensor | None,
    loss: torch.Tensor,
    wide: torch.Tensor,
    asked: Asked,
    after: Stretch,
) -> None:
    """Losses of some rows of logits; if `share` gives their weights, the gradient overwrites the logits.

    `wide`: a float32 buffer for the softmax. `after`: elementwise ops applied in float32.
    """
    p = z if z.dtype == wide.dtype else wide[: z.shape[0]].copy_(z)
    after.apply(p)
    smoothing, vocab = asked.smoothing, p.shape[1]
    at_label: float | torch.Tensor = 1 - smoothing  # what the gradient of a row is less there
    if asked.words is None:
        torch.log_softmax(p, 1, out=p)  # every kernel reads an element before it writes it
        torch.mul(p.gather(1, label)[:, 0], smoothing - 1, out=loss)
        if smoothing:
            loss.sub_(p.mean(1), alpha=smoothing)
    else:
        vocab = asked.words.total
        label, at_label = _softmax_of_own_words(p, label, loss, asked.words, smoothing)
    if share is None:
        return
    if asked.words is None:
        p.exp_()
    p.scatter_(1, label, p.gather(1, label).sub_(at_label))
    if smoothing:
        p.sub_(smoothing / vocab)
    if after:
        after.pull_back(p.mul_(share))
        z.copy_(p)
    else:
        torch.mul(p, share, out=z)


def _softmax_of_own_words(
    p: torch.Tensor, label: torch.Tensor, loss: torch.Tensor, words: DividedWords, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of rows of which this rank has the logits of some words; `p` becomes their softmax. Returns where the labels are
    among these words, and what the gradient of each row is less there: nothing, where another rank has the label."""
    top = p.amax(1, keepdim=True)
    words.most(top)
    p.sub_(top)
    label = label - words.first
    others = (label < 0) | (label >= p.shape[1])
    label.masked_fill_(others, 0)
    sums = p.new_empty(3 if smoothing else 2, p.shape[0])
    sums[1] = p.gather(1, label).masked_fill_(others, 0)[:, 0]
    if smoothing:
        torch.sum(p, 1, out=sums[2])
    p.exp_()
    torch.sum(p, 1, out=sums[0])
    words.sum(sums)
    torch.log(sums[0], out=loss)  # log-softmax of a word is its logit less this
    if smoothing:
        loss.sub_(sums[2], alpha=smoothing / words.total)
    loss.sub_(sums[1], alpha=1 - smoothing)
    p.div_(sums[0].unsqueeze(1))
    return label, p.new_full(label.shape, 1 - smoothing).masked_fill_(others, 0)


class _Sum:
    """Sums the weight's gradient over chunks in the weight's dtype; under autocast in float32, a part at a time."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        self.total = torch.empty_like(weight, memory_format=torch.contiguous_format)
        self._part = None if weight.dtype == dtype else torch.empty_like(self.total, dtype=dtype)
        self._first = True

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add `a @ b`."""
        first, self._first = self._first, False
        if self._part is not None:
            torch.mm(a, b, out=self._part)
            self.total.copy_(self._part) if first else self.total.add_(self._part)
        elif first:
            torch.mm(a, b, out=self.total)
        else:
            torch.addmm(self.total, a, b, out=self.total)


def no_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Turn autocast off: dtypes are already chosen, whatever the loop's autocast is."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()
