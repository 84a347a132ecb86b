"""Small models whose weights are read by others than their own module's forward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

WIDTH, WORDS = 16, 48


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(self.up(self.norm(x)).relu()), 0.1, self.training)  # type: ignore[no-any-return]


class _Language(nn.Module):
    """Embedding, blocks, head; the ones below read weights in ways of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(_Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def loss(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.loss(self.body(self.embed(ids)), ids)


class TopParameters(_Language):
    """Parameters of the model itself, which no block reads, as CLIP's scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.body(self.embed(ids)) + self.shift
        return self.loss(x * self.scale.exp(), ids)


class ReadByParent(_Language):
    """A child that is never called: its weight is read by the parent and given to others, as DeBERTa's relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.norm = nn.Embedding(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        positions = self.norm(self.positions.weight)
        for layer in self.layers:
            x = layer(x) + x @ positions / WIDTH
        return self.loss(x, ids)


class ReadTwice(_Language):
    """A block's weights are also read by its parent, before its call and after it."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.layers[1].down.bias  # type: ignore[operator, union-attr]
        x = self.body(x)
        return self.loss(x @ self.layers[0].down.weight @ self.layers[2].up.weight, ids)  # type: ignore[operator, union-attr]


class Normed(_Language):
    """The old `weight_norm`: a hook makes the weight from two parameters before the forward."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            for layer in self.layers:
                nn.utils.weight_norm(layer.up)  # type: ignore[type-var]
            nn.utils.weight_norm(self.head)


class Regularised(_Language):
    """The loss walks over all parameters."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss = super().forward(ids)
        return loss + 1e-3 * sum(p.float().square().sum() for p in self.parameters())


class Hooked(_Language):
    """A hook of one module reads a weight of another."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.layers[1].register_forward_hook(self._through_gate)

    def _through_gate(self, module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return out @ self.gate.weight + self.gate.bias


class Choosing(_Language):
    """Experts, of which some get nothing to do in a step, and then no gradient; the choice depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Experts() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for n, layer in enumerate(self.layers):
            x = layer(x, ids[0, n])
        return self.loss(x, ids)


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
        return x + self.experts[int(word) % 2](self.norm(x)).relu()  # type: ignore[no-any-return]


def _ids() -> torch.Tensor:
    return torch.randint(0, WORDS, (2, 8))


READERS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "top-parameters": lambda: (TopParameters(), (_ids(),)),
    "read-by-parent": lambda: (ReadByParent(), (_ids(),)),
    "read-twice": lambda: (ReadTwice(), (_ids(),)),
    "normed": lambda: (Normed(), (_ids(),)),
    "regularised": lambda: (Regularised(), (_ids(),)),
    "hooked": lambda: (Hooked(), (_ids(),)),
    "choosing": lambda: (Choosing(), (_ids(),)),
}
"""Name -> (model, batch); needs nothing but torch."""
