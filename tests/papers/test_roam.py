"""ROAM (arXiv 2310.19295): ops in an order with a low peak, and offsets for it."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch

import holdall
from holdall.layouts.best_fit import BestFit
from holdall.layouts.roam import Roam
from holdall.machine.presets import gpu
from holdall.packing.check import check_layout
from holdall.packing.ordering import OpsToOrder, TensorStay, best_order, peak_of
from holdall.packing.ties import Ties
from holdall.planning.finish import with_traced
from holdall.simulator import check
from holdall.simulator.lifetimes import PlannedStep
from holdall.testing.worlds import family
from holdall.types import Copy, Drop, Problem, Run, Wait


def graph_of(edges, count, rng):
    """Ops that each make one tensor, read by those that follow it; the last ones' stay."""
    before = [frozenset(a for a, b in edges if b == n) for n in range(count)]
    stays = [TensorStay(rng.randint(1, 30), n, frozenset(b for a, b in edges if a == n)) for n in range(count)]
    return OpsToOrder(before, [rng.choice((0, 0, rng.randint(1, 20))) for _ in range(count)], stays)


def series_parallel(rng, most=12):
    """Ops in a row; between two of them several branches, side by side."""
    edges, ends, count = [], [0], 1
    while True:
        branches = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
        if count + sum(branches) + 1 > most:
            return graph_of(edges, count, rng)
        tails = []
        for length in branches:
            edges.append((ends[0], count))
            edges += [(n, n + 1) for n in range(count, count + length - 1)]
            count += length
            tails.append(count - 1)
        edges += [(tail, count) for tail in tails]
        ends, count = [count], count + 1


def anything(rng, count):
    edges = [(a, b) for b in range(count) for a in range(b) if rng.random() < 0.3]
    return graph_of(edges, count, rng)


def least_peak(ops):
    """By looking at every set of finished ops; shares no code with the search."""

    def live(done):
        made = [s for s in ops.stays if s.maker in done]
        return sum(s.size for s in made if not s.after or not s.after <= done)

    @cache
    def least(done):
        if len(done) == len(ops):
            return 0
        ready = [op for op in range(len(ops)) if op not in done and ops.before[op] <= done]
        makes = [sum(s.size for s in ops.stays if s.maker == op) for op in ready]
        return min(
            max(live(done) + made + ops.workspace[op], least(done | {op})) for op, made in zip(ready, makes, strict=True)
        )

    return least(frozenset())


def is_legal(ops, order):
    place = {op: n for n, op in enumerate(order)}
    return sorted(order) == list(range(len(ops))) and all(place[a] < place[b] for b in place for a in ops.before[b])


@pytest.mark.parametrize("seed", range(40))
def test_the_segments_best_orders_are_the_best_order_of_all(seed):
    ops = series_parallel(random.Random(seed))
    order = best_order(ops)
    assert is_legal(ops, order)
    assert peak_of(ops, order) == least_peak(ops)
    cuts = [segment for segment in ops.segments() if len(segment) == 1]
    assert len(cuts) >= 2 or len(ops) == 1  # the first and the last at least


def test_an_op_is_a_cut_only_if_all_later_ones_need_it():
    before = [(), (0,), (0,), (1, 2), (3,)]  # 1 needs all before it, but 2 may come first
    ops = OpsToOrder([frozenset(b) for b in before], [0] * 5, [])
    assert ops.segments() == [[0], [1, 2], [3], [4]]


def test_readers_and_changes_of_a_tensor_keep_their_order():
    step = planned("convnet")
    schedule = step.schedule
    x = next(x for x, t in schedule.trace.tensors.items() if t.born < 0)
    runs = [
        Run(op=-1, reads=(x,), writes=()),
        Run(op=-1, reads=(x,), writes=()),
        Run(op=-1, reads=(), writes=(), mutates=(x,)),
        Run(op=-1, reads=(x,), writes=()),
        Run(op=-1, reads=(), writes=(), mutates=(x,)),
        Drop(tensor=x, tier=schedule.home),
        Copy(tensors=(x,), src="cpu", dst=schedule.home),
        Wait(tensors=(x,)),
        Run(op=-1, reads=(x,), writes=()),
    ]
    ties = Ties(replace(step, steps=runs))
    reached = [set() for _ in ties.nodes]  # the ops that come before each, in any order
    for op, before in enumerate(ties.ops().before):
        reached[op] = set(before).union(*(reached[other] for other in before))
    assert reached[:4] == [set(), set(), {0, 1}, {0, 1, 2}]
    assert reached[4:] == [{0, 1, 2, 3}, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4, 5}, {0, 1, 2, 3, 4, 5, 6}]
    assert ties.drops == [(runs[5], frozenset({0, 1, 2, 3, 4}))]


@pytest.mark.parametrize("seed", range(10))
def test_any_graph_has_a_legal_order_that_is_not_worse(seed):
    ops = anything(random.Random(seed), 40)
    order = best_order(ops)
    assert is_legal(ops, order)
    assert peak_of(ops, order) <= peak_of(ops, range(len(ops)))


def planned(name, planner="nop", **options):
    model, batch = family(name)
    optimizer = torch.optim.Adam(model.parameters(), **options)
    trace = holdall.trace(model, batch, optimizer=optimizer, device="cuda")
    hardware = gpu("rtx-4090")
    made = holdall.plan(trace, planner=planner, hardware=hardware)
    problem = Problem(trace=trace, hardware=hardware, budget={})
    return PlannedStep.of(problem, with_traced(problem, made.actions))


@pytest.mark.parametrize(("name", "planner"), [("convnet", "nop"), ("convnet", "chen"), ("tied", "nop")])
def test_a_planned_step_in_the_new_order_is_legal_and_laid_out_within_a_percent(name, planner):
    step = planned(name, planner)
    found = Roam().reorder(step)
    lifetimes, outcome = found.run()
    schedule = step.schedule
    naive = check(found.steps, {**schedule.trace.tensors, **schedule.added}, schedule.home, schedule.start)
    assert naive == outcome.peak
    assert outcome.peak["gpu"] <= step.run()[1].peak["gpu"]
    layout = Roam()(lifetimes)
    check_layout(lifetimes, layout)
    assert layout.reserved <= min(1.01 * lifetimes.load, BestFit()(lifetimes).reserved)


def adam_step(rng, layers):
    """A backward chain with a gradient per layer, an update for each that needs temporaries, and activations that wait. The
    first layers have large weights and small activations, as embeddings do."""
    before, workspace, stays, updates = [], [], [], set()
    is_wide = [n < layers // 2 for n in range(layers)]
    weights = [rng.randint(60, 120) if wide else rng.randint(5, 15) for wide in is_wide]
    for n in range(layers):  # forward
        before.append(frozenset({n - 1} if n else ()))
        workspace.append(0)
        stays.append(TensorStay(rng.randint(2, 8) if is_wide[n] else rng.randint(30, 50), n, frozenset({2 * layers - 1 - n})))
    for k, n in enumerate(reversed(range(layers)), start=layers):  # backward
        before.append(frozenset({k - 1}))
        workspace.append(rng.randint(0, 5))
        stays.append(TensorStay(weights[n], k, frozenset({k + layers})))
    for k in range(2 * layers, 3 * layers):  # updates, in the end unless they are moved
        before.append(frozenset({k - layers}))
        n = 3 * layers - 1 - k
        workspace.append(weights[n] // 10 if is_wide[n] else 8 * weights[n])
        updates.add(k)
        stays.append(TensorStay(0, k, frozenset()))
    return OpsToOrder(before, workspace, stays), frozenset(updates)


def early(ops, updates):
    layers = len(updates)
    order = list(range(layers))
    for k in range(layers, 2 * layers):
        order += [k, k + layers]
    return order


@pytest.mark.parametrize("seed", range(20))
def test_updates_that_may_move_need_no_more_than_all_early_or_all_late(seed):
    ops, updates = adam_step(random.Random(seed), 9)
    order = best_order(ops, updates)
    assert is_legal(ops, order) and is_legal(ops, early(ops, updates))
    assert peak_of(ops, order) <= min(peak_of(ops, early(ops, updates)), peak_of(ops, range(len(ops))))


def test_some_steps_are_better_with_some_updates_early_and_some_late():
    gains = 0
    for seed in range(20):
        ops, updates = adam_step(random.Random(seed), 9)
        gains += peak_of(ops, best_order(ops, updates)) < min(peak_of(ops, early(ops, updates)), peak_of(ops, range(len(ops))))
    assert gains > 0


def test_random_ops_keep_their_order():
    step = planned("twice")
    ops = step.schedule.trace.ops

    def drawn(steps):
        return [s.op for s in steps if isinstance(s, Run) and s.op >= 0 and ops[s.op].random]

    assert len(drawn(step.steps)) > 1
    assert drawn(Roam().reorder(step).steps) == drawn(step.steps)
