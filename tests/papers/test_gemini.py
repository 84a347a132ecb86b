"""Gemini (ColossalAI, ICPP 2023): chunk sizes, edges between states, the static shares, the auto policy, and its plans."""

import random

import pytest

import holdall
from holdall.errors import InvalidInput
from holdall.planners.gemini import (
    EDGES,
    Gemini,
    chunk_size,
    chunks_in,
    sizes_to_try,
    steady_loads,
    with_next,
    without_outliers,
)
from holdall.planning.chunk_tracer import run_step, streamed_units, trace_states
from holdall.planning.chunks import ChunkStore, IllegalMove, pack, waste
from holdall.testing.contracts import problem_for
from holdall.testing.oracles import step_of_units
from holdall.testing.placed import measured_as_predicted, plain_peak, plan_family, run_beside_plain, trace_of

FAMILIES = {"tied": 0.45, "tiny-gpt2": 0.45, "tiny-llama": 0.45, "tiny-vit": 0.4}


def rows_of(plan):
    return [row for a in plan.actions if a.name == "place" for row in a.units]


# sizes


def unused(sizes, size):
    left = total = 0
    for s in sizes:
        if s > left:
            total, left = total + left, size
        left -= s
    return total + left


@pytest.mark.parametrize("seed", range(4))
def test_the_size_wastes_least_of_all(seed):
    """Check (1) of the catalogue: a scan over every size; the smallest of equals."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 60) for _ in range(rng.randint(4, 30))]
    smallest, interval = rng.randint(1, 80), rng.choice([1, 4, 16])
    tried = sizes_to_try(max(smallest, *sizes), sum(sizes), interval)
    best = min(unused(sizes, size) for size in tried)
    for size in range(max(sizes), sum(sizes) + 1):  # parameters that fill a chunk to the last element among them
        chunks = pack(sizes, size)
        assert waste(sizes, size) == unused(sizes, size) == len(chunks) * size - sum(sizes)
    found = chunk_size(sizes, smallest, sum(sizes), interval)
    if sum(sizes) < smallest:
        assert found == sum(sizes)
    else:
        assert unused(sizes, found) == best and found == next(s for s in tried if unused(sizes, s) == best)


def test_outliers_have_a_chunk_of_their_own():
    sizes = [10] * 20 + [500]
    assert without_outliers(sizes) == [10] * 20
    size = chunk_size(sizes, 10, 90, 10)
    assert size == 10  # nothing unused, and smaller than the outlier
    layout = step_of_units(sizes).layout(size)
    assert layout.elements == sizes and layout.chunks[-1] == (20,)


# states


def test_only_the_edges_of_the_table_are_legal():
    """Check (2): every pair of states."""
    states = list(EDGES)
    for before in states:
        for after in states:
            store = ChunkStore([1], [0], [[0]], 1, EDGES)
            store.bring(0, 0, 1)
            store.states[0] = before
            if after in EDGES[before]:
                store.move(0, after)
            else:
                with pytest.raises(IllegalMove):
                    store.move(0, after)
    assert "READY_FOR_REDUCE" not in EDGES["COMPUTE"] and "FREE" not in EDGES["HOLD_AFTER_BWD"]
    assert EDGES["READY_FOR_REDUCE"] == ("HOLD",)  # a gradient is reduced before the chunk is used again


# auto


class Watched(ChunkStore):
    """Looks at every eviction."""

    looked = 0

    def shrink(self, now, room):
        before = len(self.evicted)
        super().shrink(now, room)
        for _, out in self.evicted[before:]:
            assert all(self.next_use(out, now) >= self.next_use(kept, now) for kept in self.evictable())
            Watched.looked += len(self.evictable())


def test_a_chunk_that_is_needed_sooner_never_leaves_before_one_needed_later():
    """Check (4): at every eviction of random steps, none of those that could have left and stay is needed later."""
    rng = random.Random(0)
    for _ in range(30):
        count = rng.randint(3, 9)
        room = [rng.randint(20, 180) for _ in range(2 * count)]
        layout = step_of_units([10] * count).layout(10)
        uses = [[n, 2 * count - 1 - n] for n in range(count)]
        store = Watched(layout.nbytes, list(range(count)), uses, 2 * count, EDGES, wraps=False)
        for _ in range(2):
            run_step(store, layout, room.__getitem__, forward=("HOLD",), backward=("HOLD",))
    assert Watched.looked > 100


@pytest.mark.parametrize("blocks", range(1, 7))
def test_weights_take_nine_tenths_of_what_others_leave(blocks):
    layout = step_of_units([10] * 6, 15).layout(10)
    limit = -(-(15 + blocks * 20) * 10 // 9)
    loads, most = steady_loads(layout, limit)
    assert most <= 15 + blocks * 20 <= 0.9 * limit + 1
    assert len(streamed_units(layout, loads)) >= 6 - blocks
    assert blocks < 6 or not sum(loads)


def test_a_moment_has_room_for_the_next_one_too():
    assert with_next([3, 1, 5, 2, 4, 0]) == [3, 5, 5, 4, 4, 0]
    assert with_next([]) == []


def test_states_on_the_device_take_their_share_of_the_margin():
    layout = step_of_units([10] * 6).layout(10)
    assert [chunks_in(margin, layout) for margin in (0, 139, 140, 420, 10_000)] == [0, 0, 1, 3, 6]
    device = []
    for ratio in (0.0, 0.5, 1.0):
        plan = plan_family("tied", "gemini", 0.95, gpu_margin_mem_ratio=ratio)
        device.append(sum(update == "device" for _, _, update in rows_of(plan)))
    assert device[0] == 0 and device == sorted(device) and device[-1] > 0


# static

SHARES = [(0, 0), (0.5, 0), (1, 0), (1, 0.5), (1, 1)]


@pytest.mark.parametrize(("optim", "param"), SHARES)
def test_static_shares_are_kept_and_train_like_plain(optim, param):
    """Check (3): the valid ones of 0, 0.5 and 1; bytes that leave are within a chunk and the unit that it cuts."""
    plan = plan_family("tied", "gemini", 1.2, policy="static", offload_optim_frac=optim, offload_param_frac=param)
    trace = trace_of("tied")
    problem = problem_for(trace)
    layout = Gemini().layout(problem, trace_states(problem, ()))
    rows = rows_of(plan) or [(u.name, "resident", "device") for u in trace.units]
    total, most = sum(layout.elements), max(u.numel for u in trace.units) + layout.size
    away = sum(u.numel for u, row in zip(trace.units, rows, strict=True) if row[2] == "host")
    flows = sum(u.numel for u, row in zip(trace.units, rows, strict=True) if row[1] == "streamed")
    can = total - sum(layout.elements[c] for c in layout.pinned)
    assert abs(away - optim * total) <= most
    assert abs(flows - min(param * total, can)) <= most
    same, harness = run_beside_plain("tied", plan)
    assert same and measured_as_predicted(harness)


def test_shares_that_are_left_out_are_the_smallest_that_fit():
    """States leave before weights, and as little as the budget asks for."""
    found = []
    for share in (0.95, 0.8, 0.7, 0.6, 0.5):
        rows = rows_of(plan_family("tied", "gemini", share, policy="static", recompute=False))
        host, flows = sum(r[2] == "host" for r in rows), sum(r[1] == "streamed" for r in rows)
        assert not flows or host == len(rows)
        found.append((host, flows))
    assert found == sorted(found) and found[0][0] < found[-1][0] and found[-1][1]


# training


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_are_plain_trainings_bit_for_bit(name):
    plan = plan_family(name, "gemini", FAMILIES[name])
    assert rows_of(plan)
    same, harness = run_beside_plain(name, plan)
    assert same and measured_as_predicted(harness, within=0.01 * name.startswith("tiny")) and harness.notes == []


def test_late_copies_change_nothing():
    plan = plan_family("tied", "gemini", 0.62, max_prefetch=1, recompute=False)
    assert any(w == "streamed" for _, w, _ in rows_of(plan))
    same, _ = run_beside_plain("tied", plan, seed=5)
    assert same


def test_fit_takes_it_by_name():
    same, harness = run_beside_plain("tied", budget=int(0.45 * plain_peak("tied")), planner="gemini")
    assert same and harness.plan.planner == "gemini" and rows_of(harness.plan)


def test_wrong_options_are_refused():
    for options, word in (
        ({"policy": "cpu"}, "policy"),
        ({"offload_optim_frac": 1.5}, "offload_optim_frac"),
        ({"policy": "static", "offload_optim_frac": 0.5, "offload_param_frac": 0.5}, "states"),
        ({"interval": 0}, "interval"),
    ):
        with pytest.raises(InvalidInput, match=word):
            plan_family("tied", "gemini", **options)
    with pytest.raises(holdall.Infeasible):
        plan_family("tied", "gemini", 0.6, policy="static", offload_optim_frac=0.0, recompute=False)
