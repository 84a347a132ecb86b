"""What a block asks for where no input decides it, answered while the block is captured on fake tensors.

Models ask, for example, whether the positions that they have just made are one sequence. Tensors made from nothing are small
and the same in every call, so their values travel beside the fakes, as in a trace (`tracing/values/known.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from holdall.ops import is_factory, makes_little


class Answers(TorchDispatchMode):
    """Answers questions about tensors that depend on no input; others fail, as they do without it."""

    def __init__(self) -> None:
        super().__init__()
        self._known: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_known = all(t in self._known for t in tensors) if tensors else is_factory(func) and makes_little(args, kwargs)
        if is_random or not is_known:
            for t in tensors if func._schema.is_mutable else ():
                self._known.pop(t, None)  # it may be changed by something unknown
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._known[args[0]].item()
        real_args, real_kwargs = tree_map_only(torch.Tensor, self._known.__getitem__, (args, kwargs))
        if "device" in real_kwargs:
            real_kwargs = {**real_kwargs, "device": torch.device("cpu")}
        with _disable_current_modes():
            value = func(*real_args, **real_kwargs)
        out = func(*args, **kwargs)
        for fake, real in zip(tree_iter(out), tree_iter(value), strict=True):
            if isinstance(fake, torch.Tensor):
                self._known[fake] = real
        return out
