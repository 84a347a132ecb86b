"""PatrickStar (Fang et al., TPDS 2023): states of tensors, eviction by next use, chunk sizes, and its plans in training."""

import random
from collections import OrderedDict
from dataclasses import replace

import pytest

import holdall
from holdall.errors import InvalidInput
from holdall.planners import patrickstar
from holdall.planners.patrickstar import EDGES, accepted_sizes, chunk_size, chunks_updated_here, room_at, steady_loads
from holdall.planning.chunk_tracer import streamed_units
from holdall.planning.chunks import ChunkStore, IllegalMove
from holdall.testing.oracles import fewest_loads, step_of_units
from holdall.testing.placed import measured_as_predicted, plain_peak, plan_family, run_beside_plain

FAMILIES = {"tied": 0.5, "tiny-gpt2": 0.45, "tiny-llama": 0.45, "convnet": 0.9}  # and a share of plain training's memory


def streamed(plan):
    return sum(w == "streamed" for a in plan.actions if a.name == "place" for _, w, _ in a.units)


# states of tensors


@pytest.mark.parametrize("seed", range(2))
def test_random_events_never_break_a_rule(seed):
    """Check (1) of the catalogue: 5,000 events a seed, legal and illegal ones."""
    rng = random.Random(seed)
    count, members = 6, 3
    store = ChunkStore(
        [10] * count, [n // members for n in range(count * members)], [[c, 20 + c] for c in range(count)], 40, EDGES
    )
    legal = refused = 0
    for _ in range(5000):
        tensor, to, now = rng.randrange(count * members), rng.choice(list(EDGES)), rng.randrange(40)
        before, computing = store.states[tensor], {n // members for n, s in enumerate(store.states) if s == "COMPUTE"}
        if to == "COMPUTE" and rng.random() < 0.8 and len(computing | {tensor // members}) <= 4:
            store.bring(tensor // members, now, 40)
            assert store.used <= 40
        can = to in EDGES[before] and (to != "COMPUTE" or tensor // members in store.here)
        if can:
            store.move(tensor, to)
            legal += 1
        else:
            with pytest.raises(IllegalMove):
                store.move(tensor, to)
            refused += 1
        assert store.states[tensor] == (to if can else before)
        assert all(n // members in store.here for n, s in enumerate(store.states) if s == "COMPUTE")
        assert store.used == 10 * len(store.here)
    assert legal > 500 and refused > 500


# eviction


def by_rule(accesses, blocks, rule):
    here, loads = OrderedDict(), 0
    for chunk in accesses:
        if chunk in here:
            if rule == "lru":
                here.move_to_end(chunk)
            continue
        loads += 1
        if len(here) == blocks:
            here.popitem(last=False)
        here[chunk] = True
    return loads


@pytest.mark.parametrize("seed", range(3))
def test_evicting_the_farthest_next_use_loads_the_fewest_chunks(seed):
    """Check (2): against all ways to evict, and against LRU and FIFO, on random strings of up to 12 chunks."""
    rng = random.Random(seed)
    better = 0
    for _ in range(12):
        count, blocks = rng.randint(2, 12), rng.randint(1, 5)
        accesses = [rng.randrange(count) for _ in range(18)]
        uses = [[t for t, c in enumerate(accesses) if c == chunk] for chunk in range(count)]
        store = ChunkStore([1] * count, list(range(count)), uses, len(accesses), EDGES)
        loads = sum(store.bring(chunk, now, blocks) for now, chunk in enumerate(accesses))
        assert loads == fewest_loads(accesses, blocks)
        others = [by_rule(accesses, blocks, rule) for rule in ("lru", "fifo")]
        assert loads <= min(others)
        better += loads < min(others)
    assert better


@pytest.mark.parametrize("count", [4, 7])
def test_a_step_that_repeats_loads_what_does_not_fit_twice(count):
    """With room for k of n equal chunks beside the one kept free, a step loads 2 (n - k), and n - k units are streamed."""
    layout = step_of_units([10] * count).layout(10)
    for blocks in range(1, count + 1):
        loads = steady_loads(layout, (blocks + 1) * 20)
        assert sum(loads) == 2 * (count - blocks)
        assert len(streamed_units(layout, loads)) == count - blocks


def test_chunks_leave_when_activations_rise_and_room_is_what_two_moments_leave():
    high = [0, 0, 60, 60, 0, 0]
    layout = step_of_units([10] * 3, high).layout(10)
    assert [room_at(layout, now, 100) for now in range(6)] == [80, 20, 20, 20, 80, 80]
    assert sum(steady_loads(layout, 100)) == 4  # one chunk at a time in the middle
    assert sum(steady_loads(layout, 140)) == 0


# sizes and states


@pytest.mark.parametrize("seed", range(4))
def test_the_size_leaves_the_least_room_of_all_that_are_accepted(seed):
    rng = random.Random(seed)
    sizes = [rng.randint(1, 40) for _ in range(rng.randint(3, 12))]
    traced = step_of_units(sizes)
    device, host = rng.randint(1000, 4000), rng.randint(10 * sum(sizes), 40 * sum(sizes))

    def unused(size):
        taken = [0]
        for s in sizes:
            if taken[-1] + s > size and taken[-1]:
                taken.append(0)
            taken[-1] += s
        return len(taken) * size - sum(sizes)

    step = max(1, max(sizes) // 16)
    every = [
        size
        for size in range(max(sizes), sum(sizes) + 1, step)
        if 0.08 * device >= 2 * size * 2 and 0.8 * host + 0.08 * device >= 14 * (sum(sizes) + unused(size))
    ]
    assert accepted_sizes(traced, device, host) == every
    best = min(every, key=lambda size: (unused(size), size)) if every else max(sizes)
    assert chunk_size(traced, device, host) == best


def test_chunks_have_at_most_128_mi_elements():
    assert accepted_sizes(step_of_units([16 << 20] * 10), 2**50, 2**50)[-1] == 128 << 20


def test_the_margin_holds_states_of_the_first_chunks():
    layout = step_of_units([10] * 6, 30).layout(10)
    per_chunk = 10 * (12 + 2)  # states, and gradients that stay
    for count in range(7):
        limit = 30 + 6 * 20 + count * per_chunk / 0.8
        assert chunks_updated_here(layout, int(limit) + 1) == count
        assert count == 0 or chunks_updated_here(layout, int(limit) - 2) == count - 1


# plans


@pytest.mark.parametrize("recompute", [False, True])
def test_a_looser_budget_never_moves_more(recompute):
    """Check (4): every plan fits, bytes never grow with the budget, and none move once everything fits."""
    moved, planned = [], 0
    for share in (0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        try:
            plan = plan_family("tied", "patrickstar", share, chunk=4096, recompute=recompute)
        except holdall.Infeasible:
            assert not moved
            continue
        assert plan.predicted.peak["cpu"] <= share * plain_peak("tied")
        moved.append(sum(plan.predicted.traffic.values()))
        planned += streamed(plan) > 0
    assert moved == sorted(moved, reverse=True) and planned
    assert recompute or moved[-1] == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_are_plain_trainings_bit_for_bit(name):
    """Weights and losses; peak and bytes on the link are the predicted ones."""
    plan = plan_family(name, "patrickstar", FAMILIES[name])
    assert any(a.name == "place" for a in plan.actions)
    same, harness = run_beside_plain(name, plan)
    assert same and measured_as_predicted(harness, within=0.01 * name.startswith("tiny")) and harness.notes == []


def test_late_copies_change_nothing():
    plan = plan_family("tied", "patrickstar", 0.5, prefetch=True)
    assert streamed(plan)
    same, _ = run_beside_plain("tied", plan, seed=3)
    assert same


def test_fit_takes_it_by_name():
    same, harness = run_beside_plain("tied", budget=int(0.5 * plain_peak("tied")), planner="patrickstar")
    assert same and harness.plan.planner == "patrickstar" and streamed(harness.plan)


def test_wrong_sizes_and_too_small_budgets_are_refused():
    with pytest.raises(InvalidInput, match="chunk"):
        plan_family("tied", "patrickstar", chunk=-1)
    with pytest.raises(holdall.Infeasible):
        plan_family("tied", "patrickstar", 0.05)


def test_a_unit_that_cannot_be_streamed_has_a_chunk_that_never_leaves():
    traced = replace(step_of_units([10, 10, 10]), fixed=frozenset({1}))
    layout = traced.layout(20)
    assert layout.chunks == ((0, 2), (1,)) and layout.elements == [20, 10]
    assert steady_loads(layout, 0)[1] == 0
    assert streamed_units(layout, steady_loads(layout, 0)) == {"u0", "u2"}
    assert patrickstar.states_of(layout) == [280, 140]
