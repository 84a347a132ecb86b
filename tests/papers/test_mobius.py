"""Mobius: its times against the paper's constraints and another schedule, its cuts against trying all. Simulated."""

import itertools
import random

import pytest

from holdall.errors import Infeasible, InvalidInput
from holdall.pipelines import PipeCosts, pipeline, simulate
from holdall.pipelines.swapping.hosted import HostedGpus, HostedLayer
from holdall.pipelines.swapping.mobius import contention, cross_map, plan_mobius, simulate_mobius

FREE = float("inf")


def layers(count, drawn=None):
    if drawn is None:
        return [HostedLayer(weights=100, forward=1.0, backward=2.0, input=4, inside=10) for _ in range(count)]
    return [
        HostedLayer(
            weights=drawn.randint(20, 200), forward=drawn.uniform(0.2, 2), backward=drawn.uniform(0.2, 4), input=2, inside=5
        )
        for _ in range(count)
    ]


def gpus(count=2, memory=10**6, host=50.0, peer=FREE):
    return HostedGpus(count=count, memory=memory, host=host, peer=peer)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_with_a_free_host_it_is_the_breadth_first_schedule(count, chunks):
    """Whose backward is as long as ours with the forward again."""
    stages = count * chunks
    found = simulate_mobius(layers(stages), range(stages + 1), gpus(count, host=FREE), samples=1, micro_batches=4)
    made = pipeline(f"breadth_first:chunks={chunks}", ranks=count, micro_batches=4)
    assert found.seconds == pytest.approx(simulate(made, PipeCosts.even(stages, forward=1.0, input=1.0, weight=2.0)).makespan)


def by_the_program(own, bounds, machine, micro_batches):
    """The least end of the last backward under the paper's constraints, by linear programming: starts and prefetched bytes."""
    optimize = pytest.importorskip("scipy.optimize")
    stages = [own[a:b] for a, b in itertools.pairwise(bounds)]
    S, N, M = len(stages), machine.count, micro_batches
    weights = [sum(x.weights for x in stage) for stage in stages]
    size = {
        "f": [sum(x.weights + x.inside for x in stage) for stage in stages],
        "b": [sum(2 * x.weights + x.inside for x in stage) for stage in stages],
    }
    f = [sum(x.forward for x in stage) for stage in stages]
    seconds = {"f": f, "b": [a + sum(x.backward for x in stage) for a, stage in zip(f, stages, strict=True)]}
    names = [("t", way, j, m) for way in "fb" for j in range(S) for m in range(M)]
    names += [("p", way, j) for way in "fb" for j in range(S)] + ["end"]
    index = {name: i for i, name in enumerate(names)}
    rows, limits = [], []

    def at_most(terms, limit):  # sum of coefficient x variable <= limit
        row = [0.0] * len(names)
        for coefficient, name in terms:
            row[index[name]] += coefficient
        rows.append(row)
        limits.append(limit)

    def after(later, earlier, gap):
        at_most([(1, earlier), (-1, later)], -gap)

    first = {"f": 0, "b": M - 1}
    last = {"f": M - 1, "b": 0}
    for j in range(S):
        for m in range(M):
            at_most([(1, ("t", "b", j, m)), (-1, "end")], -seconds["b"][j])
            if j:
                sent = stages[j][0].input / machine.peer
                after(("t", "f", j, m), ("t", "f", j - 1, m), seconds["f"][j - 1] + sent)
                after(("t", "b", j - 1, m), ("t", "b", j, m), seconds["b"][j] + sent)
            if m:
                after(("t", "f", j, m), ("t", "f", j, m - 1), seconds["f"][j])
                after(("t", "b", j, m - 1), ("t", "b", j, m), seconds["b"][j])
    for gpu in range(N):
        mine = list(range(gpu, S, N))
        order = [("f", j) for j in mine] + [("b", j) for j in reversed(mine)]
        at_most([(-1, ("t", "f", mine[0], 0))], -weights[mine[0]] / machine.host)
        for (way, i), (then, j) in itertools.pairwise(order):
            end, start = ("t", way, i, last[way]), ("t", then, j, first[then])
            if i == j:
                after(start, end, seconds[way][i])
                continue
            p = ("p", then, j)
            at_most([(1, p)], min(weights[j], machine.memory - size[way][i]))
            at_most([(1, p), (-machine.host, end), (machine.host, ("t", way, i, first[way]))], machine.host * seconds[way][i])
            at_most([(1, end), (-1, start), (-1 / machine.host, p)], -seconds[way][i] - weights[j] / machine.host)
    cost = [0.0] * len(names)
    cost[index["end"]] = 1.0
    return optimize.linprog(cost, A_ub=rows, b_ub=limits, bounds=[(0, None)] * len(names)).fun


def test_the_cut_is_the_best_of_the_papers_program():
    """Four to six layers on two GPUs: the simulated step of every cut is the program's optimum, and the plan is their least."""
    drawn = random.Random(0)
    for count in (4, 5, 6):
        own = layers(count, drawn)
        machine = gpus(2, memory=drawn.randint(800, 1200), host=drawn.uniform(20, 200), peer=100.0)
        found = []
        for stages in range(2, 5):
            for inner in itertools.combinations(range(1, count), stages - 1):
                bounds = (0, *inner, count)
                if max(sum(2 * x.weights + x.inside for x in own[a:b]) for a, b in itertools.pairwise(bounds)) > machine.memory:
                    continue
                simulated = simulate_mobius(own, bounds, machine, samples=1, micro_batches=3).seconds
                assert simulated == pytest.approx(by_the_program(own, bounds, machine, 3), rel=1e-6)
                found.append(simulated)
        assert len(found) > 3
        plan = plan_mobius(own, machine, samples=1, micro_batches=3)
        assert plan.is_best
        assert plan.seconds <= min(found) + 1e-9
        assert plan.stages > 4 or plan.seconds == pytest.approx(min(found))


def test_the_plan_is_the_best_of_all_cuts():
    drawn = random.Random(1)
    for _ in range(3):
        own, machine = layers(7, drawn), gpus(2, memory=900, host=drawn.uniform(20, 200))
        tried = []
        for stages in range(2, 8):
            for inner in itertools.combinations(range(1, 7), stages - 1):
                try:
                    tried.append(simulate_mobius(own, (0, *inner, 7), machine, samples=1, micro_batches=4).seconds)
                except Infeasible:
                    continue
        assert plan_mobius(own, machine, samples=1, micro_batches=4).seconds == min(tried)


def test_many_layers_are_cut_in_balance():
    plan = plan_mobius(layers(24), gpus(4, memory=900), samples=1, micro_batches=4)
    assert not plan.is_best
    assert plan.stages >= 24 * 210 / 900
    with pytest.raises(Infeasible) as error:
        plan_mobius(layers(8), gpus(2, memory=200), samples=1, micro_batches=2)
    assert error.value.smallest == 210
    with pytest.raises(InvalidInput):
        plan_mobius(layers(3), gpus(4), samples=1, micro_batches=2)
    with pytest.raises(InvalidInput):
        simulate_mobius(layers(4), (0, 2, 2, 4), gpus(2), samples=1, micro_batches=2)


def test_weights_hide_behind_the_stage_before_if_there_is_room():
    """A stage takes 2 seconds to come and 4 or more to compute; the first one of each GPU is waited for."""
    free = simulate_mobius(layers(8), range(9), gpus(2, host=FREE), samples=1, micro_batches=4).seconds
    beside = simulate_mobius(layers(8), range(9), gpus(2, memory=310), samples=1, micro_batches=4).seconds
    apart = simulate_mobius(layers(8), range(9), gpus(2, memory=210), samples=1, micro_batches=4).seconds
    assert beside == pytest.approx(free + 2)
    assert apart > beside


def test_bytes_are_those_of_one_copy_of_the_model():
    """Weights twice but for the last stage of each GPU, gradients once, and what crosses stages; sharded data parallelism with
    states on the host brings all weights to every GPU for the forward and again for the backward."""
    for count in (2, 4):
        own = layers(16)
        found = simulate_mobius(own, range(17), gpus(count), samples=1, micro_batches=8)
        model = 16 * 100
        assert found.weights_in == 2 * model - count * 100
        assert found.gradients_out == model
        assert found.exchanged == 2 * 8 * 15 * 4
        whole = found.weights_in + found.gradients_out + found.exchanged
        assert 2 * model < whole - found.exchanged <= 3 * model
        assert whole < count * 2 * model + model


def test_neighbours_are_under_different_roots():
    order = cross_map(8, [0, 0, 1, 1])
    assert [[0, 0, 1, 1][gpu] for gpu in order] in ([0, 1, 0, 1], [1, 0, 1, 0])
    for roots in ([0, 0, 1, 1], [0, 1, 1, 2], [0, 0, 0, 1]):
        least = min(contention(7, order, roots) for order in itertools.permutations(range(4)))
        assert contention(7, cross_map(7, roots), roots) == least
    assert contention(4, (0, 1, 2, 3), [0, 1, 2, 3]) == 0
    assert contention(3, (0, 1), [0, 0]) == 2 / 1 + 2 / 1  # stages 0 and 1, 1 and 2; 0 and 2 are on one GPU
