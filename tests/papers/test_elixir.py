"""Elixir (Huang et al. 2022): the cache, the search of chunk sizes, the test of cache against states, and its plans."""

import math
import random
from dataclasses import replace

import pytest

import holdall
from holdall.actions.place import Place
from holdall.errors import InvalidInput
from holdall.planners.elixir import Elixir, Worth, chunk_size, divide, moved, sizes_to_try, spare_loads, worth, worth_on
from holdall.planning.chunk_tracer import streamed_units, trace_states
from holdall.planning.chunks import misses
from holdall.problem import make_problem
from holdall.simulator import simulate
from holdall.testing.oracles import fewest_loads, step_of_units
from holdall.testing.placed import measured_as_predicted, plain_peak, plan_family, run_beside_plain, trace_of
from holdall.testing.worlds import machine

FAMILIES = {"tied": 0.6, "tiny-gpt2": 0.45, "tiny-llama": 0.45, "convnet": 0.9}


def rows_of(plan):
    return [row for a in plan.actions if a.name == "place" for row in a.units]


# the cache and the size of chunks


@pytest.mark.parametrize("seed", range(3))
def test_the_cache_loads_as_few_chunks_as_possible(seed):
    """Check (1) of the catalogue: against all ways to evict, up to 8 chunks, 4 blocks and 20 accesses."""
    rng = random.Random(seed)
    for _ in range(25):
        accesses = [rng.randrange(rng.randint(1, 8)) for _ in range(rng.randint(1, 20))]
        blocks = rng.randint(1, 4)
        assert sum(misses(accesses, blocks)) == fewest_loads(accesses, blocks)


@pytest.mark.parametrize("blocks", range(1, 7))
def test_forward_and_backward_load_all_but_the_last_chunks_twice(blocks):
    count = 6
    accesses = [*range(count), *reversed(range(count))]
    assert sum(misses(accesses, blocks)) == 2 * count - blocks
    layout = step_of_units([10] * count).layout(10)
    assert spare_loads(layout, set(), blocks) == [2] * (count - blocks) + [0] * blocks
    assert streamed_units(layout, spare_loads(layout, set(), blocks)) == {f"u{n}" for n in range(count - blocks)}


@pytest.mark.parametrize("seed", range(3))
def test_the_size_moves_the_fewest_elements_of_all(seed):
    """Check (2): every size of the range, each with the fewest loads that any rule reaches."""
    rng = random.Random(seed)
    sizes = [rng.randint(4, 20) for _ in range(rng.randint(3, 7))]
    traced, ahead = step_of_units(sizes), rng.choice([0, 2])
    elements = rng.randint(max(sizes), 4 * sum(sizes))

    def elements_moved(size):
        chunks, at = [[]], 0
        for n, s in enumerate(sizes):
            if at + s > size and chunks[-1]:
                chunks.append([])
                at = 0
            chunks[-1].append(n)
            at += s
        of = {n: c for c, members in enumerate(chunks) for n in members}
        order = [of[n] for n in (*range(len(sizes)), *reversed(range(len(sizes))))]
        blocks = min(max(1, elements // size - ahead), len(chunks))
        return 2 * fewest_loads(order, blocks) * size

    tried = sizes_to_try(max(sizes), len(sizes), 0)
    assert tried[0] == max(sizes) and tried[-1] >= 3 * max(sizes) - tried.step
    every = {size: elements_moved(size) for size in tried}
    assert {size: moved(traced, elements, size, ahead=ahead) for size in tried} == every
    found = chunk_size(traced, elements, smallest=0, ahead=ahead)
    assert found == min(every, key=lambda size: (every[size], size))


def test_sizes_double_from_the_smallest_until_the_largest_parameter_fits():
    assert sizes_to_try(100, 4, 30)[0] == 120
    assert sizes_to_try(10, 4, 30)[0] == 30
    assert len(sizes_to_try(1 << 26, 300, 1 << 24)) <= 2 + (1 << 17) // (2 * 512)


# the cache or states

FITS = {1: (0.1905, 0.0907), 2: (0.1074, 0.1177), 4: (0.0576, 0.1551), 8: (0.0299, 0.2148)}


@pytest.mark.parametrize("ranks", FITS)
def test_the_papers_fits_give_the_papers_order(ranks):
    """Check (3): one A100 node; the cache comes first on one GPU, states on more."""
    found = worth(
        up=16.3 * ranks + 8.7,
        down=15.8 * ranks + 2.3,
        host=1.66 * math.log(ranks) + 5.15,
        device=50 * ranks,
        ranks=ranks,
    )
    assert (found.cache, found.states) == pytest.approx(FITS[ranks], abs=6e-5)
    assert (found.cache > found.states) == (ranks == 1)
    assert divide(found, 1000, 10, 20, ahead=2).cache_first == (ranks == 1)


@pytest.mark.parametrize("seed", range(3))
def test_memory_is_divided_as_far_as_it_goes(seed):
    """Against all pairs of counts: the preferred one as high as possible, then the other."""
    rng = random.Random(seed)
    for _ in range(60):
        size, count, ahead = rng.randint(1, 9), rng.randint(1, 9), rng.choice([0, 2])
        elements = rng.randint(0, 10 * size * count)
        ratio = rng.choice([3, 7, 2.5])
        per_shard = math.ceil(ratio * size)
        most = min(max(0, elements // size - ahead), count)
        fitting = [(b, s) for b in range(most + 1) for s in range(count + 1) if b * size + s * per_shard <= elements]
        cache = divide(Worth(2, 1, ratio), elements, size, count, ahead=ahead)
        assert (cache.blocks, cache.shards) == max(fitting)
        base = min(most, 4 + ahead)
        states = divide(Worth(1, 2, ratio), elements, size, count, ahead=ahead)
        best = max(s for b, s in fitting if b == base)
        assert states.shards == best
        assert states.blocks == min(count, max(base, (elements - best * per_shard) // size))


def test_the_simulator_saves_what_the_formula_says():
    """On a machine where nothing overlaps, for one unit: the cache saves I and states J, without the bytes that need not move
    here: evicted weights are not written back, and an update on the host returns weights of 16 bits once."""
    hardware = replace(machine(read=2e9, write=1e9), updates=3e8, bandwidth=1e13, overhead=0.0)
    problem = make_problem(trace_of("tied", "bf16"), hardware=hardware)
    traced = trace_states(problem, ())
    unit = next(u for n, u in enumerate(traced.units) if n not in traced.fixed)
    found = worth_on(problem, traced)
    assert traced.width == 2 and found.ratio == pytest.approx(7, rel=0.02)

    def seconds(weights, update):
        rows = {u.name: ("resident", "host") for u in problem.trace.units} | {unit.name: (weights, update)}
        return simulate(problem, [Place.of(problem.trace, rows, overlap=False)]).seconds

    up, down = 2 / 2.0, 2 / 1.0  # seconds for 1e9 elements
    saved = (seconds("streamed", "host") - seconds("resident", "host")) / unit.numel * 1e9
    assert saved == pytest.approx(found.cache - down, rel=0.04)  # tensors are aligned
    states = (seconds("streamed", "host") - seconds("resident", "device")) / unit.numel * 1e9
    paper = found.ratio * found.states
    assert states == pytest.approx(paper - (4 / 2.0 + up + 2 * down) + 2 * up + down, rel=0.04)


# plans


def test_bytes_from_the_host_are_what_the_cache_loads():
    """Every layer is a chunk here; the simulated bytes are those of the loads of the cache, and of new weights that stay."""
    trace, seen = trace_of("tied"), set()
    sizes = {u.name: sum(trace.tensors[x].nbytes for x in u.weights) for u in trace.units}
    for share in (0.6, 0.65, 0.7, 0.75):
        plan = plan_family("tied", "elixir", share, chunk=8416, activations=1.0, usable=1.0, recompute=False)
        rows = rows_of(plan)
        layers = [name for name, _, _ in rows if name.startswith("layers")]
        cached = [name for name, w, _ in rows if name in layers and w == "resident"]
        loads = sum(misses([*range(len(layers)), *reversed(range(len(layers)))], max(1, len(cached))))
        expected = loads * sizes[layers[0]] + sum(sizes[name] for name, _, _ in rows if name not in layers)
        if cached:
            assert plan.predicted.traffic["far->cpu"] == pytest.approx(expected, rel=0.02)
            seen.add(len(cached))
    assert len(seen) > 1


def test_capacity_is_what_the_paper_leaves():
    problem = make_problem(trace_of("tied"), hardware=machine(overlap=True))
    traced = trace_states(problem, ())
    limit = 4 * traced.most_others
    own = sum(size for unit, size in traced.params if unit in traced.fixed)
    largest = max(u.numel for u in traced.units)
    expected = 0.95 * (limit - 1.25 * traced.most_others) / 4 - own - largest
    assert Elixir().capacity(problem, traced, limit) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_are_plain_trainings_bit_for_bit(name):
    plan = plan_family(name, "elixir", FAMILIES[name])
    assert rows_of(plan)
    same, harness = run_beside_plain(name, plan)
    assert same and measured_as_predicted(harness, within=0.01 * name.startswith("tiny")) and harness.notes == []


def test_late_copies_change_nothing():
    plan = plan_family("tied", "elixir", 0.6)
    assert any(w == "streamed" for _, w, _ in rows_of(plan))
    same, _ = run_beside_plain("tied", plan, seed=7)
    assert same


def test_fit_takes_it_by_name():
    same, harness = run_beside_plain("tied", budget=int(0.6 * plain_peak("tied")), planner="elixir")
    assert same and harness.plan.planner == "elixir" and rows_of(harness.plan)


def test_wrong_options_are_refused():
    for options, word in (({"usable": 0}, "usable"), ({"activations": 0.5}, "activations"), ({"chunk": -1}, "chunk")):
        with pytest.raises(InvalidInput, match=word):
            plan_family("tied", "elixir", **options)
    with pytest.raises(holdall.Infeasible):
        plan_family("tied", "elixir", 0.05)
