"""A recipe installed on a model and its optimizer, from `prepare` to `close`, which restores float32.

A float32 update of 16-bit weights is made one parameter at a time: the gradient is cast to float32, the user's own optimizer
updates the master (or the weight cast to float32), and the new value is rounded back. So the optimizer keeps the model's own
parameters in its groups, its states are float32, and temporary float32 copies exist for one parameter at a time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from holdall.errors import InvalidInput
from holdall.precision._names import find
from holdall.precision._recipe import Recipe, cast_calls
from holdall.precision._rounding import round_stochastically
from holdall.updates.parts import Part, snapshot


def prepare(
    recipe: str | Recipe,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    growth_interval: int = 2000,
    seed: int = 0,
) -> Session:
    """Install a recipe on a float32 model. `growth_interval`: steps without overflow after which the loss scale doubles."""
    chosen = find(recipe)
    narrow = next((n for n, p in model.named_parameters() if p.is_floating_point() and p.dtype != torch.float32), None)
    if narrow is not None:
        raise InvalidInput(
            f"the parameter `{narrow}` is not float32, as recipes need", hint="load the model in float32: model.float()"
        )
    return Session(chosen, model, optimizer, growth_interval=growth_interval, seed=seed)


class Session:
    """Call its `autocast`, `backward` and `step` instead of the loop's own; everything else stays."""

    def __init__(
        self, recipe: Recipe, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, growth_interval: int, seed: int
    ) -> None:
        self.recipe = recipe
        self.model = model
        self.optimizer = optimizer
        self.skipped = 0  # steps that overflowed
        self._params = [p for group in optimizer.param_groups for p in group["params"]]
        self._device = self._params[0].device
        self._part = Part(optimizer, self._params)
        self._masters: dict[int, torch.Tensor] = {}
        self._generator = torch.Generator(device=self._device).manual_seed(seed)
        self._is_scaled = False
        self._undo: list[Any] = []
        self._scaler: torch.amp.GradScaler | None = None
        if recipe.scale is not None:
            self._scaler = torch.amp.GradScaler(
                self._device.type, init_scale=recipe.scale, growth_interval=growth_interval, enabled=True
            )
            # checked by the scaler: one number that is finite if all gradients are, whatever their dtype
            self._canary = torch.zeros((), device=self._device, requires_grad=True)
            self._stand_in = torch.optim.SGD([self._canary], lr=0.0)
        if recipe.packs:
            self._undo.append(recipe.put_on(model))
        if recipe.weights != torch.float32:
            self._narrow()
        if type(recipe).put_on is not Recipe.put_on and not recipe.packs:
            self._undo.append(recipe.put_on(model))

    def _narrow(self) -> None:
        """Cast the model, its inputs and its outputs; keep masters if the recipe has them."""
        dtype = self.recipe.weights
        for module in self.model.modules():
            if self.recipe.norms and isinstance(module, _BatchNorm):
                continue
            for p in module.parameters(recurse=False):
                if p.dtype == torch.float32:
                    if self.recipe.master and id(p) not in self._masters:
                        self._masters[id(p)] = p.data
                    p.data = p.data.to(dtype)
            for buffer in module.buffers(recurse=False):
                if buffer.dtype == torch.float32:
                    buffer.data = buffer.data.to(dtype)
        self._undo += cast_calls(self.model, dtype)

    # the loop

    @property
    def scale(self) -> float:
        """The current loss scale."""
        return float(self._scaler.get_scale()) if self._scaler is not None else 1.0

    def autocast(self) -> AbstractContextManager[object]:
        """Around forward and loss; does nothing for recipes that cast the model."""
        if self.recipe.compute is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self.recipe.compute)

    def backward(self, loss: torch.Tensor) -> None:
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        self._is_scaled = True

    def step(self, *, clip: float | None = None) -> bool:
        """Update the parameters and free their gradients; returns False if gradients overflowed and the step was skipped.

        `clip`: the maximal norm of all gradients together, after unscaling.
        """
        grads = [p.grad for p in self._params if p.grad is not None]
        if self._scaler is not None and not self._is_scaled:
            raise InvalidInput(
                "the loss was not scaled: backward was called on the loss itself, not on the session",
                hint="call `session.backward(loss)` instead of `loss.backward()`",
            )
        self._is_scaled = False
        factor = self._check(grads) if self._scaler is not None and grads else 1.0
        if factor is not None:
            if clip is not None and grads:
                norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads]
                factor = factor * min(1.0, clip / (factor * float(torch.linalg.vector_norm(torch.stack(norms))) + 1e-6))
            self._update(factor)
        else:
            self.skipped += 1
        for p in self._params:
            p.grad = None
        return factor is not None

    def _check(self, grads: list[torch.Tensor]) -> float | None:
        """The factor that unscales gradients; None: a gradient overflowed. Updates the loss scale."""
        assert self._scaler is not None
        factor = 1.0 / self.scale
        largest = torch.stack([torch.linalg.vector_norm(g, float("inf"), dtype=torch.float32) for g in grads]).max()
        self._canary.grad = largest * 0.0
        is_finite = bool(self._canary.grad.isfinite())
        self._scaler.step(self._stand_in)
        self._scaler.update()
        self._canary.grad = None
        return factor if is_finite else None

    def _update(self, factor: float) -> None:
        if not self.recipe.is_wide_update:
            if factor != 1.0:
                torch._foreach_mul_([p.grad for p in self._params if p.grad is not None], factor)
            self.optimizer.step()
            return
        groups = snapshot(self.optimizer)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler asks whether there was a step
        with torch.no_grad():
            for n, p in enumerate(self._params):
                if p.grad is not None:
                    self._update_one(n, p, groups, factor)

    def _update_one(self, n: int, p: torch.Tensor, groups: Any, factor: float) -> None:
        assert p.grad is not None
        wide = p.grad.float() if p.grad.dtype != torch.float32 else p.grad
        p.grad = None
        if factor != 1.0:
            wide.mul_(factor)
        value = self._masters.get(id(p), p.data)
        if value.dtype != torch.float32:
            value = value.float()
        self._part.step([value], [wide], [self.optimizer.state[p]], groups, [n])
        if value is p.data or value.data_ptr() == p.data_ptr():
            return
        p.data.copy_(round_stochastically(value, self._generator) if self.recipe.stochastic else value)

    # leaving

    def close(self) -> None:
        """Restore the model in float32: from the masters if there are any, else from the weights."""
        for undo in self._undo:
            undo()
        self._undo = []
        if self.recipe.weights == torch.float32:
            return
        for p in self.model.parameters():
            if id(p) in self._masters:
                p.data = self._masters[id(p)]
            elif p.dtype == self.recipe.weights:
                p.data = p.data.float()
        for buffer in self.model.buffers():
            if buffer.dtype == self.recipe.weights:
                buffer.data = buffer.data.float()
        self._masters = {}

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
