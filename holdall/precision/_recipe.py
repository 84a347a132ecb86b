"""What a precision recipe is. A file of this folder is a recipe, and its class says all that others ask of it.

Mixed precision after Micikevicius et al. (ICLR 2018, arXiv 1710.03740); O0 to O3 are the levels of NVIDIA's apex.amp.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_map

Undo = Callable[[], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The base of all. Members give it a name and change what is not as in float32; fields of a member are its options."""

    name: ClassVar[str]  # the file's; people also write it with hyphens
    also: ClassVar[tuple[str, ...]] = ()  # other names that are understood
    what: ClassVar[str] = ""  # one line for people
    exact: ClassVar[bool] = False  # the numbers of float32 training, to the bit
    weights: ClassVar[torch.dtype] = torch.float32  # of what computes, and of gradients
    compute: ClassVar[torch.dtype | None] = None  # forward runs under autocast to this width; None: that of the weights
    master: ClassVar[bool] = False  # float32 parameters are updated, and narrower copies of them compute
    scale: ClassVar[float | None] = None  # the loss is multiplied by this at first, then as overflows allow; None: it is not
    unscaled: ClassVar[bool] = False  # float16 without loss scaling, on purpose
    stochastic: ClassVar[bool] = False  # updates are rounded up or down by chance, and so arrive on average
    norms: ClassVar[bool] = False  # batch norms keep float32

    def __str__(self) -> str:
        """As it is typed: the name, and options that are not the defaults."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        options = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in given.items()]
        return ":".join([self.name.replace("_", "-"), *options])

    @property
    def is_wide_update(self) -> bool:
        """The update is made in float32 though the weights are narrower."""
        return self.master or self.stochastic

    # in plans: how a step is traced, and what is put on the model

    @property
    def copies(self) -> torch.dtype | None:
        """The width of the copies that a plan computes with beside float32 parameters; None: there are none."""
        return self.weights if self.master else None

    @property
    def held(self) -> torch.dtype:
        """The width of the parameters themselves under a plan."""
        return torch.float32 if self.master else self.weights

    @property
    def obstacle(self) -> str:
        """Why the step is not one that a plan can make; empty: it is."""
        if self.scale is not None:
            return "needs its loss scaled, which a plan does not do: small gradients would become zero"
        return "rounds updates by chance, which a plan does not do" if self.stochastic else ""

    def put_on(self, model: torch.nn.Module) -> Undo:
        """Let the model compute so, in place, for tracing and for training alike; returns what gives it back.

        Copies beside float32 parameters are the plan's own business (`copies`).
        """
        undo = ExitStack()
        if self.held != torch.float32:
            undo.callback(narrow(model, self.held))
        if self.compute is not None:
            undo.callback(under_autocast(model, self.compute))
        return undo.close


# parts that recipes are made of


def narrow(model: torch.nn.Module, dtype: torch.dtype) -> Undo:
    """Parameters and buffers of this width; float32 inputs are cast to it, outputs back to float32."""
    held = [t for t in (*model.parameters(), *model.buffers()) if t.dtype == torch.float32]
    for tensor in held:
        tensor.data = tensor.data.to(dtype)
    hooks = cast_calls(model, dtype)

    def undo() -> None:
        for remove in hooks:
            remove()
        for tensor in held:
            tensor.data = tensor.data.float()

    return undo


def cast_calls(model: torch.nn.Module, dtype: torch.dtype) -> list[Undo]:
    """Hooks that cast what goes into a model, and what comes out."""
    incoming = model.register_forward_pre_hook(_CastIn(dtype), with_kwargs=True)
    return [incoming.remove, model.register_forward_hook(_CastOut(dtype)).remove]


def under_autocast(model: torch.nn.Module, dtype: torch.dtype) -> Undo:
    """The model's forward, and a loss that is computed in it, run under autocast to this width."""
    around = _Autocast(dtype)
    hooks = [
        model.register_forward_pre_hook(around.enter, with_kwargs=True),
        model.register_forward_hook(around.leave, always_call=True),
    ]

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


class _Autocast:
    """Hooks that enter and leave autocast; a copy of the model has its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._entered: list[torch.autocast] = []

    def enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        device = next((t.device.type for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)), None)
        if device is None or device == "meta":
            device = next(module.parameters()).device.type
        self._entered.append(torch.autocast(device, dtype=self.dtype))
        self._entered[-1].__enter__()

    def leave(self, *_: Any) -> None:
        if self._entered:
            self._entered.pop().__exit__(None, None, None)


class _CastIn:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, _: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _cast(args, torch.float32, self.dtype), _cast(kwargs, torch.float32, self.dtype)


class _CastOut:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, _: torch.nn.Module, __: Any, out: Any) -> Any:
        return _cast(out, self.dtype, torch.float32)


def _cast(values: Any, source: torch.dtype, target: torch.dtype) -> Any:
    return tree_map(lambda v: v.to(target) if isinstance(v, torch.Tensor) and v.dtype == source else v, values)


_ON: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()  # models with a recipe on them


def put_on(recipe: Recipe, model: torch.nn.Module) -> Undo:
    """`recipe.put_on(model)`, once: a model that has it on is left as it is."""
    if _ON.get(model) == str(recipe):
        return lambda: None
    undo = recipe.put_on(model)
    _ON[model] = str(recipe)

    def end() -> None:
        if _ON.pop(model, None) is not None:
            undo()

    return end
