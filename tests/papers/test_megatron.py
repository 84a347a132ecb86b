"""Tensor parallelism, "Megatron-LM" (arXiv 1909.08053), and sequence parallelism (Korthikanti et al., arXiv 2205.05198): what a
layer keeps on a rank, and what it sends. Traced as one rank of many; `tests/parallel/test_tensor.py` runs real ranks."""

import functools

import pytest
import torch
from torch import nn

import holdall
from holdall.cost.closed_form import Shape, parallel_activation_bytes
from holdall.simulator.curve import memory_curve
from holdall.testing.contracts import problem_for
from holdall.testing.worlds import machine

S, B, H, A = 64, 2, 128, 8


def dropped(x):
    return torch.native_dropout(x, 0.1, True)[0]  # a mask of one byte an element


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(H, H) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, H // A)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(2, 3) * (H // A) ** -0.5
        return self.out((dropped(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.attention, self.perceptron = nn.LayerNorm(H), nn.LayerNorm(H), Attention(), Perceptron()

    def forward(self, x):
        x = x + dropped(self.attention(self.one(x)))
        return x + dropped(self.perceptron(self.two(x)))


class Stack(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.float().mean()


@functools.cache
def traced(layers, ranks, way):
    model = Stack(layers).bfloat16()
    x = torch.randn(B, S, H, dtype=torch.bfloat16, requires_grad=True)  # as of an embedding, whose gradient is wanted
    if ranks == 1:
        return holdall.trace(model, x)
    return holdall.trace(model, x, mesh={"tp": ranks}, shard=way)


def held_by_a_layer(ranks, way):
    """Bytes after forward, of three layers against two."""
    live = []
    for layers in (2, 3):
        trace = traced(layers, ranks, way)
        plan = holdall.plan(trace, planner="nop", budget="1GiB", hardware=machine())
        begin = next(op.id for op in trace.ops if op.site.phase.value == "backward")
        weights = sum(t.nbytes for t in trace.tensors.values() if t.kind.value == "param")
        live.append(memory_curve(problem_for(trace), plan.actions).before[begin] - weights)
    return live[1] - live[0]


@pytest.mark.parametrize(("ranks", "way"), [(1, "tensor"), (2, "tensor"), (4, "tensor"), (2, "sequence"), (4, "sequence")])
def test_a_layer_keeps_what_the_formula_says(ranks, way):
    """sbh (10 + 24/t + 5as/(ht)) with tensors divided, sbh/t (34 + 5as/h) along the sequence too; within 3 %."""
    shape = Shape(layers=1, hidden=H, heads=A)
    formula = parallel_activation_bytes(shape, batch=B, seq=S, ranks=ranks, sequence=way == "sequence")
    assert held_by_a_layer(ranks, way) == pytest.approx(formula, rel=0.03)


def collectives_of_a_layer(way, phase):
    """(kind, bytes) of those that three layers have more than two, without the small sums for norms and biases."""
    found = []
    for layers in (2, 3):
        trace = traced(layers, 2, way)
        some = [(c.kind, c.nbytes) for c in trace.about.shards.collectives if trace.ops[c.op].site.phase.value == phase]
        found.append([c for c in some if c[1] > 4 * H])
    fewer, more = found
    for one in fewer:
        more.remove(one)
    return sorted(more)


def test_two_all_reduces_a_layer_and_direction():
    size = S * B * H * 2
    assert collectives_of_a_layer("tensor", "forward") == [("all_reduce", size)] * 2
    assert collectives_of_a_layer("tensor", "backward") == [("all_reduce", size)] * 2


def test_along_the_sequence_gathers_and_scatters_take_their_place():
    """The same bytes as an all-reduce is both; and the inputs of columns, of which a part was kept, are gathered again."""
    gather, scatter = ("all_gather", S * B * H * 2), ("reduce_scatter", S * B * H * 2)
    assert collectives_of_a_layer("sequence", "forward") == [gather] * 2 + [scatter] * 2
    assert collectives_of_a_layer("sequence", "backward") == [gather] * 4 + [scatter] * 2
