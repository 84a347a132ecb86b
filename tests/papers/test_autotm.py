"""AutoTM, "AutoTM: Automatic Tensor Movement in Heterogeneous Memory Systems using Integer Linear Programming" (ASPLOS 2020).

First the program on numbers, against enumeration; then our blocks, simulated and run.
"""

import itertools
import random
from dataclasses import replace

import pytest
import torch

import holdall
from holdall import models
from holdall.errors import Infeasible, InvalidInput
from holdall.machine.presets import gpu
from holdall.planners.autotm import Autotm, graph_of, lowered
from holdall.planners.autotm.flows import MODES, FlowAnswer, FlowMove, FlowStep, Movable, optimum
from holdall.planning.finish import finish
from holdall.simulator import simulate
from holdall.testing.chaos import chaos
from holdall.testing.contracts import problem_for, traced
from holdall.testing.placed import check_fit, check_under, plain_peak, trace_of
from holdall.testing.worlds import chain, layered, machine
from holdall.types import Problem
from holdall.units import GiB, MiB

pytest.importorskip("scipy", reason="the program needs a solver")

INF = float("inf")
CONVNETS = ("tiny-vgg", "tiny-resnet", "convnet")
TRANSFORMERS = ("tiny-bert-plain", "tiny-gpt2", "tiny-llama")  # model states decide about their peaks


def random_step(rng, *, tensors=3, nodes=7, users=3):
    found = []
    for _ in range(tensors):
        used = sorted(rng.sample(range(nodes), rng.randint(2, users)))
        found.append(Movable(size=rng.randint(1, 9), users=tuple(used)))
    live = [sum(t.size for t in found if t.users[0] <= k <= t.users[-1]) for k in range(nodes)]
    needed = [sum(t.size for t in found if k in t.users) for k in range(nodes)]
    share = rng.choice((0.2, 0.5, 0.8))
    limit = max(max(needed), share * max(live)) if rng.random() < 0.9 else 0.9 * max(needed)
    return FlowStep(
        seconds=[rng.randint(1, 5) for _ in range(nodes)],
        limits=[limit] * nodes,
        tensors=found,
        write=rng.choice((1, 3)),
        read=2,
    )


# enumeration: for every gap between two uses a tensor stays, or is away from after node `out` until node `back`


def ways_of(tensor, mode, radius):
    """(nodes at which it is on the device, seconds alone, seconds beside each node) for every way to treat a tensor."""
    gaps = list(itertools.pairwise(tensor.users))
    everywhere = set(range(tensor.users[0], tensor.users[-1] + 1))
    near = {k for k in everywhere if min(abs(k - u) for u in tensor.users) <= radius} if mode == "asynchronous" else set()
    choices = []
    for first, last in gaps:
        inside = [k for k in range(first + 1, last) if k in near]
        pairs = [(out, back) for out in (first, *inside) for back in (*inside, last) if out < back]
        choices.append([None, *([] if mode == "static" else pairs)])
    for taken in itertools.product(*choices):
        there, alone, beside, written = set(everywhere), 0, {}, False
        for (first, last), pair in zip(gaps, taken, strict=True):
            if pair is None:
                continue
            out, back = pair
            there -= set(range(out + 1, back))
            for node, user, rate, free in ((out, first, "write", written), (back, last, "read", False)):
                if not free and node == user:
                    alone += 1 if rate == "write" else 1j
                elif not free:
                    beside[node] = beside.get(node, 0) + (1 if rate == "write" else 1j)
            written = True
        yield there, alone, beside


def enumerated(step, mode, radius):
    best = INF
    for chosen in itertools.product(*(list(ways_of(t, mode, radius)) for t in step.tensors)):
        used = [sum(t.size for t, (there, _, _) in zip(step.tensors, chosen, strict=True) if k in there) for k in range(99)]
        if any(used[k] > limit for k, limit in enumerate(step.limits)):
            continue

        def seconds(size, count):
            return size * (count.real / step.write + count.imag / step.read)

        total = sum(seconds(t.size, complex(alone)) for t, (_, alone, _) in zip(step.tensors, chosen, strict=True))
        for k, time in enumerate(step.seconds):
            copies = sum(seconds(t.size, complex(b.get(k, 0))) for t, (_, _, b) in zip(step.tensors, chosen, strict=True))
            total += max(time, copies)
        best = min(best, total)
    return best


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("mode", MODES)
def test_the_program_finds_what_enumeration_finds(seed, mode):
    """Check (1)."""
    step = random_step(random.Random(seed))
    assert optimum(step, mode, radius=2).seconds == pytest.approx(enumerated(step, mode, 2), rel=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_six_tensors_that_move_synchronously(seed):
    step = random_step(random.Random(100 + seed), tensors=6, nodes=8, users=2)
    assert optimum(step, "synchronous").seconds == pytest.approx(enumerated(step, "synchronous", 0), rel=1e-5)


def test_more_freedom_is_never_slower():
    """Check (2): static >= synchronous >= asynchronous; each is really slower somewhere."""
    differ = set()
    for seed in range(25):
        step = random_step(random.Random(seed), tensors=5, nodes=10)
        static, sync, beside = (optimum(step, mode).seconds for mode in MODES)
        assert static >= sync >= beside * (1 - 1e-5)
        differ |= {("static", static > 1.001 * sync), ("synchronous", sync > 1.001 * beside)}
    assert {("static", True), ("synchronous", True)} <= differ


@pytest.mark.parametrize("mode", MODES)
def test_where_everything_fits_nothing_moves(mode):
    """Check (3)."""
    for seed in range(10):
        step = random_step(random.Random(seed))
        step = replace(step, limits=[sum(t.size for t in step.tensors)] * len(step.limits))
        answer = optimum(step, mode)
        assert answer.moves == ()
        assert answer.seconds == pytest.approx(sum(step.seconds))


def test_the_slow_memory_is_never_overfilled():
    step = FlowStep(
        seconds=[1] * 6, limits=[9, 9, 4, 4, 9, 9], tensors=[Movable(size=3, users=(n, 5 - n)) for n in (0, 1)], write=1, read=1
    )
    step = replace(step, tensors=[*step.tensors, Movable(size=3, users=(1, 4))])
    assert optimum(step, "synchronous").seconds < INF
    assert optimum(replace(step, room=3), "synchronous").seconds == INF


# blocks


def random_problem(seed, share, *, overlap=True):
    rng = random.Random(seed)
    trace = layered([(rng.uniform(0.5, 4), rng.uniform(0.5, 8), rng.randint(1, 60)) for _ in range(8)])
    problem = Problem(trace=trace, hardware=machine(overlap=overlap, read=10.0, write=10.0), budget={})
    plain = simulate(problem, []).peak["cpu"]
    return replace(problem, budget={"cpu": 100 + int(share * (plain - 100))})


@pytest.mark.parametrize("seed", range(6))
def test_a_step_takes_the_seconds_of_the_program(seed):
    for share in (0.9, 0.7, 0.6):
        problem = random_problem(seed, share)
        before = 0.0
        for mode in ("asynchronous", "synchronous"):
            try:
                plan = Autotm(mode=mode)(problem)
            except Infeasible:
                continue
            answer = optimum(graph_of(problem).within([problem.budget["cpu"]] * 16), mode)
            assert plan.predicted.seconds == pytest.approx(answer.seconds, rel=1e-6)
            assert plan.predicted.peak["cpu"] <= problem.budget["cpu"]
            assert plan.predicted.seconds >= before * (1 - 1e-5)
            before = plan.predicted.seconds


def test_static_moves_nothing_and_is_refused_where_that_does_not_fit():
    with pytest.raises(Infeasible):
        Autotm(mode="static")(random_problem(0, 0.9))
    assert Autotm(mode="static")(random_problem(0, 1.0)).actions == ()


def test_an_unknown_mode_is_answered_with_the_closest():
    with pytest.raises(InvalidInput, match="did you mean `synchronous`"):
        Autotm(mode="synchronos")(random_problem(0, 1.0))


def test_limits_are_lowered_around_the_nodes_that_do_not_fit():
    """The loop against fragmentation: by half of the excess, and by a tenth at most."""
    problem = random_problem(0, 0.9)
    graph = graph_of(problem)
    outcome = simulate(problem, [])
    budget = problem.budget["cpu"]
    share = max(0.9, 1 - (outcome.peak["cpu"] / budget - 1) / 2)
    limits = [budget] * len(graph.spans)
    fresh = lowered(problem, graph, limits, [], outcome)
    assert 0.9 < share < 1
    assert fresh == [pytest.approx(share * budget)] * 16  # all nodes are within ten of one
    assert lowered(problem, graph, limits, [], replace(outcome, peak={"cpu": 2 * budget})) == [pytest.approx(0.9 * budget)] * 16
    longer = replace(graph, spans=[*graph.spans, *[graph.spans[0]] * 48])
    some = lowered(problem, longer, [budget] * 64, [], outcome)
    assert some[-1] == budget > some[0]  # far from those that do not fit


def test_every_block_but_the_last_may_move():
    """What the last one holds is wanted at once."""
    assert [swap.block for swap in graph_of(problem_for(chain([50] * 4))).swaps] == ["b0", "b1", "b2"]


def test_what_the_allocator_reserves_fits():
    """Check (4), on VGG-16 for a GPU from its datasheet."""
    shapes = {"pixel_values": ((64, 3, 224, 224), torch.float32), "labels": ((64,), torch.int64)}
    batch = {key: torch.empty(shape, dtype=dtype, device="meta") for key, (shape, dtype) in shapes.items()}
    trace = holdall.trace(models.build(models.describe("vgg-16")), batch, device="cuda")
    plain = holdall.plan(trace, planner="nop", hardware=gpu("titan-x")).predicted
    budget = int(0.9 * plain.reserved) // MiB * MiB
    plan = holdall.plan(trace, planner="autotm", hardware=gpu("titan-x"), budget={"gpu": budget, "cpu": 64 * GiB})
    assert plan.actions
    assert plan.predicted.peak["gpu"] <= plan.predicted.reserved <= budget


# real steps


@pytest.mark.parametrize("name", CONVNETS)
def test_models_train_to_the_same_bits_with_the_bytes_that_were_predicted(name):
    slow = machine(overlap=True, read=2e7, write=2e7)
    least, most = (
        holdall.plan(trace_of(name), planner="vdnn", policy=p, hardware=slow).predicted.peak["cpu"] for p in ("all", "none")
    )
    plan = holdall.plan(trace_of(name), planner="autotm", budget={"cpu": (least + most) // 2, "far": GiB}, hardware=slow)
    measured = check_under(plan, name)
    assert measured.traffic["cpu->far"] == measured.traffic["far->cpu"] > 0


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_every_block_of_a_transformer_moves_to_the_same_bits(name):
    problem = problem_for(trace_of(name), overlap=True)
    graph = graph_of(problem)
    beside = [
        FlowMove(n, node, way, True)
        for n, t in enumerate(graph.step.tensors)
        for node, way in ((t.users[0] + 1, "write"), (t.users[1] - 1, "read"))
    ]
    for answer in (FlowAnswer(seconds=0.0, moves=tuple(beside)), None):
        actions = graph.all_out() if answer is None else graph.actions(answer)
        assert len(actions) >= 4
        check_under(finish(Autotm(), problem, actions), name)


@pytest.mark.parametrize("name", ["tiny-vgg", "tiny-resnet"])
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_late_copies_change_nothing(name, mode):
    peak = plain_peak(name)
    plan = holdall.plan(trace_of(name), planner="autotm", mode=mode, budget=peak - 9000, hardware=machine(overlap=True))
    assert plan.actions
    check_under(plan, name, around=chaos(seed=8))


@pytest.mark.parametrize("name", ["tiny-vgg", "convnet"])
def test_fit_takes_it_by_name(name):
    plan = check_fit(name, plain_peak(name) - 1, "autotm")
    assert plan.actions and plan.predicted.peak["cpu"] < plain_peak(name)


def test_offloading_can_be_forbidden():
    trace = traced("convnet")[3]
    plain = simulate(problem_for(trace), []).peak["cpu"]
    with pytest.raises(Infeasible):
        Autotm()(replace(problem_for(trace, budget=plain - 1), allow=frozenset({"recompute"})))
