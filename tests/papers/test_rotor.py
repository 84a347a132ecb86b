"""Beaumont et al., "Optimal checkpointing for heterogeneous chains" (arXiv 1911.13214): what the paper says, on real models."""

import copy
import math
import random
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch

import holdall
from holdall.planners.rotor import Rotor, actions_of, chain_of, forwards, in_slots
from holdall.planners.rotor.table import NEVER, Dropped, Stage, Table, needed
from holdall.planning.segments import runs
from holdall.simulator import simulate
from holdall.testing.contracts import problem_for, traced, train
from holdall.testing.worlds import chain, machine

LOSS = Stage(uf=0, ub=0, a=1, abar=1)


def unit_chain(n):
    return [*[Stage(uf=1, ub=1, a=1, abar=2)] * n, LOSS]


@pytest.mark.parametrize(
    ("length", "first", "times"),
    [
        (8, 4, [44, 29, 25, 23, 22, 21, 20, 20, 19, 19, 18, 18, 17, 16]),
        (12, 4, [90, 51, 43, 38, 35, 34, 33]),
        (16, 4, [152, 76, 62, 55, 51, 47, 46]),
    ],
)
def test_the_table_of_equal_stages(length, first, times):
    """Reference values, found by running a direct transcription of the published recurrence."""
    table = Table(unit_chain(length), first + len(times))
    assert [table.seconds(0, length, m) for m in range(first, first + len(times))] == times
    assert all(table.seconds(0, length, m) == NEVER for m in range(-1, first))


@pytest.mark.parametrize(("n", "c", "extra"), [(10, 2, 20), (10, 3, 15), (20, 3, 45), (50, 5, 122)])
def test_without_keeping_whole_stages_it_is_revolve(n, c, extra):
    """Claim: with c slots, n steps take r n - C(c + r, c + 1) forwards more, r the least with C(c + r, c) >= n."""
    table = Table([*[Stage(uf=1, ub=0, a=1, abar=2)] * n, LOSS], c + 3, whole=False)
    r = next(r for r in range(n) if math.comb(c + r, c) >= n)
    assert table.seconds(0, n - 1, c + 3) - n == extra == r * n - math.comb(c + r, c + 1)


def random_chain(rng, n=None):
    n = n or rng.randint(1, 9)
    stages = []
    for _ in range(n):
        a = rng.randint(1, 6)
        stages.append(
            Stage(
                uf=rng.randint(1, 9),
                ub=rng.randint(1, 9),
                a=a,
                abar=a + rng.randint(0, 12),
                of=rng.choice([0, rng.randint(0, 5)]),
                ob=rng.choice([0, rng.randint(0, 5)]),
            )
        )
    return [*stages, Stage(uf=0, ub=0, a=3, abar=3)]


def sequence(items, last):
    """The paper's operations, in order: Fe (record), Fc (keep the input), Fn (let it go), B."""
    for n, item in enumerate(items):
        if isinstance(item, Dropped):
            for i in range(item.first, item.last + 1):
                yield ("Fc" if i == item.first else "Fn"), i
            yield from sequence(items[n + 1 :], last)
            yield from sequence(item.items, item.last)
            return
        yield "Fe", item
        if item == last:
            yield "B", item
            return
        yield from sequence(items[n + 1 :], last)
        yield "B", item
        return


def walk(stages, operations, *, both=False):
    """Execute the operations on sets of values {x_i, xbar_i, y_i}, naively: (peak, time). x_0 lies outside.

    The published recurrence counts one gradient of a backward, the larger of which is in `ob` if both are there at once.
    `both`: count the two beside `ob`.
    """
    size = [*(s.a for s in stages), 0]
    n = len(stages)
    whole = [0, *(s.abar - s.a + size[i + 1] for i, s in enumerate(stages))]  # xbar_{i + 1}: with x_{i + 1}, without x_i
    live, peak, time = {("x", 0), ("y", n)}, 0, 0.0

    def usage():
        sizes = {"x": size, "y": size, "bar": whole}
        return sum(sizes[kind][i] for kind, i in live if (kind, i) != ("x", 0))

    for op, i in operations:
        stage = stages[i]
        if op == "B":
            assert ("y", i + 1) in live
            assert ("bar", i + 1) in live
            assert ("x", i) in live or ("bar", i) in live
            live.discard(("y", i + 1))
            live.add(("y", i))
            peak = max(peak, usage() + stage.ob + (size[i + 1] if both else 0))
            live.discard(("bar", i + 1))
            live.discard(("x", i)) if i else None
            time += stage.ub
            continue
        assert ("x", i) in live or ("bar", i) in live
        live.add(("bar" if op == "Fe" else "x", i + 1))
        peak = max(peak, usage() + stage.of)
        if op == "Fn":
            live.discard(("x", i))
        time += stage.uf
    assert live <= {("x", 0), ("y", 0)}
    return peak, time


def least(stages, items, last):
    """The memory in which the recurrence admits this schedule, and its time; schedule given, nothing searched."""
    size = [*(s.a for s in stages), 0]

    def whole(i):
        kept = stages[i].abar - size[i] + size[i + 1]
        return kept, max(size[i + 1] + kept + stages[i].of, size[i] + kept + stages[i].ob)

    first = items[0].first if isinstance(items[0], Dropped) else items[0]
    if first == last:
        return whole(last)[1], stages[last].uf + stages[last].ub
    inside = [size[j] + size[j + 1] + stages[j].of for j in range(first + 1, last)]
    floor = size[last + 1] + max([size[first + 1] + stages[first].of, *inside])
    memory, time = least(stages, items[1:], last)
    if not isinstance(items[0], Dropped):
        kept, own = whole(first)
        return max(floor, own, kept + memory), time + stages[first].uf + stages[first].ub
    again, more = least(stages, items[0].items, items[0].last)
    sweep = sum(stages[i].uf for i in range(first, items[0].last + 1))
    return max(floor, again, size[items[0].last + 1] + memory), sweep + time + more


def test_500_random_chains_run_as_the_table_says():
    """Claim: every schedule is legal, takes the time of the table and stays in its memory."""
    rng = random.Random(0)
    seen = 0
    for _ in range(500):
        stages = random_chain(rng)
        last = len(stages) - 1
        table = Table(stages, sum(s.abar + s.a + s.of + s.ob for s in stages))
        for m, seconds in rng.sample(table.stairs(0, last), min(3, len(table.stairs(0, last)))):
            items = table.items(0, last, m)
            operations = list(sequence(items, last))
            peak, time = walk(stages, operations)
            assert time == seconds
            assert peak <= m
            assert walk(stages, operations, both=True)[0] <= m + max(s.a for s in stages)
            assert least(stages, items, last) == (m, seconds)
            assert [sum(op != "B" and i == n for op, i in operations) for n in range(last)] == forwards(items, last)
            seen += any(isinstance(item, Dropped) for item in items)
    assert seen > 300


def test_what_a_schedule_needs_is_where_the_table_first_admits_it():
    """Gradients that stay included: on every stair of 60 random chains."""
    rng = random.Random(3)
    for _ in range(60):
        stages = [replace(s, g=rng.randint(0, 4)) for s in random_chain(rng)]
        last = len(stages) - 1
        table = Table(stages, sum(s.abar + s.a + s.of + s.ob + s.g for s in stages))
        for m, _ in table.stairs(0, last):
            assert needed(stages, table.items(0, last, m), last) == m


def test_a_sweep_needs_room_for_its_largest_forward_beside_the_gradient():
    """The paper's least memory of a stretch: the gradient after it, and the largest forward of a sweep that keeps nothing."""
    small = Stage(uf=1, ub=1, a=1, abar=1)
    stages = [small, replace(small, of=100), small, Stage(uf=1, ub=1, a=50, abar=50), LOSS]
    swept = 50 + 1 + 1 + 100  # the gradient after stage 2; input, output and workspace of stage 1
    assert needed(stages, (0, 1, 2), 2) == swept
    table = Table(stages, 300)
    assert table.seconds(0, 2, swept) < NEVER
    assert table.seconds(0, 2, swept - 1) == NEVER


def any_schedule(rng, first, last):
    """Stages that are kept whole or dropped at random, at every depth."""
    items = []
    while first < last:
        if rng.random() < 0.5:
            items.append(first)
            first += 1
        else:
            end = rng.randint(first, last - 1)
            items.append(Dropped(first, end, any_schedule(rng, first, end)))
            first = end + 1
    return (*items, last)


def test_what_any_schedule_needs_is_what_the_recurrence_says_of_this_table():
    """Good ones and bad ones, up to any stage: workspaces decide here, which schedules of a table avoid."""
    rng = random.Random(11)
    for _ in range(400):
        stages = [replace(s, of=rng.choice([0, rng.randint(0, 40)])) for s in random_chain(rng)]
        last = rng.randrange(len(stages))
        items = any_schedule(rng, 0, last)
        assert needed(stages, items, last) == least(stages, items, last)[0]


def test_more_memory_is_never_slower_and_chen_is_never_faster():
    """Claim: the table is monotone, and optimal among schedules of which Chen's equal segments are one kind."""
    rng = random.Random(1)
    for _ in range(60):
        stages = random_chain(rng)
        last = len(stages) - 1
        table = Table(stages, sum(s.abar + s.a + s.of + s.ob for s in stages))
        times = [table.seconds(0, last, m) for m in range(60)]
        assert times == sorted(times, reverse=True)
        for k in range(1, last + 1):
            cuts = [range(i, min(i + k, last)) for i in range(0, last, k)]
            segments = [Dropped(c[0], c[-1], tuple(c)) for c in cuts[:-1]]
            memory, time = least(stages, (*segments, *cuts[-1], last), last)
            assert table.seconds(0, last, memory) <= time


def test_no_schedule_of_segments_inside_segments_is_faster():
    """Against every laminar choice of a chain of four stages, listed."""

    def choices(s, t):
        """Every way to run stages s..t."""
        if s == t:
            yield (s,)
            return
        for rest in choices(s + 1, t):
            yield (s, *rest)
        for j in range(s + 1, t + 1):
            for inside in choices(s, j - 1):
                for rest in choices(j, t):
                    yield (Dropped(s, j - 1, inside), *rest)

    rng = random.Random(2)
    for _ in range(20):
        stages = [*random_chain(rng, 4)[:-1], Stage(uf=0, ub=0, a=2, abar=2)]
        last = len(stages) - 1
        table = Table(stages, 200)
        for items in choices(0, last):
            memory, time = least(stages, items, last)
            assert table.seconds(0, last, memory) <= time


def test_two_hundred_stages_are_solved_in_seconds():
    began = time.process_time()
    table = Table(unit_chain(200), 200)
    assert len(table.items(0, 200, 30)) > 1
    assert time.process_time() - began < 20


RUNS = Counter()  # forwards of each block


def deep(layers=8, width=32):
    """A stack whose blocks count their forwards; unequal, with dropout."""

    class Block(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.up, self.down, self.drop = torch.nn.Linear(width, inner), torch.nn.Linear(inner, width), torch.nn.Dropout(0.1)

        def forward(self, x):
            RUNS[id(self)] += 1  # no attribute of the module: a replay would put it back
            return x + self.drop(self.down(torch.tanh(self.up(x))))

    class Stack(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Block(width * (1 + n % 3)) for n in range(layers))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.pow(2).mean()

    torch.manual_seed(0)
    return Stack(), torch.randn(512, width)


def test_gradients_are_the_same_bits_and_blocks_run_as_often_as_planned():
    """Claims (5): executed by nested replays; forwards counted; the predicted peak, at every budget."""
    model, x = deep()
    trace = holdall.trace(model, x)
    problem = problem_for(trace)
    reference = copy.deepcopy(model)
    torch.manual_seed(1)
    reference(x).backward()
    plain = simulate(problem, []).peak["cpu"]
    with pytest.raises(holdall.Infeasible) as refusal:
        holdall.plan(trace, planner="rotor", hardware=machine(), budget=1)
    least = refusal.value.smallest
    most = 0
    for n in range(6):
        budget = least + (plain - least) * n // 5
        plan = holdall.plan(trace, planner="rotor", hardware=machine(), budget=budget)
        times = planned_forwards(plan, trace)
        most = max(most, *times)
        RUNS.clear()
        model.zero_grad()
        with holdall.apply(plan, model) as harness:
            torch.manual_seed(1)
            model(x).backward()
        assert [RUNS[id(layer)] for layer in model.layers] == times
        assert harness.step_peaks == [plan.predicted.peak["cpu"]]
        assert plan.predicted.peak["cpu"] <= budget
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    assert most >= 3  # replays inside replays
    assert plan.actions == ()


def planned_forwards(plan, trace):
    """How often each block is run, read from the plan's actions."""
    times = {b.name: 1 for b in trace.blocks}
    waiting = list(plan.actions)
    while waiting:
        segment = waiting.pop()
        for name in segment.blocks:
            times[name] += 1
        waiting += segment.inner
    return list(times.values())


def test_less_memory_than_chen_and_less_time_at_the_same_memory():
    """Claim: better than equal segments wherever both can be."""
    model, x = deep(12)
    trace = holdall.trace(model, x)
    for variant in ("sqrt", "greedy"):
        chen = holdall.plan(trace, planner="chen", hardware=machine(), variant=variant).predicted
        rotor = holdall.plan(trace, planner="rotor", hardware=machine(), budget=chen.peak["cpu"]).predicted
        assert rotor.peak["cpu"] <= chen.peak["cpu"]
        assert rotor.seconds <= chen.seconds
    with pytest.raises(holdall.Infeasible) as refusal:
        holdall.plan(trace, planner="rotor", hardware=machine(), budget=1)
    assert refusal.value.smallest < chen.peak["cpu"]


@pytest.mark.parametrize("name", ["tiny-gpt2", "convnet"])
def test_real_models_train_to_the_same_weights(name):
    """The chain of a real model, at the smallest memory that rotor finds (running statistics and dropout included)."""
    model, batch, optimizer, trace = traced(name)
    reference = copy.deepcopy(model)
    with pytest.raises(holdall.Infeasible) as refusal:
        Rotor()(problem_for(trace, budget=1))
    expected = train(reference, batch, torch.optim.AdamW(reference.parameters(), lr=1e-3), 2)
    plan = Rotor()(problem_for(trace, budget=refusal.value.smallest))
    with holdall.apply(plan, model, optimizer) as harness:
        assert train(model, batch, optimizer, 2) == expected
    assert all(torch.equal(v, reference.state_dict()[k]) for k, v in model.state_dict().items())
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"] == refusal.value.smallest


def test_the_chain_of_a_trace_needs_about_what_the_simulator_counts():
    """On a synthetic chain the search's bytes, plus what it does not see, are the simulator's, within a block's width."""
    sizes = [30, 80, 20, 60, 30, 90, 10, 50]
    trace = chain(sizes)
    problem = problem_for(trace)
    rows = runs(trace)
    stages = chain_of(problem, rows)
    assert [s.abar for s in stages[1:-1]] == [10 + size for size in sizes[1:]]
    last = len(stages) - 1
    table = Table(stages, 1000)
    fixed = sum(t.nbytes for t in trace.tensors.values() if t.born < 0)
    for m, _ in table.stairs(0, last):
        peak = simulate(problem, actions_of(trace, rows[0], table.items(0, last, m))).peak["cpu"]
        assert abs(peak - fixed - m) <= 40
    coarse = in_slots(stages, 16)
    assert all(16 * c.a >= s.a and 16 * c.of >= s.of for c, s in zip(coarse, stages, strict=True))
    assert all(
        16 * (c.abar - c.a + d.a) >= s.abar - s.a + t.a
        for c, d, s, t in zip(coarse, coarse[1:], stages, stages[1:], strict=False)
    )
