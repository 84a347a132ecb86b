"""FLOPs of an op, from torch's registry plus the formulas that it lacks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Two products over the score matrix; causal masking is not discounted, as elsewhere in torch's registry."""
    b, h, s, d = q.shape
    return int(2 * b * h * s * k.shape[2] * (d + v.shape[-1]))


def count_flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """0 for ops that only move bytes."""
    packet = getattr(func, "_overloadpacket", None)
    name = str(packet)
    if name == "aten._scaled_dot_product_flash_attention_for_cpu":
        return _attention(args[0], args[1], args[2])
    if name == "aten._scaled_dot_product_flash_attention_for_cpu_backward":
        return _attention(args[1], args[2], args[3]) * 5 // 2  # five products instead of two
    if name == "aten._grouped_mm":
        a, b = args[0], args[1]
        rows = a.shape[-2] if a.dim() == 2 else a.shape[0] * a.shape[1]
        return int(2 * rows * a.shape[-1] * b.shape[-1])
    if name == "aten.mkldnn_rnn_layer":
        x, w, u = args[0], args[1], args[2]
        return int(2 * x.shape[0] * x.shape[1] * (w.numel() + u.numel()))
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    try:
        return int(formula(*args, **kwargs, out_val=out))
    except (TypeError, AttributeError, AssertionError, ValueError, IndexError):
        return 0  # a formula that does not know this overload
