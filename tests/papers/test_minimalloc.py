"""MiniMalloc (ASPLOS 2023) and the greedy anchors beside it: TFLite's greedy by size, and best fit."""

import random

import pytest

from holdall.layouts.best_fit import BestFit
from holdall.layouts.greedy_by_size import GreedyBySize
from holdall.layouts.minimalloc import MiniMalloc
from holdall.packing.check import check_layout
from holdall.packing.exact import Exact, OutOfNodes
from holdall.testing.oracles import brute_force_height, random_lifetimes, training_lifetimes
from holdall.types.lifetimes import Lifetime, StepLifetimes


def test_the_five_buffers_of_its_example_reach_the_bound():
    spans = [(0, 3), (3, 9), (0, 9), (9, 21), (0, 21)]
    found = StepLifetimes(tuple(Lifetime(k, *span, 4) for k, span in enumerate(spans)), 21)
    for member in (MiniMalloc(), BestFit(), GreedyBySize()):
        assert member(found).reserved == found.load == 12
    assert MiniMalloc()(found).notes["proved"]


@pytest.mark.parametrize("wraps", [False, True])
def test_small_cases_have_the_height_of_brute_force(wraps):
    for seed in range(60):
        rng = random.Random(seed)
        found = random_lifetimes(rng, rng.randint(1, 7), period=8, most=4, wraps=wraps)
        layout = MiniMalloc()(found)
        assert layout.notes["proved"]
        assert layout.reserved == brute_force_height(found), seed


def height_by_cp_sat(found, time_limit):
    """The least height by a constraint solver that packs rectangles."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    top = sum(t.size for t in found.tensors)
    height = model.new_int_var(0, top, "height")
    times, places = [], []
    for n, t in enumerate(found.tensors):
        offset = model.new_int_var(0, top, f"offset{n}")
        model.add(offset + t.size <= height)
        for begin, end in t.spans(found.period):
            times.append(model.new_fixed_size_interval_var(begin, end - begin, f"time{n}"))
            places.append(model.new_fixed_size_interval_var(offset, t.size, f"place{n}"))
    model.add_no_overlap_2d(times, places)
    model.minimize(height)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = time_limit
    return int(solver.objective_value) if solver.solve(model) == cp_model.OPTIMAL else None


def test_cases_of_twelve_have_the_height_that_a_constraint_solver_finds():
    pytest.importorskip("ortools")
    decided = 0
    for seed in range(200):
        found = random_lifetimes(random.Random(seed), 12, period=8, most=6)
        layout = MiniMalloc()(found)
        expected = found.load if layout.reserved == found.load else height_by_cp_sat(found, 5.0)
        decided += expected is not None and bool(layout.notes["proved"])
        assert expected is None or not layout.notes["proved"] or layout.reserved == expected, seed
        assert layout.reserved <= min(BestFit()(found).reserved, GreedyBySize()(found).reserved)
    assert decided >= 195


def test_where_the_bound_cannot_be_reached_that_is_proved():
    rows = [(0, 6, 2), (1, 1, 2), (1, 1, 4), (2, 7, 4), (2, 2, 2), (4, 8, 4), (6, 1, 4), (7, 8, 4)]
    found = StepLifetimes(tuple(Lifetime(k, *row) for k, row in enumerate(rows)), 8)
    layout = MiniMalloc()(found)
    assert (found.load, layout.reserved, layout.notes["proved"]) == (20, 22, 1)
    pytest.importorskip("ortools")
    assert height_by_cp_sat(found, 10.0) == 22


def test_steps_with_recompute_are_solved_where_greedy_by_size_is_not_enough():
    greedy, exact = [], []
    for seed in range(4):
        found = training_lifetimes(random.Random(seed), 18, recompute=True)
        layout = MiniMalloc()(found)
        check_layout(found, layout)
        greedy.append(GreedyBySize()(found).reserved / found.load)
        exact.append(layout.reserved / found.load)
    assert max(exact) == 1.0 < max(greedy)


def test_a_search_without_nodes_left_says_that_nothing_is_proved():
    rows = [(0, 6, 2), (1, 1, 2), (1, 1, 4), (2, 7, 4), (2, 2, 2), (4, 8, 4), (6, 1, 4), (7, 8, 4)]
    found = StepLifetimes(tuple(Lifetime(k, *row) for k, row in enumerate(rows)), 8)
    layout = MiniMalloc(nodes=1)(found)
    check_layout(found, layout)
    exact = Exact(found, range(8))
    with pytest.raises(OutOfNodes):
        exact.within(21, exact.orders()[0], 3)


def test_more_tensors_than_are_searched_get_the_better_greedy_layout():
    found = training_lifetimes(random.Random(1), 18, recompute=True)
    layout = MiniMalloc(largest=10)(found)
    assert layout.reserved == min(BestFit()(found).reserved, GreedyBySize()(found).reserved)
    assert layout.notes["proved"] == (layout.reserved == found.load)
