"""Imitates a GPU's choice of ops on a machine without one, where CPU fakes stand in."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from holdall.tracing.autocast import autocast_now

# ops that autocast runs in float32 on a GPU, but not on a CPU
_POINTWISE = (
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "pow",
    "reciprocal",
    "rsqrt",
    "tan",
    "acos",
    "asin",
    "cosh",
    "sinh",
)
_REDUCED = ("softmax", "log_softmax", "sum", "cumsum", "cumprod", "norm", "logsumexp")
_WIDE = {getattr(owner, name) for name in (*_POINTWISE, *_REDUCED) for owner in (torch, torch.Tensor) if hasattr(owner, name)}
_WIDE |= {torch.Tensor.__pow__, torch.Tensor.__rpow__}
_WIDE |= {
    getattr(functional, name)
    for name in ("layer_norm", "group_norm", "softmax", "log_softmax", "softplus", "cosine_similarity", "cross_entropy")
}


class CudaOps(TorchFunctionMode):
    """Uses a GPU's attention kernels and autocast lists."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtype = autocast_now("cpu")
        if func is functional.scaled_dot_product_attention:
            if dtype is not None:
                args, kwargs = _cast(dtype, args, kwargs)
            return _cuda_attention(*args, **kwargs)
        if dtype is not None and func in _WIDE:
            args, kwargs = _cast(torch.float32, args, kwargs)
        return func(*args, **kwargs)


def _cast(dtype: torch.dtype, args: Any, kwargs: Any) -> tuple[Any, Any]:
    narrow = (torch.float32, torch.float16, torch.bfloat16)
    cast = tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.dtype in narrow else t, (args, kwargs))
    return cast[0], cast[1]


def _cuda_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    aten = torch.ops.aten
    if enable_gqa and key.shape[1] != query.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if query.dtype in (torch.float16, torch.bfloat16) and attn_mask is None:
        flash: torch.Tensor = aten._scaled_dot_product_flash_attention.default(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return flash
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    efficient: torch.Tensor = aten._scaled_dot_product_efficient_attention.default(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]
    return efficient
