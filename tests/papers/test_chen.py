"""Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174): what the paper says, on real models."""

import copy
import gc
import itertools
import math
import random
from collections import Counter

import pytest
import torch
from torch import nn

import holdall
from holdall.planners.chen import cost, cut_points, greedy_segments, held_bytes, input_bytes
from holdall.simulator.curve import memory_curve
from holdall.testing.contracts import problem_for, traced, train
from holdall.testing.worlds import chain, machine

WIDTH = 64
VARIANTS = ["sqrt", "greedy", "all", "recursive", "articulation"]


RUNS = Counter()  # forwards of each block


class Counted(nn.Module):
    """A block that counts how often it is run; it saves its input and four times as much inside."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x):
        RUNS[id(self)] += 1  # no attribute of the module: a replay would put it back
        return self.down(self.drop(torch.tanh(self.up(x))))


class Stack(nn.Module):
    def __init__(self, n, dropout=0.0):
        super().__init__()
        self.layers = nn.ModuleList(Counted(dropout) for _ in range(n))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def make(n, dropout=0.0):
    torch.manual_seed(0)
    model, x = Stack(n, dropout), torch.randn(64, WIDTH, requires_grad=True)
    return model, x, holdall.trace(model, x)


def planned(trace, **options):
    return holdall.plan(trace, planner="chen", hardware=machine(), **options)


def segments(plan):
    return [len(action.blocks) for action in plan.actions]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("last", [False, True])
def test_gradients_are_the_same_bits_with_dropout_on(variant, last):
    """Claim: recomputation changes nothing but memory and time; masks are drawn again as they were."""
    model, x, trace = make(9, dropout=0.3)
    reference = copy.deepcopy(model)
    torch.manual_seed(1)
    reference(x).backward()
    plan = planned(trace, variant=variant, last=last)
    assert plan.actions
    with holdall.apply(plan, model) as harness:
        torch.manual_seed(1)
        model(x).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    assert harness.step_peaks == [plan.predicted.peak["cpu"]]


@pytest.mark.parametrize("n", [4, 9, 16, 10])
def test_what_is_held_between_forward_and_backward_is_the_inputs_and_one_interior(n):
    """Claim: n equal blocks in k segments hold k inputs and the interior of the segment that is not recomputed."""
    model, x, trace = make(n)
    plan = planned(trace)
    count = len(plan.actions) + 1
    block = trace.blocks[1]
    size, interior = input_bytes(trace, block), held_bytes(trace, block)
    last = n - sum(segments(plan))
    expected = count * size + last * interior + (last - 1) * size  # inside the last segment each block holds its input

    def held(plan):
        """Bytes that autograd holds after forward, beside the batch and the loss."""
        with holdall.apply(plan, model) as harness:
            x.grad = None
            loss = model(x)
            gc.collect()
            after = harness.ledger.live
            loss.backward()
        return after

    live = held(plan) - sum(p.nbytes for p in model.parameters()) - loss_bytes()
    assert live == pytest.approx(expected, rel=0.01)
    first_backward = next(op.id for op in trace.ops if op.site.phase.value == "backward")
    simulated = memory_curve(problem_for(trace), plan.actions).before[first_backward]
    assert simulated - sum(p.nbytes for p in model.parameters()) - loss_bytes() == pytest.approx(expected, rel=0.01)


def loss_bytes():
    """The loss, and what `pow` holds for it: the last block's output."""
    return 4 + 64 * WIDTH * 4


@pytest.mark.parametrize(("n", "variant"), [(4, "sqrt"), (9, "sqrt"), (10, "sqrt"), (9, "greedy"), (5, "all")])
def test_one_more_forward_but_for_the_last_segment(n, variant):
    """Claim: 2n - (size of the last segment) block executions in a step."""
    model, x, trace = make(n)
    plan = planned(trace, variant=variant)
    last = n - sum(segments(plan))
    RUNS.clear()
    with holdall.apply(plan, model):
        model(x).backward()
    assert sum(RUNS[id(layer)] for layer in model.layers) == 2 * n - last
    assert [RUNS[id(layer)] for layer in model.layers] == [2] * (n - last) + [1] * last


@pytest.mark.parametrize("n", [4, 9, 16, 25, 100])
def test_equal_blocks_are_cut_into_about_sqrt_n_segments(n):
    """Claim: sqrt(n) segments of sqrt(n) blocks, hence O(sqrt(n)) memory."""
    plan = planned(chain([50] * n))
    assert segments(plan) == [math.isqrt(n)] * (math.isqrt(n) - 1)


@pytest.mark.parametrize("seed", range(100))
def test_greedy_never_needs_more_than_equal_lengths(seed):
    """Claim: with b searched around sqrt(xy), kept inputs x + largest segment y is no more than the uniform plan's."""
    rng = random.Random(seed)
    trace = chain([rng.choice([rng.randint(1, 50), rng.randint(1, 1000)]) for _ in range(rng.randint(1, 40))])
    row = trace.blocks
    sizes, inputs = [held_bytes(trace, b) for b in row], [input_bytes(trace, b) for b in row]
    cut = greedy_segments(trace, row)
    assert [b for segment in cut for b in segment] == list(row)
    k = math.isqrt(len(row))
    uniform = list(range(0, len(row), math.ceil(len(row) / k)))
    ours = sum(cost(sizes, inputs, [s[0].id for s in cut]))
    assert ours <= sum(cost(sizes, inputs, uniform))
    assert 1 <= ours / least_of_all_cuts(sizes, inputs) <= 1.15  # 1.05 on average


def least_of_all_cuts(sizes, inputs):
    """The least kept inputs + largest segment: for every bound on the segments, the cheapest way to begin them."""
    n, ends = len(sizes), [0, *itertools.accumulate(sizes)]
    best = math.inf
    for most in {ends[b] - ends[a] for a in range(n) for b in range(a + 1, n + 1)}:
        kept = [0] + [math.inf] * n
        for b in range(1, n + 1):
            kept[b] = min((kept[a] + inputs[a] for a in range(b) if ends[b] - ends[a] <= most), default=math.inf)
        best = min(best, kept[n] + most)
    return best


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_trains_a_real_model_to_the_same_weights(variant):
    """A transformer with dropout and tied weights: same losses, same weights, the predicted peak, below plain training's."""
    model, batch, optimizer, trace = traced("tied")
    reference = copy.deepcopy(model)
    expected = train(reference, batch, torch.optim.AdamW(reference.parameters(), lr=1e-3))
    plan = planned(trace, variant=variant)
    with holdall.apply(plan, model, optimizer) as harness:
        losses = train(model, batch, optimizer)
    assert losses == expected
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]
    assert harness.notes == []


def test_memory_grows_like_the_square_root_and_time_by_one_forward():
    """Claim: a long chain needs O(sqrt(n)) bytes for at most one forward more."""
    plain, needed = {}, {}
    for n in (16, 64, 256):
        trace = chain([100] * n)
        plain[n] = holdall.plan(trace, planner="nop", hardware=machine()).predicted
        needed[n] = planned(trace).predicted
        forward = sum(op.seconds for op in trace.ops if op.site.phase.value == "forward")
        assert needed[n].recompute_seconds < forward
    assert plain[256].peak["cpu"] > 14 * plain[16].peak["cpu"]
    assert needed[256].peak["cpu"] < 6 * needed[16].peak["cpu"]


def planned_forwards(plan, trace):
    """Block -> how often it is run, read from the plan's actions."""
    times = {b.name: 1 for b in trace.blocks}
    waiting = list(plan.actions)
    while waiting:
        segment = waiting.pop()
        for name in segment.blocks:
            times[name] += 1
        waiting += segment.inner
    return times


@pytest.mark.parametrize(("n", "k"), [(8, 1), (9, 2), (16, 3), (11, 2)])
def test_recursive_blocks_run_once_more_for_every_level(n, k):
    """Claim: k inputs at every level; the replay of a segment is the same rule inside, so its first blocks run most often."""
    model, x, trace = make(n, dropout=0.3)
    plan = planned(trace, variant="recursive", k=k)
    times = planned_forwards(plan, trace)
    levels = math.ceil(math.log(n, k + 1) - 1e-9)
    assert levels <= max(times.values()) == next(iter(times.values())) <= levels + 1
    assert times[trace.blocks[-1].name] == 1
    RUNS.clear()
    with holdall.apply(plan, model) as harness:
        model(x).backward()
    assert [RUNS[id(layer)] for layer in model.layers] == list(times.values())
    assert harness.step_peaks == [plan.predicted.peak["cpu"]]


def test_recursive_memory_grows_like_the_logarithm():
    """Claim: with k = 1, O(log n) bytes for O(n log n) forwards."""
    needed = {}
    for n in (16, 64, 256):
        trace = chain([10] * n)
        plan = planned(trace, variant="recursive")
        needed[n] = plan.predicted.peak["cpu"]
        assert sum(planned_forwards(plan, trace).values()) == n + n * math.log2(n) / 2  # at every level one half once more
    assert needed[64] - needed[16] == needed[256] - needed[64] == 2 * 10  # two levels more, an input each


class Ladder(nn.Module):
    """Two rungs of a U-net: what the first two blocks return is taken by the last two as well."""

    class Rung(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, skip=None):
            return torch.tanh(self.mix(x if skip is None else x + skip))

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Ladder.Rung() for _ in range(9))

    def forward(self, x):
        for block in self.blocks[:3]:
            x = block(x)
        a = self.blocks[3](x)
        b = self.blocks[4](a)
        x = self.blocks[5](b)
        x = self.blocks[6](x, b)
        x = self.blocks[7](x, a)
        return self.blocks[8](x).pow(2).mean()


def test_cut_points_are_boundaries_that_one_tensor_crosses():
    """Claim: cuts lie where every path passes; between the rungs of a ladder two or three tensors would have to be kept."""
    torch.manual_seed(0)
    model, x = Ladder(), torch.randn(8, WIDTH)
    trace = holdall.trace(model, x)
    assert cut_points(trace, trace.blocks) == [1, 2, 3, 4, 8]
    plan = planned(trace, variant="articulation", last=True)
    assert [len(a.blocks) for a in plan.actions] == [2, 2, 5]
    greedy = planned(trace, variant="greedy", last=True)
    starts = [int(a.blocks[0].rpartition(".")[2]) for a in greedy.actions]
    assert set(starts) <= {0, 1, 2, 3, 4, 8}
    reference = copy.deepcopy(model)
    reference(x).backward()
    with holdall.apply(plan, model) as harness:
        model(x).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    assert harness.step_peaks == [plan.predicted.peak["cpu"]]
    assert cut_points(chain([5] * 4), chain([5] * 4).blocks) == [1, 2, 3]
