"""Ops whose fake kernels say less than, or other than, the real ones do.

Grouped matmul: the fake refuses fp32, which the real one takes. oneDNN's recurrent layers: the fake does not know the size of
the workspace that the real one keeps for backward, nor the layout of its gradients; only the library does, so it is asked, on
empty inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

Kernel = Callable[[Any, Any, Any], Any]


def _grouped_mm(func: Any, args: Any, kwargs: Any) -> Any:
    dtype = args[0].dtype
    if dtype == torch.bfloat16:
        return func(*args, **kwargs)

    def narrow(t: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=torch.bfloat16, device=t.device) if t.dtype == dtype else t

    out = func(*tree_map_only(torch.Tensor, narrow, args), **tree_map_only(torch.Tensor, narrow, kwargs))
    # the fake pads rows to 16 bytes for the GPU's kernel; another dtype is contiguous
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


KERNELS: dict[str, Kernel] = {
    "aten._grouped_mm.default": _grouped_mm,
    "aten.mkldnn_rnn_layer.default": _as_the_library_does,
    "aten.mkldnn_rnn_layer_backward.default": _as_the_library_does,
}
