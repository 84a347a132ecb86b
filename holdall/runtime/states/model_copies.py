"""Copies of a model under a plan are ordinary models: `copy.deepcopy`, pickle, `torch.save`, `AveragedModel`.

While a plan is on, modules have methods and hooks of ours, and maybe working copies in the place of their parameters. Python
makes copies and pickles by `__reduce_ex__`; every module has one of its own here, which leaves all that out: the copy has the
parameters themselves, after their updates, and nothing of the plan.
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
_ABOUT_HOOKS = ("_with_kwargs", "_always_called")  # ends of names: of a module's notes about its hooks


class Placed(Protocol):
    """Who knows where parameters live."""

    away: set[int]

    def settle(self) -> None: ...

    def homes(self) -> Mapping[int, torch.nn.Parameter]:
        """Working copies, by `id`, -> the parameters that they stand for."""
        ...


def copy_plainly(model: torch.nn.Module, placed: Callable[[], Placed | None], quiet: Callable[[], Any]) -> Callable[[], None]:
    """From here on copies of the model and of its modules are without the plan; returns what ends this.

    `quiet`: copies of what is in another tier are not counted as the device's.
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
        made[2] = _plain(module, made[2], owner.homes() if owner is not None else {})
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
    """A storage that is another tier's, as long as it lives; then its address is another's."""
    away.add(storage._cdata)
    weakref.finalize(storage, away.discard, storage._cdata).atexit = False


def _plain(module: torch.nn.Module, state: Mapping[str, Any], homes: Mapping[int, torch.nn.Parameter]) -> dict[str, Any]:
    """What a module holds, without what is ours."""
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
        state["_parameters"] = {name: homes.get(id(p), p) for name, p in own.items()}
    return state


def _is_ours(hook: Any) -> bool:
    if type(hook).__name__ == "_WrappedHook":  # torch's, around hooks that want the module
        hook = hook.hook
    hook = hook.func if isinstance(hook, partial) else hook
    hook = getattr(hook, "__func__", hook)
    return str(getattr(hook, "__module__", "")).startswith(_OURS)
