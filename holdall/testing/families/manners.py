"""Ways of writing a module that people use: own Functions, hooks, parametrizations, one block in many calls, nested outputs."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from holdall.testing.families._registry import WIDTH, Made, classes_of, register, vectors


def _block(dropout: float = 0.0) -> nn.Sequential:
    middle = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), *middle, nn.Linear(2 * WIDTH, WIDTH))


class Stack(nn.Module):
    """Residual blocks and a head; the others here change one thing of it."""

    def __init__(self, depth: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_block(dropout) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.head(x)
        return out


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        out: torch.Tensor = grad * (s + x * s * (1 - s))
        return out


class SwishOnContext(torch.autograd.Function):
    """Keeps its input as an attribute, without `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x.detach()
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        s = torch.sigmoid(ctx.x)
        out: torch.Tensor = grad * (s + ctx.x * s * (1 - s))
        return out


class Straight(torch.autograd.Function):
    """Rounds; the gradient passes as if it had not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # noqa: ARG004
        return grad


class Functions(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.layers, self.head, self.function = (
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6)),
            nn.Linear(WIDTH, 10),
            function,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.function.apply(layer(x))
        out: torch.Tensor = self.head(x)
        return out


@register("manner", "stack", loss=classes_of)
def _stack() -> Made:
    return Stack(dropout=0.1), vectors()


@register("manner", "own-function", loss=classes_of)
def _own_function() -> Made:
    return Functions(Swish), vectors()


@register("manner", "function-on-context", loss=classes_of)
def _function_on_context() -> Made:
    return Functions(SwishOnContext), vectors()


@register("manner", "straight-through", loss=classes_of)
def _straight() -> Made:
    return Functions(Straight), vectors()


class EarlyExit(Stack):
    """How many blocks run depends on the values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, block in enumerate(self.blocks):
            x = x + block(x)
            if k >= 3 and bool(x.abs().mean() > 0.8):
                break
        out: torch.Tensor = self.head(x)
        return out


@register("manner", "early-exit", loss=classes_of)
def _early_exit() -> Made:
    return EarlyExit(), vectors()


def _shrink_output(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return output * 0.9


def _halve_gradient(module: nn.Module, inner: Any, outer: Any) -> Any:  # noqa: ARG001
    return (None if inner[0] is None else inner[0] * 0.5,)


class Hooked(Stack):
    """Hooks before, after and in backward, each of which changes what passes."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_pre_hook(lambda _, args: (args[0] * 1.01,))
            block.register_forward_hook(_shrink_output)
            block.register_full_backward_hook(_halve_gradient)


@register("manner", "hooks", loss=classes_of)
def _hooks() -> Made:
    return Hooked(), vectors()


class Parametrized(nn.Module):
    def __init__(self, *, old: bool) -> None:
        super().__init__()
        new, utils = nn.utils.parametrizations, nn.utils
        weight, spectral = (utils.weight_norm, utils.spectral_norm) if old else (new.weight_norm, new.spectral_norm)
        last = [] if old else [new.orthogonal]
        self.layers = nn.Sequential(
            *[
                nn.Sequential(
                    weight(nn.Linear(WIDTH, WIDTH)),
                    nn.GELU(),
                    spectral(nn.Linear(WIDTH, WIDTH)),
                    *[other(nn.Linear(WIDTH, WIDTH)) for other in last],
                )
                for _ in range(3)
            ]
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(x))
        return out


@register("manner", "parametrized", loss=classes_of)
def _parametrized() -> Made:
    return Parametrized(old=False), vectors()


@register("manner", "old-weight-norm", loss=classes_of)
def _old_weight_norm() -> Made:
    return Parametrized(old=True), vectors()


class Reused(nn.Module):
    """Two blocks, each called four times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(_block(0.1) for _ in range(2)), nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            for block in self.blocks:
                x = x + block(x)
        out: torch.Tensor = self.head(x)
        return out


@register("manner", "reused", loss=classes_of)
def _reused() -> Made:
    return Reused(), vectors()


class NestedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, state: Any) -> Any:
        (x, (y,)), known = state
        x, y = x + torch.tanh(self.a(y)), y + nn.functional.gelu(self.b(x))
        return (x, (y,)), {**known, "last": x.mean()}


class Nested(nn.Module):
    """Blocks take and return tuples in tuples, and a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(NestedBlock() for _ in range(5)), nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> Any:
        state: Any = ((x, (x * 2,)), {"last": None})
        for block in self.blocks:
            state = block(state)
        return self.head(state[0][0]), (state[0][1][0], [state[1]])


def _nested_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    said, (other, (known,)) = model(batch[0])
    out: torch.Tensor = nn.functional.cross_entropy(said, batch[1]) + 0.01 * other.square().mean() + known["last"]
    return out


@register("manner", "nested", loss=_nested_loss)
def _nested() -> Made:
    return Nested(), vectors()


class RandomDepth(Stack):
    """Blocks are left out by Python's own random numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if random.random() >= 0.2:
                x = x + block(x)
        out: torch.Tensor = self.head(x)
        return out


@register("manner", "random-depth", loss=classes_of)
def _random_depth() -> Made:
    return RandomDepth(), vectors()


class Checkpointed(Stack):
    """The user checkpoints each block already."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        out: torch.Tensor = self.head(x)
        return out


@register("manner", "own-checkpoints", loss=classes_of)
def _own_checkpoints() -> Made:
    return Checkpointed(dropout=0.1), vectors()


class InPlace(nn.Module):
    """Operations in place on activations, views, and a buffer that is written in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5)), nn.Linear(WIDTH, 10)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x)
            y[:, ::2].mul_(0.5)
            y += x
            y.relu_()
            x = y
        self.seen += x.detach().mean(0)  # type: ignore[operator]
        out: torch.Tensor = self.head(x)
        return out


@register("manner", "in-place", loss=classes_of)
def _in_place() -> Made:
    return InPlace(), vectors()


class Frozen(Stack):
    """The first half is not trained."""

    def __init__(self) -> None:
        super().__init__()
        for block in list(self.blocks)[:3]:
            block.requires_grad_(False)


@register("manner", "frozen-half", loss=classes_of)
def _frozen() -> Made:
    return Frozen(), vectors()


class Adapted(Stack):
    """Low-rank adapters beside frozen layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in self.blocks)
        self.up = nn.ModuleList(nn.Linear(4, WIDTH, bias=False) for _ in self.blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, down, up in zip(self.blocks, self.down, self.up, strict=True):
            x = x + block(x) + up(down(x))
        out: torch.Tensor = self.head(x)
        return out


@register("manner", "adapters", loss=classes_of)
def _adapters() -> Made:
    return Adapted(), vectors()


class Parent(nn.Module):
    """A module reads the weight of another one, outside of its forward, and one matrix serves two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(_block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        x = nn.functional.linear(x, self.enter.weight.T)
        out: torch.Tensor = self.head(x + 0.01 * self.blocks[0][1].weight.sum())  # type: ignore[index]
        return out


@register("manner", "reads-a-weight", loss=classes_of)
def _parent() -> Made:
    return Parent(), vectors()


class Shared(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(_block() for _ in range(4)), nn.Linear(WIDTH, 10)
        self.blocks[2][1].weight = self.blocks[0][1].weight  # type: ignore[index, union-attr]

    forward = Stack.forward  # type: ignore[assignment]


@register("manner", "shared-weight", loss=classes_of)
def _shared() -> Made:
    return Shared(), vectors()


class Penalty(nn.Module):
    """The gradient of the output by the input is part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)], nn.Linear(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        return out


def _penalised(model: nn.Module, batch: Any) -> torch.Tensor:
    x = batch[0].clone().requires_grad_()
    said = model(x).mean()
    (slope,) = torch.autograd.grad(said, x, create_graph=True)
    out: torch.Tensor = said + 10 * (slope.norm(dim=1) - 1).square().mean()
    return out


@register("manner", "gradient-penalty", loss=_penalised)
def _penalty() -> Made:
    return Penalty(), (torch.randn(256, WIDTH),)
