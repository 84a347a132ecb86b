"""A model as a list of pieces, each of which takes what the one before returns, and what stages of them hand on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from holdall.errors import Unsupported
from holdall.pipelines.running.undone import as_if_not_run

_TRIED = 8  # words
_AS_LIST = "pass a list of modules, each of which takes what the one before returns"


class StagePieces(torch.nn.Sequential):
    """The pieces of a stage. What a stage gets from the one before comes as several arguments if that returns several tensors;
    messages are contiguous."""

    hands_on = True  # has it a stage after it?

    def forward(self, *given: Any) -> Any:
        value = received(given[0] if len(given) == 1 else given)
        for piece in self:
            value = piece(value)
        return handed_on(value) if self.hands_on else value


class _SentBack(torch.autograd.Function):
    """Backward: the gradient as it can be sent."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # noqa: ARG004
        return grad.contiguous()


def received(value: Any) -> Any:
    """What a stage computes on."""
    return tree_map_only(torch.Tensor, lambda t: _SentBack.apply(t) if t.requires_grad else t, value)


class _Apart(torch.autograd.Function):
    """The same bytes, in a tensor that autograd takes for no view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # noqa: ARG004
        return grad


def handed_on(value: Any) -> Any:
    """What a stage returns, as it can be sent, and as torch lets go of its graph where backwards are in two parts: in place,
    which views refuse."""

    def one(t: torch.Tensor) -> torch.Tensor:
        t = t.contiguous()
        return _Apart.apply(t) if t._is_view() else t  # type: ignore[no-any-return]

    return tree_map_only(torch.Tensor, one, value)


def pieces_of(model: torch.nn.Module | Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Modules of an `nn.Sequential`, a list as it is, or the layers of a Hugging Face decoder laid out like Llama or GPT-2. A
    module that is there twice is two pieces."""
    if isinstance(model, torch.nn.Module) and not isinstance(model, torch.nn.Sequential):
        return _decoder(model)
    found: list[torch.nn.Module] = []
    for piece in model:
        found.append(PieceAgain(piece) if any(piece is before for before in found) else piece)
    return found


def _decoder(model: torch.nn.Module) -> list[torch.nn.Module]:
    body: Any = getattr(model, "model", getattr(model, "transformer", None))
    head: Any = getattr(model, "lm_head", None)
    if head is not None and _has(body, "embed_tokens", "layers", "norm", "rotary_emb"):
        longest = _window(getattr(model, "config", None))
        layers = (DecoderPiece(layer, body.rotary_emb, longest) for layer in body.layers)
        return [body.embed_tokens, *layers, HeadPiece(body.norm, head)]
    if head is not None and _has(body, "wte", "wpe", "drop", "h", "ln_f"):
        return [PlacesPiece(body.wte, body.wpe, body.drop), *map(BlockPiece, body.h), HeadPiece(body.ln_f, head)]
    raise Unsupported(
        f"a {type(model).__name__} cannot be cut into stages: it is neither an nn.Sequential nor laid out like Llama or GPT-2",
        hint=_AS_LIST,
    )


def _has(body: Any, *parts: str) -> bool:
    return all(hasattr(body, part) for part in parts)


def _window(config: Any) -> int | None:
    """Positions that attention looks back on, in some layers; None: all. Masks of windows are made outside the layers."""
    kinds = set(getattr(config, "layer_types", None) or ())
    sizes = [getattr(config, "attention_chunk_size", None)] if "chunked_attention" in kinds else []
    if getattr(config, "use_sliding_window", True) and kinds != {"full_attention"}:
        sizes.append(getattr(config, "sliding_window", None))
    return min((size for size in sizes if size), default=None)


def check_whole(model: torch.nn.Module | Sequence[torch.nn.Module], pieces: Sequence[torch.nn.Module]) -> None:
    """Refuse a decoder whose pieces do not compute what it does: it may scale what is between them, or make masks outside."""
    if isinstance(pieces[-1], HeadPiece) and not _is_whole(model, pieces):
        raise Unsupported(
            f"the layers of this {type(model).__name__} do not make up the model: it computes more between them, or its "
            "attention needs masks",
            hint=f'use attn_implementation="sdpa", or {_AS_LIST}',
        )


def _is_whole(model: Any, pieces: Sequence[torch.nn.Module]) -> bool:
    """Tried on a few words, without dropout."""
    ids = torch.arange(_TRIED, device=model.lm_head.weight.device)[None] % model.config.vocab_size
    modes = {m: m.training for m in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), as_if_not_run([model], ids.device):
            expected = model(input_ids=ids, use_cache=False).logits
            found: Any = ids
            for piece in pieces:
                found = piece(found)
    except (TypeError, ValueError, RuntimeError, AttributeError):  # layers that want other arguments
        return False
    finally:
        for m, was in modes.items():
            m.training = was
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


class PieceAgain(torch.nn.Module):
    """A module that is among the pieces already."""

    def __init__(self, piece: torch.nn.Module) -> None:
        super().__init__()
        self.piece = piece

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.piece(*args, **kwargs)


class DecoderPiece(torch.nn.Module):
    """One decoder layer; positions count from 0 (`places` says which there are), and attention is causal without padding.
    `longest`: more positions it cannot have; None: any."""

    def __init__(self, layer: torch.nn.Module, rotary: torch.nn.Module, longest: int | None) -> None:
        super().__init__()
        self.layer = layer
        self.rotary = rotary
        self.longest = longest
        self.places: Callable[..., torch.Tensor] = torch.arange

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.longest is not None and hidden.shape[1] > self.longest:
            raise Unsupported(
                f"a sequence of {hidden.shape[1]} positions is longer than the window of attention, {self.longest}",
                hint="use shorter sequences, or a model whose layers all look at everything",
            )
        positions = self.places(hidden.shape[1], device=hidden.device)[None]
        found: Any = self.layer(
            hidden,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=self.rotary(hidden, positions),
            use_cache=False,
        )
        return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]


class PlacesPiece(torch.nn.Module):
    """Words and positions, which count from 0."""

    def __init__(self, words: torch.nn.Module, places: torch.nn.Module, drop: torch.nn.Module) -> None:
        super().__init__()
        self.words = words
        self.places = places
        self.drop = drop

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        return self.drop(self.words(ids) + self.places(places))  # type: ignore[no-any-return]


class BlockPiece(torch.nn.Module):
    """One decoder layer that needs no positions; attention is causal without padding."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: Any = self.layer(hidden, attention_mask=None, use_cache=False)
        return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]


class HeadPiece(torch.nn.Module):
    def __init__(self, norm: torch.nn.Module, head: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]
