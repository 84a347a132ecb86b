"""What to keep inside a block that is run again op by op: the minimum cut against brute force, and the programs that follow."""

import copy
import itertools
import random

import pytest
import torch

import holdall
from holdall.actions.recompute import WHOLE
from holdall.actions.reschedule import Reschedule, effects, obstacle, region
from holdall.actions.reschedule.dag import Dag, replay
from holdall.actions.reschedule.min_cut import best_sets, made_again
from holdall.actions.reschedule.op_graph import op_graph, programs
from holdall.planning.menus import make_menus
from holdall.simulator import simulate
from holdall.testing.contracts import problem_for, traced, train
from holdall.testing.worlds import family, machine
from holdall.types.program import fault


def random_block(rng):
    """A forward of a few nodes, a middle, and one backward node that reads some of them."""
    n = rng.randint(3, 8)
    deps = [tuple(sorted(rng.sample(range(i), min(i, rng.randint(0, 2))))) for i in range(n)]
    needed = tuple(i for i in range(n) if rng.random() < 0.6) or (n - 1,)
    cost = [float(rng.randint(1, 9)) for _ in range(n)]
    size = [rng.randint(1, 9) for _ in range(n)]
    dag = Dag(cost=(*cost, 0.0, 1.0), size=(*size, 0, 0), deps=(*deps, (n - 1,), needed), fixed=frozenset((n, n + 1)))
    return dag, n, needed


def price(dag, needed, kept):
    return sum(dag.size[i] for i in kept), sum(dag.cost[i] for i in made_again(dag, needed, kept))


@pytest.mark.parametrize("seed", range(40))
def test_no_set_of_results_is_better_than_those_of_the_cut(seed):
    dag, n, needed = random_block(random.Random(seed))
    every = [price(dag, needed, kept) for size in range(n + 1) for kept in itertools.combinations(range(n), size)]
    found = [price(dag, needed, kept) for kept in best_sets(dag, n)]
    for size, seconds in found:
        assert not any(b <= size and t < seconds - 1e-9 for b, t in every)
    least, most = min(found), max(found)
    assert most[1] == 0.0 and least[1] == max(t for b, t in found)
    hull = min(t + 0.5 * b for b, t in every)
    assert min(t + 0.5 * b for b, t in found) == pytest.approx(hull) or len(found) == 12


def test_what_may_not_be_kept_is_not():
    dag, n, needed = random_block(random.Random(1))
    for kept in best_sets(dag, n, keepable=[0]):
        assert kept <= {0}
    assert needed


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "convnet"])
def test_programs_are_legal_and_trade_bytes_for_seconds(name):
    _, _, _, trace = traced(name)
    problem = problem_for(trace)
    block = max((b for b in trace.blocks if b.saves and not obstacle(trace, b)), key=lambda b: len(b.saves))
    ops, count = region(trace, block)
    graph = op_graph(trace, block)
    assert replay(graph.dag, graph.dag.once).seconds == pytest.approx(sum(op.seconds for op in ops))
    seconds = []
    for order in programs(trace, block):
        assert not fault(effects(ops), count, range(count), order)
        seconds.append(simulate(problem, [Reschedule.of(trace, block, order)]).recompute_seconds)
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 10 * seconds[-1] > 0


def test_half_of_the_bytes_cost_a_fraction_of_running_the_block_again():
    """A transformer's layer: norms, activation functions and dropout are cheap to run again, products are not."""
    _, _, _, trace = traced("tiny-gpt2")
    item = max(make_menus(problem_for(trace)), key=lambda i: max(c.freed for c in i.choices))
    whole = next(c for c in item.choices if c.choice == WHOLE)
    parts = [c for c in item.choices if c.choice.by_program and c.freed >= whole.freed // 2]
    assert min(c.seconds for c in parts) < 0.25 * whole.seconds


def test_auto_runs_ops_again_where_that_is_cheaper_and_the_bits_stay():
    model, batch = family("tied")
    batch = tuple(t.repeat(16, *[1] * (t.dim() - 1)) for t in batch)  # activations are what counts
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trace = holdall.trace(model, batch, optimizer=optimizer)
    plain = simulate(problem_for(trace), []).peak["cpu"]
    fixed = sum(t.nbytes for t in trace.tensors.values() if t.born < 0)
    plan = holdall.plan(trace, budget=fixed + (plain - fixed) * 70 // 100, hardware=machine(), allow=["recompute"])
    assert any(a.name == "reschedule" for a in plan.actions)
    reference = copy.deepcopy(model)
    expected = train(reference, batch, torch.optim.SGD(reference.parameters(), lr=1e-3), 2)
    with holdall.apply(plan, model, optimizer) as harness:
        got = train(model, batch, optimizer, 2)
    assert got == expected and harness.notes == []
    assert max(harness.step_peaks) == plan.predicted.peak["cpu"]
