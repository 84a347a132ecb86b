"""PipeTransformer: frozen layers, shrinking pipelines and replicas, states that move, cached prefixes."""

from itertools import pairwise

import torch

from holdall.pipelines.adaptive.pipetransformer import (
    FrozenPrefix,
    elastic_cut,
    epoch_seconds,
    frozen_by_norms,
    frozen_layers,
    loads,
    moved_optimizer,
    shrunk,
)
from holdall.pipelines.cuts import CutLayer

LAYERS = [CutLayer(forward=1.0, backward=2.0, weights=100, output=1) for _ in range(12)]


def test_layers_freeze_as_the_paper_counts():
    assert [frozen_layers(12, t) for t in range(5)] == [0, 4, 7, 9, 10]
    assert frozen_layers(9, 1) == 3 and frozen_layers(27, 3) == 19  # no rounding up of whole numbers
    assert frozen_by_norms([3, 1, 2, 5, 5, 5], 0) == 1
    assert frozen_by_norms([9, 8, 7, 6, 5, 4], 0) == 2  # a third of what is left


def test_pipelines_shrink_and_parts_never_grow():
    assert [shrunk(LAYERS, 8, frozen_layers(12, t)) for t in range(5)] == [8, 8, 4, 4, 2]  # 867 bytes are too many for 4
    limit = max(sum(loads(LAYERS, 0)[a:b]) for a, b in pairwise(elastic_cut(LAYERS, 8, 0)))
    for t in range(5):
        frozen = frozen_layers(12, t)
        bounds = elastic_cut(LAYERS, shrunk(LAYERS, 8, frozen), frozen)
        assert max(sum(loads(LAYERS, frozen)[a:b]) for a, b in pairwise(bounds)) <= limit
        assert all(a < b for a, b in pairwise(bounds))


def test_steps_get_shorter_as_the_pipeline_shrinks():
    """With the cache, elastic pipelines beat freezing alone (simulated); without it, not always: stages are cut by bytes."""
    given = {"batch": 64, "bandwidth": 1e3, "cached": True}
    found = [epoch_seconds(LAYERS, 8, shrunk(LAYERS, 4, f), f, **given) for f in (0, 4, 9, 10)]
    assert [e.replicas for e in found] == [2, 2, 4, 4]
    assert all(a.seconds > b.seconds for a, b in pairwise(found))
    for e in found[2:]:
        assert e.seconds < epoch_seconds(LAYERS, 8, 4, e.frozen, **given).seconds
        assert e.seconds < epoch_seconds(LAYERS, 8, e.pipes, e.frozen, batch=64, bandwidth=1e3).seconds


def build():
    torch.manual_seed(0)
    return [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(8)]


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


def train(layers, optimizers, steps, seed):
    made = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(4, 8, generator=made)
        for layer in layers:
            x = layer(x)
        x.square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def stages(layers, count):
    per = len(layers) // count
    return [[p for layer in layers[n * per : (n + 1) * per] for p in layer.parameters()] for n in range(count)]


def test_states_are_the_same_bits_after_a_pipeline_of_4_becomes_one_of_2():
    moved, plain = build(), build()
    old = [adam(own) for own in stages(moved, 4)]
    train(moved, old, 3, 1)
    before = {p: {k: v.clone() for k, v in o.state[p].items()} for o in old for p in o.state}
    new = [moved_optimizer(old, own, adam) for own in stages(moved, 2)]
    after = {p: o.state[p] for o in new for p in o.state}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[p][k], after[p][k]) for p in before for k in before[p])
    train(moved, new, 3, 2)
    whole = [adam([p for own in stages(plain, 1) for p in own])]
    train(plain, whole, 3, 1)
    train(plain, whole, 3, 2)
    assert all(
        torch.equal(a, b)
        for x, y in zip(moved, plain, strict=True)
        for a, b in zip(x.parameters(), y.parameters(), strict=True)
    )


def test_cached_prefixes_give_the_bits_and_the_gradients_of_frozen_layers():
    layers, plain = build(), build()
    inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
    for layer in plain[:4]:
        layer.requires_grad_(requires_grad=False)
    prefix = FrozenPrefix(layers[:4])
    for _ in range(2):
        x, y = prefix(range(6), inputs), inputs
        for layer in plain[:4]:
            y = layer(y)
        assert torch.equal(x, y)
        assert prefix.computed == 6  # the second time nothing is computed
        for a, b in zip(layers[4:], plain[4:], strict=True):
            x, y = a(x), b(y)
        x.square().mean().backward()
        y.square().mean().backward()
    for a, b in zip(layers[4:], plain[4:], strict=True):
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert all(p.grad is None for layer in layers[:4] for p in layer.parameters())
    prefix.grow(layers[4:5])
    with torch.no_grad():
        expected = layers[4](FrozenPrefix(layers[:4])(range(6), inputs))
    assert torch.allclose(prefix(range(6), inputs), expected, rtol=0, atol=1e-6)
