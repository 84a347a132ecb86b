"""Tables, graphs, sets, and nets that make the weights of other nets."""

from __future__ import annotations

import torch
from torch import nn

from holdall.testing.families._registry import INNER, WIDTH, Made, classes_of, register, values_of, vectors


class Recommender(nn.Module):
    """As DLRM: bags of embeddings, products of each pair, layers on top."""

    def __init__(self, tables: int = 4) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(200, 16, mode="sum") for _ in range(tables))
        self.below = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 16))
        self.above = nn.Sequential(nn.Linear(16 + (tables + 1) ** 2, INNER), nn.ReLU(), nn.Linear(INNER, 1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        seen = self.below(dense)
        parts = torch.stack([seen, *[bag(sparse[:, k]) for k, bag in enumerate(self.bags)]], 1)
        pairs = (parts @ parts.transpose(1, 2)).flatten(1)
        out: torch.Tensor = self.above(torch.cat([seen, pairs], 1))
        return out[:, 0]


@register("table", "dlrm", loss=lambda m, b: nn.functional.binary_cross_entropy_with_logits(m(b[0], b[1]), b[2]))
def _dlrm() -> Made:
    return Recommender(), (torch.randn(256, 8), torch.randint(0, 200, (256, 4, 3)), torch.rand(256))


class Graph(nn.Module):
    """Messages along edges, summed by `index_add`."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))
        self.updates = nn.ModuleList(nn.GRUCell(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = torch.relu(message(torch.cat([nodes[edges[0]], nodes[edges[1]]], -1)))
            nodes = update(torch.zeros_like(nodes).index_add(0, edges[1], sent), nodes)
        out: torch.Tensor = self.head(nodes)
        return out


@register("graph", "messages", loss=lambda m, b: nn.functional.cross_entropy(m(b[0], b[1]), b[2]))
def _messages() -> Made:
    return Graph(), (torch.randn(100, WIDTH), torch.randint(0, 100, (2, 400)), torch.randint(0, 10, (100,)))


class GraphAttention(nn.Module):
    """Attention over the edges of each node: a softmax by `scatter_reduce` and `index_add`."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.scores = nn.ModuleList(nn.Linear(2 * WIDTH, 1) for _ in range(3))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for value, score in zip(self.values, self.scores, strict=True):
            seen = value(nodes)
            raw = nn.functional.leaky_relu(score(torch.cat([seen[edges[0]], seen[edges[1]]], -1)))[:, 0]
            most = torch.full((len(nodes),), -1e9).scatter_reduce(0, edges[1], raw.detach(), "amax")
            weight = (raw - most[edges[1]]).exp()
            total = torch.zeros(len(nodes)).index_add(0, edges[1], weight)
            share = weight / (total[edges[1]] + 1e-9)
            nodes = nn.functional.elu(nodes + torch.zeros_like(seen).index_add(0, edges[1], share[:, None] * seen[edges[0]]))
        out: torch.Tensor = self.head(nodes)
        return out


@register("graph", "graph-attention", loss=lambda m, b: nn.functional.cross_entropy(m(b[0], b[1]), b[2]))
def _graph_attention() -> Made:
    return GraphAttention(), (torch.randn(100, WIDTH), torch.randint(0, 100, (2, 400)), torch.randint(0, 10, (100,)))


class Hyper(nn.Module):
    """A net that makes the weights with which another works, by `functional_call`."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(8, WIDTH), nn.GELU(), nn.Linear(WIDTH, 32 * 16 + 32))
        self.codes = nn.Parameter(torch.randn(3, 8))
        self.enter, self.head = nn.Linear(WIDTH, 16), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.enter(x)
        said = torch.zeros(len(x), 32)
        for code in self.codes:
            made = self.maker(code)
            said = said + torch.tanh(nn.functional.linear(seen, made[: 32 * 16].view(32, 16), made[32 * 16 :]))
        out: torch.Tensor = self.head(said)
        return out


@register("table", "hypernetwork", loss=classes_of)
def _hyper() -> Made:
    return Hyper(), vectors()


class Points(nn.Module):
    """As PointNet: the same layers for each point, then the largest."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((3, 32), (32, WIDTH), (WIDTH, INNER))
        self.each = nn.Sequential(*[nn.Sequential(nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()) for a, b in sizes])
        self.head = nn.Sequential(nn.Linear(INNER, WIDTH), nn.ReLU(), nn.Dropout(0.3), nn.Linear(WIDTH, 10))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.each(points).amax(-1))
        return out


@register("table", "point-cloud", loss=classes_of)
def _points() -> Made:
    return Points(), (torch.randn(8, 3, 100), torch.randint(0, 10, (8,)))


class Experts(nn.Module):
    """A mixture by hand: each expert works on the rows that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * shares[rows, None])
        said: torch.Tensor = self.head(x + out)
        return said


@register("table", "experts-by-hand", loss=classes_of)
def _experts() -> Made:
    return Experts(), vectors(256)


class Residual(nn.Module):
    """Plain layers over columns, with batch norms and a residual."""

    def __init__(self) -> None:
        super().__init__()
        block = [nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Dropout(0.1), nn.Linear(INNER, WIDTH)]
        self.blocks = nn.ModuleList(nn.Sequential(*[_again(step) for step in block]) for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.head(x)
        return out


def _again(module: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(module)


@register("table", "residual-columns", loss=values_of)
def _residual() -> Made:
    return Residual(), (torch.randn(512, WIDTH), torch.randn(512, 1))
