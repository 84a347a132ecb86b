"""AMSP: the search over shard factors against a naive one, its end points, and how it moves with memory."""

import random

import pytest

import holdall
from holdall.cost.sharding import ModelStates, ShardFactors, ShardStep, collectives_seconds, memory
from holdall.parallel.sharding.amsp import amsp_factors


class Table:
    """Random bytes per second for every size of a group and distance of its ranks."""

    def __init__(self, seed, ranks):
        draw = random.Random(seed)
        sizes = range(1, ranks + 1)
        self.rates = {(n, stride): draw.uniform(1e9, 100e9) for n in sizes for stride in sizes}

    def seconds(self, kind, nbytes, ranks, stride):
        return (2 if kind == "all_reduce" else 1) * nbytes * (ranks - 1) / ranks / self.rates[ranks, stride]


class Even:
    """The same rate for all groups."""

    def seconds(self, kind, nbytes, ranks, stride):
        return (2 if kind == "all_reduce" else 1) * (nbytes * (ranks - 1) // ranks) / 1e9


def naive(ranks, backwards, table, room):
    """All triples of numbers, with bytes and seconds as in the text: 2 bytes of parameters and gradients, 12 of states."""
    best = None
    count = 1_000_000
    for p in range(1, ranks + 1):
        for g in range(1, ranks + 1):
            for o in range(1, ranks + 1):
                if ranks % o or o % g or g % p:
                    continue
                need = -(-2 * count // p) + -(-2 * count // g) + -(-12 * count // o)
                need += (2 * count if p > 1 else 0) + (2 * count if g > 1 else 0)
                if need > room:
                    continue

                def gather(size, n, stride):
                    return size * (n - 1) / n / table.rates[n, stride]

                seconds = 2 * backwards * gather(2 * count, p, 1) + backwards * gather(2 * count, g, 1)
                seconds += gather(2 * count // g, o // g, g) + 2 * gather(2 * count // o, ranks // o, o)
                seconds += gather(2 * count // p, o // p, p)
                if best is None or (seconds, need) < best[:2]:
                    best = (seconds, need, (p, g, o))
    return best


@pytest.mark.parametrize("seed", range(100))
def test_the_search_is_brute_force(seed):
    draw = random.Random(1000 + seed)
    ranks, backwards = draw.choice([4, 6, 8, 12, 16]), draw.choice([1, 2, 4])
    table = Table(seed, ranks)
    model, step = ModelStates.mixed(1_000_000), ShardStep(ranks=ranks, backwards=backwards)
    room = draw.uniform(5.5e6, 17e6)
    expected = naive(ranks, backwards, table, room)
    if expected is None:
        with pytest.raises(holdall.Infeasible):
            amsp_factors(model, step, table, room=room)
        return
    found = amsp_factors(model, step, table, room=room)
    assert collectives_seconds(found, model, step, table) == pytest.approx(expected[0])
    assert memory(found, model, step) <= room


@pytest.mark.parametrize("ranks", [4, 12, 64])
def test_its_end_points(ranks):
    """Without a limit it sends as little as data parallelism, and shards what that costs nothing for: optimizer states. With
    the least memory that suffices it shards everything."""
    model, step = ModelStates.mixed(ranks * 1000, units=100), ShardStep(ranks=ranks, backwards=2)
    assert amsp_factors(model, step, Even(), room=10**12) == ShardFactors(1, 1, ranks)
    least = memory(ShardFactors(ranks, ranks, ranks), model, step)
    assert amsp_factors(model, step, Even(), room=least) == (ranks, ranks, ranks)
    with pytest.raises(holdall.Infeasible, match="need"):
        amsp_factors(model, step, Even(), room=least - 1)


@pytest.mark.parametrize("seed", range(5))
def test_less_memory_is_never_faster(seed):
    model, step, table = ModelStates.mixed(64_000, units=8), ShardStep(ranks=64, backwards=3), Table(seed, 64)
    rooms = [memory(ShardFactors(64, 64, 64), model, step) + n * 20_000 for n in range(60)]
    found = [amsp_factors(model, step, table, room=room) for room in rooms]
    times = [collectives_seconds(f, model, step, table) for f in found]
    assert times == sorted(times, reverse=True)
    assert len(set(found)) > 3
