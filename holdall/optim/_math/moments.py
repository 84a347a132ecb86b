"""Adam's two moments, in 32 bits or in blocks of 8 bits, and the direction they give."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from holdall.optim._math.per_parameter import Group, State
from holdall.optim._math.quantise import coded_bytes, decode, encode

MOMENTS = ("exp_avg", "exp_avg_sq")
LEAST = 4096  # elements; below that, 8 bits would save nothing worth the error (Dettmers et al. 2022)


def is_coded(numel: int, bits: int) -> bool:
    return bits == 8 and numel >= LEAST


def moment_bytes(numel: int, bits: int, itemsize: int) -> int:
    """Bytes of one moment."""
    return coded_bytes(numel) if is_coded(numel, bits) else itemsize * numel


def read_moment(state: State, key: str, like: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """A moment in the shape of `like`, zero at first: the tensor itself if stored in 32 bits, else a decoded copy."""
    if key not in state:
        return torch.zeros_like(like, memory_format=torch.contiguous_format)
    if f"{key}_scale" not in state:
        kept: torch.Tensor = state[key]
        return kept
    return decode(state[key], state[f"{key}_scale"], signed=signed).view(like.shape).to(like.dtype)


def write_moment(state: State, key: str, value: torch.Tensor, *, bits: int, signed: bool) -> None:
    if not is_coded(value.numel(), bits):
        state[key] = value
        return
    codes, scales = encode(value, signed=signed)
    if key in state:  # into the same memory, so that its address stays
        state[key].copy_(codes)
        state[f"{key}_scale"].copy_(scales)
    else:
        state[key], state[f"{key}_scale"] = codes, scales


def adam_direction(grad: torch.Tensor, state: State, *, betas: tuple[float, float], eps: float, bits: int = 32) -> torch.Tensor:
    """m / (sqrt(v) + eps) after updating both moments with `grad`; without bias correction."""
    beta1, beta2 = betas
    m = read_moment(state, "exp_avg", grad, signed=True).mul_(beta1).add_(grad, alpha=1.0 - beta1)
    v = read_moment(state, "exp_avg_sq", grad, signed=False).mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
    direction = m / v.sqrt().add_(eps)
    write_moment(state, "exp_avg", m, bits=bits, signed=True)
    write_moment(state, "exp_avg_sq", v, bits=bits, signed=False)
    return direction


def adamw_(value: torch.Tensor, grad: torch.Tensor, moments: Sequence[torch.Tensor], step: int, group: Group) -> None:
    """Step number `step` (from 1) of torch's AdamW, op by op; changes `value` and both moments in place."""
    m, v = moments
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    if group["weight_decay"]:
        value.mul_(1 - lr * group["weight_decay"])
    m.lerp_(grad, 1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = (v.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
    value.addcdiv_(m, root, value=-lr / (1 - beta1**step))


def corrected(lr: float, step: int, betas: tuple[float, float]) -> float:
    """The learning rate of step number `step` (from 1), with bias correction."""
    return lr * math.sqrt(1.0 - betas[1] ** step) / (1.0 - betas[0] ** step)
