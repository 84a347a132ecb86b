"""The model and data of `holdall demo`: a small GPT over bytes in plain torch, without any other package, and a text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.resources import files

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256  # one entry per byte: no tokenizer is needed


class DemoBlock(nn.Module):
    """Attention and MLP, each with a norm and a residual. Dropout is on, so that recomputation must restore random states too.

    Attention is written out, because fused GPU kernels may sum in another order each time, and the demo compares bits.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.attend(self.norm1(x)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        q, k, v = (
            part.view(rows, tokens, self.heads, width // self.heads).transpose(1, 2)  # rows, heads, tokens, width / heads
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5  # rows, heads, tokens, tokens
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
        shares = F.dropout(scores.masked_fill(later, float("-inf")).softmax(-1), self.dropout, self.training)
        mixed: torch.Tensor = self.out((shares @ v).transpose(1, 2).reshape(rows, tokens, width))
        return mixed


class TinyGPT(nn.Module):
    """A small GPT whose forward returns the loss, which keeps the demo's loop short."""

    def __init__(self, *, blocks: int = 6, width: int = 128, heads: int = 4, length: int = 128, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(DemoBlock(width, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # rows, tokens, bytes
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(*, steps: int, rows: int, length: int, device: str, seed: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    """Windows of the bundled text at places drawn from the seed, one batch at a time so that none outlives its step.

    The text stays bytes and not a tensor: the ledger of a CPU run counts every tensor that an op touches.
    """
    text = (files("holdall") / "data" / "corpus.txt").read_bytes()
    places = random.Random(seed)
    for _ in range(steps):
        starts = [places.randrange(len(text) - length) for _ in range(rows)]
        yield {
            "ids": torch.tensor([list(text[i : i + length]) for i in starts], device=device),
            "targets": torch.tensor([list(text[i + 1 : i + 1 + length]) for i in starts], device=device),
        }
