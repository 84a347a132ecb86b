"""Moccasin (Bartan et al., ICML 2023, PMLR 202:1826) on small graphs: retention intervals against Checkmate's program.

Reproduced: on the uniform chains U(L) it has Checkmate's optimum wherever `copies` runs per node are enough, and is infeasible
where they are not; with as many copies as stages it is Checkmate's program on any graph. The objective never grows with
copies or budget. Every program passes the replay within its budget. A random layered graph of 120 nodes is brought to nine
tenths of its peak in seconds. "Works when" 1 to 4; relations 1, 3, 4.
"""

import random
import sys
from dataclasses import replace
from math import inf

import pytest

from holdall.actions.reschedule.dag import Dag, fits, replay, uniform
from holdall.errors import InvalidInput, Unsupported
from holdall.planners.checkmate import ilp
from holdall.planners.moccasin.cp import solve
from holdall.planning.stages import Limits, greedy
from holdall.testing.oracles import shortest

pytest.importorskip("ortools")

# U(L) at budgets 3, 4, 5, 6 with 2, 3 and 4 runs per node; inf: not enough runs
TABLE = {
    4: {2: [9, 8, 8, 8], 3: [9, 8, 8, 8]},
    5: {2: [inf, 11, 10, 10], 3: [13, 11, 10, 10]},
    6: {2: [inf, 14, 13, 12], 3: [inf, 14, 13, 12], 4: [18, 14, 13, 12]},
}


def random_dag(seed, n):
    """With workspaces, nodes that run once and outputs that stay."""
    rng = random.Random(seed)
    deps = tuple(tuple(d for d in range(i) if d == i - 1 or rng.random() < 0.35) for i in range(n))
    cost, size = (tuple(rng.randint(1, top) for _ in range(n)) for top in (4, 3))
    extra = tuple(rng.choice((0, 0, 1, 3)) for _ in range(n))
    fixed, keep = (frozenset(i for i in range(n) if rng.random() < 0.2) for _ in range(2))
    return Dag(cost=cost, size=size, deps=deps, extra=extra, fixed=fixed, keep=keep)


def layered(n, width=6, seed=0):
    """Layers of nodes that read up to three of the layer before, sometimes one of long ago."""
    rng = random.Random(seed)
    deps = []
    for i in range(n):
        layer = i // width
        before = range((layer - 1) * width, layer * width) if layer else ()
        reads = set(rng.sample(before, rng.randint(1, 3))) if before else set()
        if layer > 2 and rng.random() < 0.15:
            reads.add(rng.randrange((layer - 1) * width))
        deps.append(tuple(sorted(reads)))
    cost, size = (tuple(rng.randint(1, 10) for _ in range(n)) for _ in range(2))
    return Dag(cost=cost, size=size, deps=tuple(deps))


def budgets(dag):
    return range(dag.floor, replay(dag, dag.once).peak + 1)


@pytest.mark.parametrize("layers", TABLE)
def test_uniform_chains_have_checkmates_optimum_where_the_copies_are_enough(layers):
    dag = uniform(layers)
    for copies, costs in TABLE[layers].items():
        for budget, cost in zip((3, 4, 5, 6), costs, strict=True):
            found = solve(dag, budget, copies=copies)
            assert (found.cost, found.status) == (cost, "infeasible" if cost == inf else "optimal")
            if found.program:
                assert cost == shortest(dag, budget).cost
                seen = replay(dag, found.program)
                assert seen.peak <= budget
                assert max(seen.executed) <= copies


@pytest.mark.parametrize(("seed", "budget", "cost"), [(4, 14, 20), (18, 9, 21)])
def test_bytes_are_counted_in_their_largest_common_part(seed, budget, cost):
    """Where the search finds less than the greedy start."""
    dag = random_dag(seed, 7)
    large = replace(dag, size=tuple(8 * s for s in dag.size), extra=tuple(8 * s for s in dag.extra))
    assert solve(dag, budget, copies=3).cost == solve(large, 8 * budget, copies=3).cost == cost


def test_with_enough_copies_it_is_checkmates_program():
    pytest.importorskip("scipy")
    solvable = 0
    for seed in range(12):
        dag, rng = random_dag(seed, 6), random.Random(seed)
        loss = rng.randrange(1, 5)
        rule = {} if seed % 2 else {"loss": loss, "saved_budget": rng.randint(dag.size[loss], sum(dag.size) // 2)}
        budget = rng.choice(budgets(dag))
        found, other = solve(dag, budget, copies=6, **rule), ilp.solve(dag, budget, **rule)
        assert (found.cost, found.status) == (other.cost, other.status), seed
        assert found.cost >= shortest(dag, budget, **rule).cost
        assert found.cost >= ilp.relax(dag, budget, **rule).bound - 1e-6
        if found.program:
            solvable += 1
            assert fits(dag, found.program, budget, **rule)
    assert 5 <= solvable < 12


@pytest.mark.parametrize("dag", [uniform(5), replace(random_dag(2, 7), fixed=frozenset())])
def test_more_copies_or_memory_never_cost_more(dag):
    rows = [[solve(dag, budget, copies=copies).cost for budget in budgets(dag)] for copies in (1, 2, 3)]
    for row in rows:
        assert row == sorted(row, reverse=True)
    for column in zip(*rows, strict=True):
        assert list(column) == sorted(column, reverse=True)
    assert rows[0] != rows[2], "more copies made no difference: the test shows nothing"


def test_a_layered_graph_of_120_nodes_is_within_nine_tenths_of_its_peak():
    dag = layered(120)
    peak = replay(dag, dag.once).peak
    found = solve(dag, int(0.9 * peak), time_limit=4)
    assert found.program is not None
    assert replay(dag, found.program).peak <= 0.9 * peak < peak
    assert sum(dag.cost) < found.cost < 1.2 * sum(dag.cost)
    assert found.bound <= found.cost


def test_the_first_phase_finds_what_single_steps_do_not():
    dag = layered(24, width=4)
    assert greedy(dag, Limits(budget=42)) is None
    found = solve(dag, 42)
    assert found.status == "optimal"
    assert replay(dag, found.program).peak <= 42 < replay(dag, dag.once).peak


@pytest.mark.parametrize(("seed", "budget"), [(2, 15), (9, 10), (11, 16)])
def test_the_search_is_as_good_as_checkmates_program_where_steps_are_not(seed, budget):
    pytest.importorskip("scipy")
    dag = random_dag(seed, 9)
    found, other = solve(dag, budget, copies=9), ilp.solve(dag, budget, gap=0.0)
    steps = greedy(dag, Limits(budget=budget))
    assert found.status == other.status == "optimal"
    assert found.cost == other.cost < (steps.seen.seconds if steps else inf)


def test_the_same_input_gives_the_same_program():
    dag = layered(30)
    budget = int(0.85 * replay(dag, dag.once).peak)
    one, two = (solve(dag, budget, seed=3) for _ in range(2))
    assert one.program == two.program
    assert one.status == "optimal"


def test_costs_that_are_no_whole_numbers():
    dag = uniform(5)
    small = replace(dag, cost=tuple(1.5e-6 for _ in dag.cost), size=tuple(4096 for _ in dag.size))
    found = solve(small, 4 * 4096 + 100)
    assert found.cost == pytest.approx(11 * 1.5e-6)
    assert found.bound == pytest.approx(found.cost, rel=1e-5)


def test_zero_copies_are_refused():
    with pytest.raises(InvalidInput, match="copies"):
        solve(uniform(4), 3, copies=0)


def test_without_ortools_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(Unsupported, match=r'pip install "holdall\[solvers\]"'):
        solve(uniform(4), 3)
