"""MoESys: experts on device, host and disk against plain training, its cache of counts, and what is simulated of it."""

import itertools
import random
from collections import OrderedDict

import pytest
import torch

import holdall
from holdall.sparse.frequency import FrequencyCache
from holdall.sparse.moesys import ExpertStore
from holdall.sparse.moesys_simulated import SparseLayer, elastic_ranks, prefetched_seconds, ring_seconds
from holdall.tiers.nvme import Nvme

EXPERTS, LAYERS, WIDTH, STEPS = 6, 2, 8, 8


class Mixture(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(WIDTH, EXPERTS)
        self.experts = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.GELU(), torch.nn.Linear(16, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        best, chosen = scores.max(-1)
        out = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            rows = (chosen == n).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * best[rows, None])
        return x + out


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Mixture() for _ in range(LAYERS)), torch.nn.Linear(WIDTH, 1))


def batch(n):
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(n))


def experts_of(model):
    return {(n, e): expert for n in range(LAYERS) for e, expert in enumerate(model[n].experts)}


def train(model, optimizer, *, zeros=False, between=None):
    """Steps of two backwards, with a rate that changes; some experts get no tokens."""
    losses, idle = [], 0
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(STEPS):
        for half in range(2):
            loss = model(batch(2 * step + half)).square().mean()
            loss.backward()
            losses.append(loss.item())
        for p in model.parameters():
            if p.grad is None and p.numel():
                idle += 1
                if zeros:
                    p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if between is not None:
            between()
    return losses, idle


@pytest.fixture
def disk(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDALL_NVME", str(tmp_path))
    store = Nvme()
    yield store
    store.close()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize("unused", ["skip", "zero"])
def test_training_is_the_bits_of_all_experts_on_the_device(disk, unused):
    plain = build()
    reference = adam(plain)
    expected, idle = train(plain, reference, zeros=unused == "zero")
    assert idle > 20  # parameters of experts without tokens
    model = build()
    optimizer = adam(model)
    store = ExpertStore(experts_of(model), optimizer, slots=2, host=4, disk=disk, every=2, unused=unused)
    losses, _ = train(model, optimizer, between=lambda: store.prefetch([(0, e) for e in range(EXPERTS)], most=1))
    store.close()
    assert losses == expected
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
        ours, theirs = optimizer.state.get(a, {}), reference.state.get(b, {})
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert sum(len(state) > 0 for state in reference.state.values()) > 40


def test_no_more_bytes_are_held_than_slots(disk):
    """At no moment: weights in slots of the device; weights and two moments on the host."""
    model = build()
    optimizer = adam(model)
    size = sum(4 * p.numel() for p in model[0].experts[0].parameters())
    store = ExpertStore(experts_of(model), optimizer, slots=2, host=3, disk=disk)
    assert store.held == {"device": 0, "host": 0, "gradients": 0}
    assert sum(p.numel() for key, e in experts_of(model).items() for p in e.parameters()) == 0
    train(model, optimizer)
    assert store.peak["device"] == 2 * size
    assert store.peak["host"] == 3 * 3 * size
    read, written = store.disk_bytes
    assert read > 0
    assert written > 0
    store.close()


def test_without_a_disk_all_states_are_on_the_host():
    plain, model = build(), build()
    expected, _ = train(plain, adam(plain))
    optimizer = adam(model)
    store = ExpertStore(experts_of(model), optimizer, slots=1)
    assert train(model, optimizer)[0] == expected
    store.close()


def test_what_cannot_be_kept_elsewhere_is_refused():
    model = build()
    optimizer = adam(model)
    with pytest.raises(holdall.HoldallError, match="12 experts do not fit 3 places"):
        ExpertStore(experts_of(model), optimizer, slots=1, host=3)
    with pytest.raises(holdall.HoldallError, match="`unused` is 'both'"):
        ExpertStore(experts_of(model), optimizer, slots=1, unused="both")
    with pytest.raises(holdall.HoldallError, match="does not hold all of expert `1`"):
        ExpertStore({1: torch.nn.Linear(2, 2)}, optimizer, slots=1)
    with pytest.raises(holdall.HoldallError, match="draws random numbers"):
        ExpertStore({1: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1))}, optimizer, slots=1)


# the cache


def lru_hits(keys, slots):
    inside, hits = OrderedDict(), 0
    for key in keys:
        hits += key in inside
        inside.pop(key, None)
        inside[key] = None
        if len(inside) > slots:
            inside.popitem(last=False)
    return hits


def routed(seed, count=4000, keys=64, power=1.1, moves=False):
    """Experts by Zipf's law; `moves`: half way others become the popular ones."""
    draw = random.Random(seed)
    weights = [1 / (n + 1) ** power for n in range(keys)]
    first = draw.choices(range(keys), weights, k=count)
    return [(key + keys // 2) % keys if moves and at >= count // 2 else key for at, key in enumerate(first)]


def hits_of(cache, keys):
    for n, key in enumerate(keys):
        cache.use(key)
        if n % 20 == 19:
            cache.tick()
    return cache.hits


@pytest.mark.parametrize("slots", [4, 8, 16])
@pytest.mark.parametrize("seed", range(5))
def test_counts_hit_at_least_as_often_as_recency_under_zipf(seed, slots):
    keys = routed(seed)
    assert hits_of(FrequencyCache(slots, decay=0.5, every=50), keys) >= lru_hits(keys, slots)


def test_counts_that_fade_follow_a_popularity_that_moves():
    for seed in range(5):
        keys = routed(seed, moves=True)
        fading = hits_of(FrequencyCache(8, decay=0.5, every=10), keys)
        lasting = hits_of(FrequencyCache(8, decay=1.0), keys)
        assert fading > lasting


def test_those_below_the_threshold_leave_together():
    cache = FrequencyCache(3, threshold=2)
    for key in ("a", "a", "b", "c"):
        assert cache.use(key) == []
    assert cache.use("d") == ["b", "c"]
    assert cache.keys == ("a", "d")
    assert cache.admit("e") == []
    assert cache.by_use(["d", "a", "x"]) == ["a", "d", "x"]
    assert FrequencyCache(1).use("a") == []
    with pytest.raises(holdall.HoldallError, match="a cache of 0 places"):
        FrequencyCache(0)


# dense weights


def test_a_layers_dense_weights_travel_in_one_collective():
    """Fused: one gather and one reduction for each layer, however many parameters it has."""
    model = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(2)))
    asked = {"loss": lambda m, x: m(x).sum(), "mesh": {"dp": 2}, "shard": "zero2"}
    shards = holdall.trace(model, torch.randn(3, 2, 8), **asked).about.shards
    kinds = [one.kind for one in shards.collectives]
    assert shards.groups == ("0", "1")
    assert kinds.count("all_gather") == kinds.count("reduce_scatter") == 2
    assert len(list(model.parameters())) == 24


# simulated


def ticked(layers, ahead):
    """Second by second: a lane that is free begins its next task, if that may begin."""
    ends = {"gather": [], "fetch": [], "compute": []}
    now = 0
    while len(ends["compute"]) < len(layers):
        for lane, mine in ends.items():
            n = len(mine)
            if n == len(layers) or (mine and mine[-1] > now):
                continue
            before = n - 1 - ahead  # the layer whose place this one takes
            needs = [(k, n) for k in ("gather", "fetch")] if lane == "compute" else [("compute", before)] * (before >= 0)
            if all(len(ends[k]) > at and ends[k][at] <= now for k, at in needs):
                mine.append(now + getattr(layers[n], lane))
        now += 1
    return ends["compute"][-1]


def test_two_lanes_hide_what_one_does_not():
    draw = random.Random(0)
    for _ in range(50):
        layers = [SparseLayer(**{k: draw.randint(1, 9) for k in ("compute", "gather", "fetch")}) for _ in range(6)]
        serial = prefetched_seconds(layers, ahead=0, lanes=1)
        assert serial == sum(one.compute + one.gather + one.fetch for one in layers)
        one, two = (prefetched_seconds(layers, ahead=1, lanes=lanes) for lanes in (1, 2))
        assert two <= one <= serial
        assert two >= max(sum(getattr(x, k) for x in layers) for k in ("compute", "gather", "fetch"))
        deeper = [prefetched_seconds(layers, ahead=n) for n in (0, 1, 2, 3)]
        assert deeper == [ticked(layers, n) for n in (0, 1, 2, 3)]
        assert deeper == sorted(deeper, reverse=True)
    same = [SparseLayer(compute=5, gather=3, fetch=4)] * 10
    assert prefetched_seconds(same) == 4 + 10 * 5  # all but the first layer's weights come behind computation


def test_a_ring_of_slots_hides_loads_behind_computation():
    assert ring_seconds([2.0] * 5, [3.0] * 5, slots=1) == 25
    assert ring_seconds([3.0] * 5, [2.0] * 5, slots=2) == 2 + 5 * 3
    assert ring_seconds([2.0] * 5, [3.0] * 5, slots=2) == 5 * 3 + 2
    draw = random.Random(1)
    for _ in range(30):
        computes, loads = ([draw.random() for _ in range(8)] for _ in range(2))
        times = [ring_seconds(computes, loads, slots=k) for k in range(1, 10)]
        assert times == sorted(times, reverse=True)
        assert times[-2] == times[-1]  # as many slots as layers


def test_ranks_go_to_tasks_by_load():
    """As good as trying all, and never worse than as many for each."""
    draw = random.Random(2)
    for _ in range(20):
        loads = [draw.randint(1, 20) for _ in range(3)]
        worst = max(a / b for a, b in zip(loads, elastic_ranks(loads, 9), strict=True))
        splits = [s for s in itertools.product(range(1, 8), repeat=3) if sum(s) == 9]
        assert worst == min(max(a / b for a, b in zip(loads, s, strict=True)) for s in splits)
        assert worst <= max(loads) / 3
    assert elastic_ranks([4, 1, 1, 1, 1], 8) == (4, 1, 1, 1, 1)
