"""The base class of precision recipes. Each file of this folder is a recipe, described by the attributes of its class.

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
    """The base of all recipes. Members override what differs from float32 training; fields of a member are its options."""

    name: ClassVar[str]  # the file's; also accepted with hyphens
    also: ClassVar[tuple[str, ...]] = ()  # other accepted names
    what: ClassVar[str] = ""  # one line for tables
    exact: ClassVar[bool] = False  # bitwise equal to float32 training
    weights: ClassVar[torch.dtype] = torch.float32  # dtype of the weights that compute, and of gradients
    compute: ClassVar[torch.dtype | None] = None  # forward runs under autocast to this dtype; None: no autocast
    master: ClassVar[bool] = False  # float32 master parameters are updated; 16-bit working copies compute
    scale: ClassVar[float | None] = None  # the initial loss scale of dynamic loss scaling; None: no scaling
    unscaled: ClassVar[bool] = False  # float16 without loss scaling, on purpose
    stochastic: ClassVar[bool] = False  # updates are rounded stochastically, so that they are right on average
    norms: ClassVar[bool] = False  # batch norms keep float32
    packs: ClassVar[bool] = False  # frozen weights are stored packed: it is put on before other weights are cast

    def __str__(self) -> str:
        """The recipe as typed: its name and the options that are not defaults."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        options = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in given.items()]
        return ":".join([self.name.replace("_", "-"), *options])

    @property
    def is_wide_update(self) -> bool:
        """Are 16-bit weights updated in float32?"""
        return self.master or self.stochastic

    # in plans: how a step is traced, and how the recipe is installed on the model

    @property
    def copies(self) -> torch.dtype | None:
        """The dtype of the working copies of float32 parameters under a plan; None: there are none."""
        return self.weights if self.master else None

    @property
    def held(self) -> torch.dtype:
        """The dtype of the parameters themselves under a plan."""
        return torch.float32 if self.master else self.weights

    @property
    def obstacle(self) -> str:
        """Why the recipe cannot be used in a plan; empty: it can."""
        if self.scale is not None:
            return "needs its loss scaled, which a plan does not do: small gradients would become zero"
        return "rounds updates by chance, which a plan does not do" if self.stochastic else ""

    @property
    def is_dtype_alone(self) -> bool:
        """Does it say in which dtype float32 parameters compute, and nothing else?"""
        return type(self).put_on is Recipe.put_on and self.compute is None and self.held == torch.float32

    @property
    def obstacle_over_ranks(self) -> str:
        """Why the recipe cannot be used where ranks share a model; empty: it can, with parameters gathered in the dtype of
        working copies."""
        return "" if self.is_dtype_alone else "ranks share float32 parameters, gathered in one dtype"

    def put_on(self, model: torch.nn.Module) -> Undo:
        """Install the recipe on the model, for tracing and training; returns a function that removes it.

        Working copies of float32 parameters are made by the plan (`copies`).
        """
        undo = ExitStack()
        if self.held != torch.float32:
            undo.callback(narrow(model, self.held))
        if self.compute is not None:
            undo.callback(under_autocast(model, self.compute))
        return undo.close

    def put_on_to_trace(self, model: torch.nn.Module) -> Undo:
        """`put_on` for a trace, which leaves the model as it was to the bit."""
        before = [(t, t.data) for t in (*model.parameters(), *model.buffers())] if self.held != torch.float32 else []
        undo = self.put_on(model)

        def end() -> None:
            undo()
            for tensor, data in before:  # cast back, it would be rounded
                tensor.data = data

        return end

    @property
    def frozen_bytes(self) -> float | None:
        """Bytes of a frozen weight that the recipe packs; None: it trains all weights alike."""
        return None


# parts that recipes are made of


def narrow(model: torch.nn.Module, dtype: torch.dtype) -> Undo:
    """Cast parameters and buffers to this dtype, float32 inputs to it as well, and outputs back to float32."""
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
    """Hooks that cast the inputs and outputs of a model."""
    incoming = model.register_forward_pre_hook(_CastIn(dtype), with_kwargs=True)
    return [incoming.remove, model.register_forward_hook(_CastOut(dtype)).remove]


def under_autocast(model: torch.nn.Module, dtype: torch.dtype) -> Undo:
    """Run the model's forward (with a loss computed in it) under autocast to this dtype."""
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


_ON: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()  # models that have a recipe installed


def put_on(recipe: Recipe, model: torch.nn.Module, *, to_trace: bool = False) -> Undo:
    """Install a recipe; a model that already has it is left unchanged."""
    if _ON.get(model) == str(recipe):
        return lambda: None
    undo = recipe.put_on_to_trace(model) if to_trace else recipe.put_on(model)
    _ON[model] = str(recipe)

    def end() -> None:
        if _ON.pop(model, None) is not None:
            undo()

    return end
