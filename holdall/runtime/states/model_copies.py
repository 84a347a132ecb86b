"""Copies of a model under a plan are ordinary models: `copy.deepcopy`, pickle, `torch.save`, `AveragedModel`.

Under a plan, modules have our methods and hooks, and maybe working copies instead of their parameters. Python copies and
pickles through `__reduce_ex__`; each module gets one that leaves all that out: the copy has the master parameters, after their
updates, and nothing of the plan.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch

from holdall.runtime.patching import put_method, without_methods

_OURS = ("holdall.runtime.", "holdall.integrations.")
_ABOUT_HOOKS = ("_with_kwargs", "_always_called")  # suffixes of a module's dictionaries about hooks


class Placed(Protocol):
    """Knows where parameters live."""

    away: set[int]

    def settle(self) -> None: ...

    def masters(self) -> Mapping[int, torch.nn.Parameter]:
        """id of a working copy -> the master parameter that it stands for."""
        ...


def copy_plainly(model: torch.nn.Module, placed: Callable[[], Placed | None], quiet: Callable[[], Any]) -> Callable[[], None]:
    """Make copies of the model and its modules leave the plan out; returns the undo function.

    `quiet`: a context in which host copies are not counted as device memory.
    """
    undo = []
    for module in model.modules():
        undo.append(put_method(module, "__reduce_ex__", partial(_reduce, module, placed)))
        if not hasattr(type(module), "__deepcopy__"):
            undo.append(put_method(module, "__deepcopy__", partial(_deepcopy, module, placed, quiet)))

    def end() -> None:
        for each in reversed(undo):
            each()

    return end


def _reduce(module: torch.nn.Module, placed: Callable[[], Placed | None], protocol: Any) -> tuple[Any, ...]:
    owner = placed()
    if owner is not None:
        owner.settle()
    made = list(type(module).__reduce_ex__(module, protocol))
    if len(made) > 2 and isinstance(made[2], dict):
        made[2] = _plain(module, made[2], owner.masters() if owner is not None else {})
    return tuple(made)


def _deepcopy(
    module: torch.nn.Module, placed: Callable[[], Placed | None], quiet: Callable[[], Any], memo: dict[int, Any]
) -> torch.nn.Module:
    function, arguments, state = _reduce(module, placed, 4)[:3]
    new: torch.nn.Module = function(*arguments)
    memo[id(module)] = new
    with quiet():
        copied = copy.deepcopy(state, memo)
    new.__setstate__(copied)
    owner = placed()
    if owner is not None and isinstance(state, dict):
        for name, p in state["_parameters"].items():
            if p is not None and p.untyped_storage()._cdata in owner.away:
                _note(owner.away, copied["_parameters"][name].untyped_storage())
    return new


def _note(away: set[int], storage: torch.UntypedStorage) -> None:
    """Mark a storage as host memory while it lives; afterwards its address may be reused."""
    away.add(storage._cdata)
    weakref.finalize(storage, away.discard, storage._cdata).atexit = False


def _plain(module: torch.nn.Module, state: Mapping[str, Any], masters: Mapping[int, torch.nn.Parameter]) -> dict[str, Any]:
    """A module's state without the plan's parts."""
    state = without_methods(module, state)
    left: set[Any] = set()
    for name, value in state.items():
        if name.endswith("_hooks") and isinstance(value, dict):
            state[name] = OrderedDict((key, hook) for key, hook in value.items() if not _is_ours(hook))
            left |= value.keys() - state[name].keys()
    for name, value in state.items():
        if name.endswith(_ABOUT_HOOKS) and isinstance(value, dict):
            state[name] = OrderedDict((key, hook) for key, hook in value.items() if key not in left)
    if "_parameters" in state:
        own = state["_parameters"]
        state["_parameters"] = {name: masters.get(id(p), p) for name, p in own.items()}
    return state


def _is_ours(hook: Any) -> bool:
    if type(hook).__name__ == "_WrappedHook":  # torch's wrapper around hooks that take the module
        hook = hook.hook
    hook = hook.func if isinstance(hook, partial) else hook
    hook = getattr(hook, "__func__", hook)
    return str(getattr(hook, "__module__", "")).startswith(_OURS)
