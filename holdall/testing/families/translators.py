"""Encoders with decoders, of text."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from holdall.testing.families._registry import (
    HEADS,
    INNER,
    LAYERS,
    ROWS,
    VOCABULARY,
    WIDTH,
    Made,
    hugging_face,
    register,
    tokens,
)

BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": INNER,
    "decoder_ffn_dim": INNER,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": 1,
}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 16,
    "d_ff": INNER,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "decoder_start_token_id": 0,
}


def _translator(name: str, model: str, config: str, settings: dict[str, Any]) -> None:
    @register("encoder-decoder", name)
    def build() -> Made:
        return hugging_face(model, config, **settings), {"input_ids": tokens(), "labels": tokens(ROWS, 16)}


_translator("t5", "T5ForConditionalGeneration", "T5Config", T5)
_translator(
    "t5-gated",
    "T5ForConditionalGeneration",
    "T5Config",
    {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
)
_translator("bart", "BartForConditionalGeneration", "BartConfig", BART)
_translator("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", BART)
_translator("mbart", "MBartForConditionalGeneration", "MBartConfig", BART)
_translator("marian", "MarianMTModel", "MarianConfig", BART)
_translator("blenderbot", "BlenderbotForConditionalGeneration", "BlenderbotConfig", BART)


class Transformer(nn.Module):
    """PyTorch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, INNER, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = self.layers.generate_square_subsequent_mask(target.shape[1])
        out: torch.Tensor = self.head(self.layers(self.words(source), self.words(target), tgt_mask=mask))
        return out


def _next_words(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(*batch).flatten(0, 1), batch[1].flatten())


@register("encoder-decoder", "nn-transformer", loss=_next_words)
def _nn_transformer() -> Made:
    return Transformer(), (tokens(), tokens())
