"""BERT for masked words (Devlin et al., arXiv 1810.04805): post-norm layers with GELU, the word embedding tied to the head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import nn

from holdall.models.plain import Output, PlainConfig, classified


@dataclass(kw_only=True)
class BertShape(PlainConfig):
    vocab_size: int = 30522
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    dropout: float = 0.1

    model_type: ClassVar[str] = "plain_bert"

    def make(self) -> Bert:
        return Bert(self)


def _norm(config: BertShape) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=1e-12)


class BertEmbeddings(nn.Module):
    def __init__(self, config: BertShape) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.types = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm, self.drop = _norm(config), nn.Dropout(config.dropout)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.words(ids) + self.positions(places) + self.types(torch.zeros_like(ids))
        return cast("torch.Tensor", self.drop(self.norm(x)))


class BertLayer(nn.Module):
    def __init__(self, config: BertShape) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.heads, self.dropout = config.num_attention_heads, config.dropout
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.norm1 = nn.Linear(width, width), _norm(config)
        self.up, self.down, self.norm2 = nn.Linear(width, inner), nn.Linear(inner, width), _norm(config)
        self.act, self.drop = nn.GELU(), nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        rows, length, width = x.shape
        query, key, value = (
            part(x).view(rows, length, self.heads, -1).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        x = self.norm1(x + self.drop(self.out(mixed.transpose(1, 2).reshape(rows, length, width))))
        return cast("torch.Tensor", self.norm2(x + self.drop(self.down(self.act(self.up(x))))))


class MaskedWordsHead(nn.Module):
    def __init__(self, config: BertShape, words: torch.Tensor) -> None:
        super().__init__()
        self.linear, self.act, self.norm = nn.Linear(config.hidden_size, config.hidden_size), nn.GELU(), _norm(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.decoder.weight = cast("nn.Parameter", words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self.decoder(self.norm(self.act(self.linear(x)))))


class Bert(nn.Module):
    def __init__(self, config: BertShape) -> None:
        super().__init__()
        self.config = config
        self.embeddings = BertEmbeddings(config)
        self.layers = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))
        self.head = MaskedWordsHead(config, self.embeddings.words.weight)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, labels: torch.Tensor | None = None
    ) -> Output:
        mask = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        x = self.embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(x)
        return classified(logits.flatten(0, 1), None if labels is None else labels.flatten())
