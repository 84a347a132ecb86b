"""Replaces fake kernels that differ from the real ones.

Grouped matmul: the fake refuses fp32, which the real one accepts. oneDNN's recurrent layers: the fake does not know the size of
the workspace kept for backward or the layout of its gradients; the library itself is asked, on empty inputs. Norms of a bf16
input with float32 weights, as under autocast: the fake returns statistics in bf16. Batch norms of transposed inputs: the fake
keeps the input's strides, real kernels its memory format. Mean squared errors: the memory of the
elements stays allocated with the mean. cuDNN's recurrent layers are in `values/recurrent.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from holdall.tracing.values import recurrent

Kernel = Callable[[Any, Any, Any], Any]


def _grouped_mm(func: Any, args: Any, kwargs: Any) -> Any:
    dtype = args[0].dtype
    if dtype == torch.bfloat16:
        return func(*args, **kwargs)

    def narrow(t: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=torch.bfloat16, device=t.device) if t.dtype == dtype else t

    out = func(*tree_map_only(torch.Tensor, narrow, args), **tree_map_only(torch.Tensor, narrow, kwargs))
    # the fake pads rows to 16 bytes for the GPU's kernel; other dtypes are contiguous
    return torch.empty(out.shape, dtype=dtype, device=out.device)


def _as_the_library_does(func: Any, args: Any, kwargs: Any) -> Any:
    with _disable_current_modes():

        def empty(t: torch.Tensor) -> torch.Tensor:
            return torch.zeros(t.shape, dtype=t.dtype).as_strided(t.shape, t.stride()) if t.is_contiguous() else _strided(t)

        real = func(*tree_map_only(torch.Tensor, empty, args), **tree_map_only(torch.Tensor, empty, kwargs))
        layouts = tree_map_only(torch.Tensor, lambda t: (tuple(t.shape), tuple(t.stride()), t.dtype), real)
    return tuple(
        torch.empty_strided(layout[0], layout[1], dtype=layout[2]) if isinstance(layout, tuple) else layout
        for layout in layouts
    )


def _strided(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).zero_()


def _norm(func: Any, args: Any, kwargs: Any) -> Any:
    """For a low-precision input with float32 weights or statistics, the real kernel returns mean and deviation in float32."""
    out, *sums = func(*args, **kwargs)
    is_mixed = any(isinstance(t, torch.Tensor) and t.dtype == torch.float32 for t in args[1:5])
    wide = [torch.empty(t.shape, dtype=torch.float32, device=t.device) for t in sums[:2]] if is_mixed else sums[:2]
    return out, *wide, *sums[2:]


def _batch_norm(func: Any, args: Any, kwargs: Any) -> Any:
    out, *sums = _norm(func, args, kwargs)
    return _in_format_of(args[0], out), *sums


def _batch_norm_backward(func: Any, args: Any, kwargs: Any) -> Any:
    first, *rest = func(*args, **kwargs)
    return _in_format_of(args[1], first), *rest


def _in_format_of(given: torch.Tensor, made: torch.Tensor | None) -> torch.Tensor | None:
    """With the strides of a contiguous tensor in the memory format of `given`: channels last, or the plain one."""
    if made is None:
        return None
    right = torch.empty_like(made, memory_format=suggest_memory_format(given))
    return made if right.stride() == made.stride() else right


def _group_norm_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """The gradient of an input has the input's dtype, even if weights and statistics are wider."""
    first, *rest = func(*args, **kwargs)
    is_other = isinstance(first, torch.Tensor) and first.dtype != args[1].dtype
    return torch.empty_like(first, dtype=args[1].dtype) if is_other else first, *rest


def _mean_loss(func: Any, args: Any, kwargs: Any) -> Any:
    """The real kernel computes the elements in the mean's memory, which stays that large."""
    out = func(*args, **kwargs)
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    if out.dim() or not shape:
        return out
    return torch.empty(shape, dtype=out.dtype, device=out.device).as_strided((), ())


def _loss_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """The gradient of an input has the input's dtype, even if the target is wider."""
    out = func(*args, **kwargs)
    return out if out.dtype == args[1].dtype else torch.empty_like(out, dtype=args[1].dtype)


KERNELS: dict[str, Kernel] = {
    "aten.native_batch_norm.default": _batch_norm,
    "aten._native_batch_norm_legit.default": _batch_norm,
    "aten._native_batch_norm_legit.no_stats": _batch_norm,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten.native_layer_norm.default": _norm,
    "aten.native_group_norm.default": _norm,
    "aten.native_group_norm_backward.default": _group_norm_backward,
    "aten.mse_loss.default": _mean_loss,
    "aten.smooth_l1_loss.default": _mean_loss,
    "aten.mse_loss_backward.default": _loss_backward,
    "aten.smooth_l1_loss_backward.default": _loss_backward,
    "aten._grouped_mm.default": _grouped_mm,
    "aten.mkldnn_rnn_layer.default": _as_the_library_does,
    "aten.mkldnn_rnn_layer_backward.default": _as_the_library_does,
    **recurrent.KERNELS,
}
