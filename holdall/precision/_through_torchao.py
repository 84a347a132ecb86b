"""FP8 training and quantisation-aware training, through torchao where it is installed.

Neither saves memory by itself: torchao's FP8 layers keep their inputs in 16 bits for backward, and fake quantisation keeps more
than plain training does. For memory, save what FP8 would compute with: `Compress(codec="fp8")`, or recompute the blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from holdall.errors import MissingExtra, unknown_name

_FP8 = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
_INT4 = getattr(torch, "int4", None)  # torch has it; its stubs do not
_QAT = ("int8", "int4", "int8-int4", "fp8")


def float8_training(model: torch.nn.Module, *, recipe: str = "tensorwise", emulate: bool = False) -> torch.nn.Module:
    """Make linear layers compute their matmuls in FP8, in place. `emulate`: for devices without FP8 matmuls."""
    if recipe not in _FP8:
        raise unknown_name("FP8 recipe", recipe, _FP8)
    float8 = _torchao("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    if emulate:
        config = dataclasses.replace(config, emulate=True)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=_has_sizes_for_fp8)
    return model


def prepare_qat(model: torch.nn.Module, *, scheme: str = "int8") -> torch.nn.Module:
    """Make linear layers compute with fake-quantised weights and straight-through gradients, in place."""
    return _quantise(model, scheme, "prepare")


def finish_qat(model: torch.nn.Module, *, scheme: str = "int8") -> torch.nn.Module:
    """After training: replace the weights of linear layers by their quantised values, in place."""
    return _quantise(model, scheme, "convert")


def _quantise(model: torch.nn.Module, scheme: str, step: str) -> torch.nn.Module:
    if scheme not in _QAT:
        raise unknown_name("QAT scheme", scheme, _QAT)
    quantization, qat = _torchao("torchao.quantization"), _torchao("torchao.quantization.qat")
    quantization.quantize_(model, qat.QATConfig(_base(quantization, scheme), step=step))
    for module in model.modules():
        if type(module).__name__ == "Float8FakeQuantizer":
            module.forward = partial(_StraightThrough.apply, module.forward)  # type: ignore[method-assign]
    return model


class _StraightThrough(torch.autograd.Function):
    """Values as rounded, gradients as if they were not.

    torchao's rounding to integers does so itself. That to FP8 does not: its gradients are cast to FP8 and go through the scale,
    and were off by seven times their norm on a small model (torchao 0.18), which then does not train.
    """

    @staticmethod
    def forward(ctx: Any, rounded: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return rounded(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ARG004
        return None, grads[0]


def _base(quantization: Any, scheme: str) -> Any:
    if scheme == "int8":
        return quantization.IntxWeightOnlyConfig(weight_dtype=torch.int8)
    if scheme == "int4":
        return quantization.IntxWeightOnlyConfig(weight_dtype=_INT4, granularity=quantization.PerGroup(32))
    if scheme == "int8-int4":
        return quantization.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=_INT4, weight_granularity=quantization.PerGroup(32)
        )
    return quantization.Float8DynamicActivationFloat8WeightConfig()


def _has_sizes_for_fp8(module: torch.nn.Module, name: str) -> bool:  # noqa: ARG001
    """Are both dimensions multiples of 16, as FP8 matmuls need?"""
    return isinstance(module, torch.nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0


def _torchao(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingExtra(
            f"FP8 and QAT need torchao, which cannot be imported ({error})", hint="pip install torchao"
        ) from None
