"""Recurrent nets: whole layers, cells in a Python loop, echoes of old state."""

from __future__ import annotations

import torch
from torch import nn

from holdall.testing.families._registry import VOCABULARY, WIDTH, Made, classes_of, register, tokens


class Words(nn.Module):
    """Words in, a recurrent layer, words out."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(VOCABULARY, WIDTH), layer
        self.head = nn.Linear(layer.hidden_size * (2 if layer.bidirectional else 1), VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layer(self.words(ids))[0])
        return out


@register("recurrent", "lstm", loss=classes_of)
def _lstm() -> Made:
    return Words(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1)), (tokens(), tokens())


@register("recurrent", "gru-both-ways", loss=classes_of)
def _gru() -> Made:
    return Words(nn.GRU(WIDTH, 32, 2, batch_first=True, bidirectional=True)), (tokens(), tokens())


class Cells(nn.Module):
    """A cell that is called once for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.GRUCell(WIDTH, WIDTH),
            nn.Linear(WIDTH, VOCABULARY),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        state, said = torch.zeros(len(ids), WIDTH), []
        for k in range(ids.shape[1]):
            state = self.cell(self.words(ids[:, k]), state)
            said.append(self.head(state))
        return torch.stack(said, 1)


@register("recurrent", "gru-cell", loss=classes_of)
def _cells() -> Made:
    return Cells(), (tokens(ROWS_OF_CELLS, 16), tokens(ROWS_OF_CELLS, 16))


ROWS_OF_CELLS = 8


class LinearAttention(nn.Module):
    """A running sum of keys times values, as RWKV and RetNet keep, one step after the other with a decay that is learnt."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.mix = nn.ModuleList(nn.Linear(32, 96) for _ in range(layers))
        self.decay = nn.Parameter(torch.zeros(layers, 32))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for mix, decay in zip(self.mix, self.decay, strict=True):
            queries, keys, values = mix(x).chunk(3, -1)
            state, said = torch.zeros(len(ids), 32, 32), []
            for k in range(ids.shape[1]):
                state = state * decay.sigmoid()[:, None] + keys[:, k, :, None] * values[:, k, None, :]
                said.append(torch.einsum("bi,bij->bj", queries[:, k], state))
            x = x + torch.stack(said, 1)
        out: torch.Tensor = self.head(x)
        return out


@register("recurrent", "linear-attention", loss=classes_of)
def _linear_attention() -> Made:
    return LinearAttention(), (tokens(4, 12), tokens(4, 12))


class Packed(nn.Module):
    """An LSTM over sequences of several lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.LSTM(WIDTH, WIDTH, batch_first=True),
            nn.Linear(WIDTH, 10),
        )

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
        out: torch.Tensor = self.head(self.layer(packed)[1][0][-1])
        return out


@register("recurrent", "lstm-packed", loss=lambda m, b: nn.functional.cross_entropy(m(b[0], b[1]), b[2]))
def _packed() -> Made:
    return Packed(), (tokens(8, 32), torch.tensor([32, 30, 7, 12, 25, 1, 18, 9]), torch.randint(0, 10, (8,)))
