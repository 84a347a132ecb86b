"""SwapAdvisor (Huang et al., ASPLOS 2020): its genetic operators, Belady's swaps, the makespan, and its plans."""

import math
import random
from collections import Counter
from itertools import pairwise

import pytest

import holdall
from holdall.actions.reschedule import Reschedule, region
from holdall.planners.nop import Nop
from holdall.planners.swapadvisor import Swapadvisor, SwapStep
from holdall.planners.swapadvisor.genetic import SlotMemory, SlotRoom, cross_orders, is_topological, mutate_order
from holdall.planners.swapadvisor.swaps import SwapIn, SwapNode, SwapPlan, makespan, plan_swaps
from holdall.planning.finish import finish
from holdall.testing.contracts import problem_for
from holdall.testing.oracles import fewest_loads
from holdall.testing.planned_runs import FAMILIES, check_fit, check_plan, enlarged_trace, planned, share_of
from holdall.testing.worlds import machine

# genomes


def random_dag(rng, n=15):
    return {k: frozenset(rng.sample(range(k), min(k, rng.randint(0, 3)))) for k in range(n)}


@pytest.mark.parametrize("seed", range(10))
def test_every_child_is_in_topological_order(seed):
    """Check (1): crossovers and mutations of random orders of random graphs."""
    rng = random.Random(seed)
    parents = random_dag(rng)
    population = [mutate_order(tuple(range(15)), parents, rng, 1.0) for _ in range(4)]
    assert len(set(population)) > 1
    for _ in range(40):
        child = mutate_order(cross_orders(*rng.sample(population, 2), rng), parents, rng, 0.3)
        assert is_topological(child, parents)
        population.append(child)
    order = population[-1]
    assert mutate_order(order, parents, rng, 0.0) == order
    assert not is_topological(order[::-1], parents) or not any(parents.values())


def test_a_child_has_the_first_nodes_of_one_parent_and_the_order_of_the_other():
    rng, first, second = random.Random(0), (0, 1, 2, 3, 4), (4, 3, 2, 1, 0)
    children = {cross_orders(first, second, rng) for _ in range(60)}
    assert children == {(*first[:n], *(x for x in second if x not in first[:n])) for n in range(6)}


@pytest.mark.parametrize("seed", range(10))
def test_memory_genomes_fit_and_give_every_class_in_use_a_slot(seed):
    rng = random.Random(seed)
    counts = {rng.randint(1, 100): rng.randint(1, 6) for _ in range(6)}
    room = max(counts) * len(counts) + rng.randint(0, 200)
    slots = SlotRoom(counts, room)
    memory = other = slots.start()
    for _ in range(40):
        memory, other = slots.mutate(slots.cross(memory, other, rng), rng, 0.4), memory
        assert slots.nbytes(memory) <= room
        used = Counter()
        for size, k in zip(slots.sizes, memory.classes, strict=True):
            used[k] += counts[size]
        assert all(1 <= memory.slots[k] <= count for k, count in used.items())
    assert slots.class_sizes(SlotMemory((0,) * len(counts), (1,) * len(counts)))[0] == max(counts)


@pytest.mark.parametrize(
    ("room", "slots"), [(59, (9, 5, 3)), (58, (9, 5, 2)), (48, (9, 5, 1)), (38, (9, 4, 1)), (30, (9, 2, 1)), (26, (8, 2, 1))]
)
def test_the_class_with_most_bytes_loses_slots_first(room, slots):
    """9 slots of 1 byte, 5 of 4 and 3 of 10: 9, 20 and 30 bytes; of classes with as many bytes, that of larger slots. The last
    slot of a class stays."""
    assert SlotRoom({10: 3, 4: 5, 1: 9}, room).repaired(SlotMemory((0, 1, 2), (9, 5, 3))).slots == slots


def test_a_class_without_slots_has_one_and_room_that_is_left_goes_to_the_first_classes():
    assert SlotRoom({10: 3, 4: 5, 1: 9}, 30).repaired(SlotMemory((0, 1, 2), (0, 1, 1))).slots == (9, 2, 1)
    assert SlotRoom({10: 3, 4: 5, 1: 9}, 44).repaired(SlotMemory((0, 2, 2), (99, 7, 2))).slots == (
        9,
        0,
        3,
    )  # none uses the second


# swaps


def accesses(rng, tensors, length):
    return [rng.randrange(tensors) for _ in range(length)]


def by_age(used):
    """LRU (`used`: by last use) or FIFO (by first)."""

    def victim(nodes):
        def choose(there, at):
            when = {x: [n for n, node in enumerate(nodes[:at]) if x in node.uses] for x in there}
            return min(there, key=lambda x: when[x][-1 if used else 0])

        return choose

    return victim


@pytest.mark.parametrize("seed", range(10))
def test_farthest_next_use_swaps_least(seed):
    """Check (2): never more than LRU or FIFO, and the least of all ways for up to 10 tensors."""
    rng = random.Random(seed)
    worse = 0
    for _ in range(10):
        tensors, slots = rng.randint(3, 10), rng.randint(1, 4)
        uses = accesses(rng, tensors, 30)
        nodes = [SwapNode((x,)) for x in uses]
        kind = dict.fromkeys(uses, 0)
        best = len(plan_swaps(nodes, kind, [slots]).swaps)
        others = [len(plan_swaps(nodes, kind, [slots], victim=by_age(used)(nodes)).swaps) for used in (True, False)]
        assert best <= min(others)
        worse += best < min(others)
        assert best == fewest_loads(uses, slots) - len(set(uses))
    assert worse


def test_an_operand_never_leaves_and_too_few_slots_are_refused():
    nodes = [SwapNode((0, 1)), SwapNode((1, 2)), SwapNode((0,))]
    plan = plan_swaps(nodes, dict.fromkeys(range(3), 0), [2])
    assert plan.swaps == (SwapIn(tensor=0, last=0, out=1, free=1, back=2),) and plan.copies == 1
    assert plan_swaps(nodes, dict.fromkeys(range(3), 0), [1]) is None
    assert plan_swaps(nodes, {0: 0, 1: 0, 2: 1}, [2, 1]).swaps == ()


def test_streams_serve_their_nodes_in_order_and_nodes_wait_for_their_copies():
    """Tensor 0 is out at 1 + 4 = 5, when node 1 may begin; its slot is free at 6, and it is back at 10."""
    nodes = [SwapNode((0, 1), 1.0), SwapNode((1, 2), 1.0), SwapNode((0,), 1.0)]
    plan = plan_swaps(nodes, dict.fromkeys(range(3), 0), [2])
    assert makespan(nodes, plan, {0: 8}, out=2.0, back=2.0) == 1 + 4 + 1 + 4 + 1
    assert makespan(nodes, SwapPlan((), 0), {}, out=2.0, back=2.0) == 3


@pytest.mark.parametrize("seed", range(5))
def test_a_step_takes_at_least_its_computation_and_its_copies(seed):
    """Check (3)."""
    rng = random.Random(seed)
    for _ in range(20):
        nodes = [SwapNode((x,), rng.random()) for x in accesses(rng, 8, 30)]
        sizes = {x: rng.randint(1, 9) for x in range(8)}
        plan = plan_swaps(nodes, dict.fromkeys(range(8), 0), [rng.randint(1, 4)])
        seconds = makespan(nodes, plan, sizes, out=7.0, back=5.0)
        compute, back = sum(node.seconds for node in nodes), sum(sizes[s.tensor] for s in plan.swaps)
        assert seconds >= max(compute, back / 5.0, sum(sizes[x] for x in {s.tensor for s in plan.swaps}) / 7.0) - 1e-9


# plans


def tight(name, rate, share=0.85):
    trace, hardware = enlarged_trace(name), machine(overlap=True, read=rate, write=rate)
    problem = problem_for(trace, budget=share_of(trace, share, hardware), overlap=True)
    return SwapStep(type(problem)(**{**vars(problem), "hardware": hardware}))


def test_the_best_genome_never_gets_worse_and_often_better():
    """Check (3): elitist selection, on a link that cannot hide the copies."""
    step = tight("tiny-resnet", 1e7)
    _, history = Swapadvisor(population=8, generations=8).search(step, step.room)
    assert len(history) == 9 and all(a >= b for a, b in pairwise(history))
    assert history[-1] < history[0] < math.inf


def test_orders_of_a_model_change_within_blocks_only_and_are_legal():
    step, rng = tight("tiny-gpt2", 1e8), random.Random(0)
    orders = {mutate_order(step.order, step.parents, rng, 0.5) for _ in range(10)}
    assert len(orders) == 10
    changed = 0
    for order in orders:
        assert is_topological(order, step.parents)
        for block in step.trace.blocks:
            part = order[block.first : block.last + 1]
            assert sorted(part) == list(range(block.first, block.last + 1)) and part[-1] == block.last
            changed += list(part) != sorted(part)
        for action in step._programs(order):
            action.check(step.trace)
        drawn = [op for op in order if step.trace.ops[op].random]
        assert drawn and drawn == sorted(drawn), "random numbers are drawn in the traced order"
    assert changed


def test_a_block_in_another_order_is_simulated_and_run_in_that_order():
    """The peak of a program whose order is changed is the run's, to the byte."""
    step = tight("tiny-llama", 1e8)
    block = next(b for b in step.trace.blocks if b.name.endswith("layers.1"))
    ops, count = region(step.trace, block)
    order = next(
        o
        for seed in range(20)
        if (o := mutate_order(step.order, step.parents, random.Random(seed), 0.8)) != step.order
        and [n for n in o if block.first <= n <= block.last] != list(range(block.first, block.last + 1))
    )
    mine = [n - block.first for n in order if block.first <= n <= block.last]
    action = Reschedule.of(step.trace, block, range(count, len(ops)), mine)
    plan = finish(Nop(), problem_for(step.trace), [action])
    check_plan("tiny-llama", plan)


@pytest.mark.parametrize(
    ("name", "mode"), [*((n, "plain") for n in FAMILIES), ("tiny-resnet", "chaos"), ("tiny-llama", "chaos")]
)
def test_real_models_train_to_the_same_bits_with_the_predicted_bytes(name, mode):
    """Check (4): peak and bytes of each link as predicted."""
    plan = planned(name, "swapadvisor", 0.8, rate=1e7 if name == "tiny-resnet" else 1e8, population=6, generations=4)
    assert plan.predicted.traffic and plan.count()["layer_swap"]
    check_plan(name, plan, mode=mode)


@pytest.mark.parametrize("name", ["tiny-resnet", "tiny-gpt2"])
def test_it_runs_through_fit(name):
    harness = check_fit(name, planned(name, "swapadvisor", 0.85, rate=1e7), "swapadvisor", rate=1e7)
    assert any(a.name == "reschedule" for a in harness.plan.actions), "ops run in another order"


def test_nothing_is_swapped_where_everything_fits():
    assert holdall.plan(enlarged_trace("tiny-gpt2"), planner="swapadvisor", hardware=machine(overlap=True)).actions == ()
