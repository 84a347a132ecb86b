"""A recipe at work on a model and its optimizer, from `prepare` to `close`, which gives both back as float32.

A float32 update of narrow weights goes one parameter at a time: the gradient is widened, the user's own optimizer updates the
master (or the widened weight), and the new value is rounded back. So the optimizer keeps the model's own parameters in its
groups, its states are float32, and never more than one parameter's worth of wide copies exists.
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
    """Put a recipe on a model whose parameters are float32. `growth_interval`: clean steps after which the scale doubles."""
    chosen = find(recipe)
    narrow = next((n for n, p in model.named_parameters() if p.is_floating_point() and p.dtype != torch.float32), None)
    if narrow is not None:
        raise InvalidInput(
            f"the parameter `{narrow}` is not float32, which a recipe begins from", hint="load the model in float32"
        )
    return Session(chosen, model, optimizer, growth_interval=growth_interval, seed=seed)


class Session:
    """Use `autocast`, `backward` and `step` in the place of the loop's own; everything else stays."""

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
            # what the scaler looks at: one number that is finite if all gradients are, whatever their width
            self._canary = torch.zeros((), device=self._device, requires_grad=True)
            self._stand_in = torch.optim.SGD([self._canary], lr=0.0)
        if recipe.weights != torch.float32:
            self._narrow()
        if type(recipe).put_on is not Recipe.put_on:
            self._undo.append(recipe.put_on(model))

    def _narrow(self) -> None:
        """Cast the model; keep masters where the recipe has them; cast what goes in and comes out."""
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
        """What the loss is multiplied by."""
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
        """Update the parameters and drop their gradients; false if the gradients overflowed and the step was left out.

        `clip`: the greatest norm that all gradients together may have, after the scale is taken off.
        """
        grads = [p.grad for p in self._params if p.grad is not None]
        if self._scaler is not None and not self._is_scaled:
            raise InvalidInput(
                "the loss was not scaled: its backward was not run by this session", hint="call `backward(loss)` of the session"
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
        """The factor that takes the scale off; None: something overflowed. Moves the scale on."""
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
        """The model in float32 again: masters where there are any, else the weights as they are."""
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
