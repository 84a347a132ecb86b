"""A model as a list of pieces, each of which takes what the one before returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from holdall.errors import Unsupported


def pieces_of(model: torch.nn.Module | Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Modules of an `nn.Sequential`, a list as it is, or the layers of a Hugging Face decoder with Llama's layout. A module
    that is there twice is two pieces."""
    if isinstance(model, torch.nn.Module) and not isinstance(model, torch.nn.Sequential):
        return _decoder(model)
    found: list[torch.nn.Module] = []
    for piece in model:
        found.append(PieceAgain(piece) if any(piece is before for before in found) else piece)
    return found


def check_shared(pieces: Sequence[torch.nn.Module], bounds: Sequence[int]) -> None:
    """Refuse parameters that stages of several ranks would share."""
    seen: dict[int, int] = {}
    for stage, (low, high) in enumerate(pairwise(bounds)):
        for piece in pieces[low:high]:
            for name, p in piece.named_parameters():
                if seen.setdefault(id(p), stage) != stage:
                    raise Unsupported(
                        f"the parameter `{name}` is shared by stages {seen[id(p)]} and {stage}",
                        hint="untie the weights (tie_word_embeddings=False), or cut so that one stage has all that share it",
                    )


def _decoder(model: torch.nn.Module) -> list[torch.nn.Module]:
    body: Any = getattr(model, "model", None)
    head: Any = getattr(model, "lm_head", None)
    parts = ("embed_tokens", "layers", "norm", "rotary_emb")
    if body is None or head is None or not all(hasattr(body, part) for part in parts):
        raise Unsupported(
            f"a {type(model).__name__} cannot be cut into stages: it is neither an nn.Sequential nor laid out like Llama",
            hint="pass a list of modules, each of which takes what the one before returns",
        )
    return [
        body.embed_tokens,
        *(DecoderPiece(layer, body.rotary_emb) for layer in body.layers),
        HeadPiece(body.norm, head),
    ]


class PieceAgain(torch.nn.Module):
    """A module that is among the pieces already."""

    def __init__(self, piece: torch.nn.Module) -> None:
        super().__init__()
        self.piece = piece

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.piece(*args, **kwargs)


class DecoderPiece(torch.nn.Module):
    """One decoder layer; positions count from 0 (`places` says which there are), and attention is causal without padding."""

    def __init__(self, layer: torch.nn.Module, rotary: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.rotary = rotary
        self.places: Callable[..., torch.Tensor] = torch.arange

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = self.places(hidden.shape[1], device=hidden.device)[None]
        found: Any = self.layer(
            hidden,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=self.rotary(hidden, positions),
            use_cache=False,
        )
        return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]


class HeadPiece(torch.nn.Module):
    def __init__(self, norm: torch.nn.Module, head: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]
