"""The optimizer of a training run, and the learning rate over its steps."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.optim.lr_scheduler import LambdaLR

from holdall import optim
from holdall.problem import resolve_recipe
from holdall.training import TrainOptions

_ADAMW = 1e-4  # for fine-tuning; torch's own default is ten times as much


def settled(options: TrainOptions) -> TrainOptions:
    """With the learning rate and the parameters' dtype that follow from the optimizer and the precision."""
    recipe = resolve_recipe(options.precision)
    dtype = options.dtype if recipe is None else str(recipe.held).removeprefix("torch.")
    return replace(options, lr=learning_rate(options), dtype=dtype)


def learning_rate(options: TrainOptions) -> float:
    """The rate after the warmup: as typed with the optimizer, as given, or the optimizer's own."""
    name, typed = optim.read(options.optimizer)
    usual = _ADAMW if name == "adamw" else optim.option_names(name)["lr"]
    return float(typed.get("lr", usual if options.lr is None else options.lr))


def make_optimizer(model: torch.nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    """The optimizer by its name; only matrices decay: norms and biases have no directions to prefer."""
    known = optim.option_names(optim.read(options.optimizer)[0])
    run = {"lr": learning_rate(options), "betas": options.betas, "weight_decay": options.weight_decay, "fused": None}
    taken = {key: value for key, value in run.items() if key in known}
    if len(known.get("betas") or ()) != len(options.betas):
        taken.pop("betas", None)  # a rule with other moments than Adam
    return optim.make(options.optimizer, model, decay_vectors=False, **taken)


def make_schedule(optimizer: torch.optim.Optimizer, options: TrainOptions, start: int) -> LambdaLR:
    """Up in a line, down in a cosine. A function of the step alone, so that there is nothing to save."""

    def factor(step: int) -> float:
        if step < options.warmup:
            return (step + 1) / options.warmup
        done = (step - options.warmup) / max(1, options.steps - options.warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    for group in optimizer.param_groups:
        group["initial_lr"] = options.lr
    return LambdaLR(optimizer, factor, last_epoch=start - 1)
