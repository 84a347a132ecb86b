"""A family is a small model of one architecture and a batch for it; files of this package register theirs by a decorator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Made = tuple[nn.Module, Any]
"""A model, and what the loop passes to it: a mapping (`model(**batch)`) or a tuple (`model(*batch)`)."""
Loss = Callable[[nn.Module, Any], torch.Tensor]

VOCABULARY, WIDTH, INNER, HEADS, LAYERS, ROWS, LENGTH = 256, 64, 128, 4, 2, 4, 32


@dataclass(frozen=True, kw_only=True)
class Family:
    name: str
    kind: str
    build: Callable[[], Made]
    loss: Loss | None = None  # None: the model returns its loss

    def loss_of(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The loss as a loop would take it."""
        if self.loss is not None:
            return self.loss(model, batch)
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
        found: torch.Tensor = output.loss if hasattr(output, "loss") else output
        return found


FAMILIES: dict[str, Family] = {}


def register(kind: str, name: str, *, loss: Loss | None = None) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Make the function below a family of this kind."""

    def decorate(build: Callable[[], Made]) -> Callable[[], Made]:
        if name in FAMILIES:
            raise ValueError(f"two families are called `{name}`")
        FAMILIES[name] = Family(name=name, kind=kind, build=build, loss=loss)
        return build

    return decorate


def hugging_face(model: str, config: str, **settings: Any) -> nn.Module:
    """A Hugging Face model from its config; what is not named keeps the library's default."""
    import transformers

    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    return made


def tokens(rows: int = ROWS, length: int = LENGTH, *, least: int = 3, most: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(least, most, (rows, length))


def classes_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross entropy of what a model says of the first part of a batch against the second."""
    said = model(batch[0])
    return nn.functional.cross_entropy(said.flatten(0, -2), batch[1].flatten())


def values_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """Mean square of what a model says of the first part of a batch less the second."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def vectors(rows: int = 512, width: int = WIDTH, classes: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, width), torch.randint(0, classes, (rows,))
