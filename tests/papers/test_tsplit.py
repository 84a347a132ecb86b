"""TSPLIT, "Fine-grained GPU Memory Management for Efficient DNN Training via Tensor Splitting" (Nie et al., ICDE 2022).

First its model by hand, then plans of small nets, then real steps.
"""

import gc
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import holdall
from holdall import models
from holdall.actions.pieces import Pieces
from holdall.actions.pieces.regions import region_of, regions
from holdall.cost.roofline import cost_trace
from holdall.errors import Infeasible, InvalidInput
from holdall.machine.presets import gpu
from holdall.planners.capuchin.accesses import HeldTensor, Swap
from holdall.planners.nop import Nop
from holdall.planners.tsplit import Tsplit
from holdall.planners.tsplit.model import WAITED, Lane, StepModel
from holdall.planners.tsplit.search import Option, SplitSearch
from holdall.planning.finish import finish
from holdall.runtime.activations.pieces import split
from holdall.simulator import simulate
from holdall.testing.chaos import chaos
from holdall.testing.contracts import problem_for
from holdall.testing.placed import adamw, check_fit, check_under, plain_peak, trace_of
from holdall.testing.worlds import chain, machine
from holdall.units import GiB

NEAR = 1e-5  # of the loss, over a few steps in float32, under `pieces`


class MLP(nn.Module):
    def __init__(self, width, factor):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, factor * width), nn.GELU(), nn.Linear(factor * width, width)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Layer(nn.Module):
    def __init__(self, width, factor):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), MLP(width, factor)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Perceptrons(nn.Module):
    """A sequence of perceptrons whose widths differ."""

    def __init__(self, *factors):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer(8, factor) for factor in factors)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class DoubleConv(nn.Module):
    def __init__(self, before, after, norm):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.norm, self.act, self.pool = norm(after), nn.ReLU(inplace=True), nn.MaxPool2d(2)

    def forward(self, x):
        return self.pool(self.act(self.conv2(self.act(self.norm(self.conv1(x))))))


class Convolutions(nn.Module):
    def __init__(self, norm=nn.Identity):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.layers = nn.ModuleList([DoubleConv(4, 8, norm), DoubleConv(8, 8, norm)])

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


WORLDS = {
    "perceptrons": (lambda: Perceptrons(16, 4), (4, 32, 8)),
    "one": (lambda: Perceptrons(64), (1, 256, 8)),
    "convolutions": (Convolutions, (8, 3, 16, 16)),
    "groups": (lambda: Convolutions(lambda width: nn.GroupNorm(2, width)), (8, 3, 16, 16)),
    "batches": (lambda: Convolutions(nn.BatchNorm2d), (8, 3, 16, 16)),
}


def made(name):
    make, shape = WORLDS[name]
    torch.manual_seed(0)
    model = make().train()
    return model, (torch.randn(shape),), adamw(model)


@cache
def traced(name):
    model, batch, optimizer = made(name)
    return cost_trace(holdall.trace(model, batch, optimizer=optimizer), machine())


def train(model, batch, optimizer, steps=3):
    losses = []
    for _ in range(steps):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@cache
def plainly(name):
    return train(*made(name))


def run(plan, name, around=None):
    """Train under the plan: bytes as predicted, losses near those of plain training. What was measured."""
    model, batch, optimizer = made(name)
    gc.collect()
    with around or nullcontext(), holdall.apply(plan, model, optimizer, enforce=False) as harness:
        losses = train(model, batch, optimizer)
        measured = harness.measured()
    assert dict(measured.traffic) == dict(plan.predicted.traffic)
    if around is None:
        assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]
    if all(a.exact for a in plan.actions):
        assert losses == plainly(name)
    assert losses == pytest.approx(plainly(name), rel=NEAR)
    return measured


def least(trace, there, planner="tsplit", **options):
    with pytest.raises(Infeasible) as refused:
        holdall.plan(trace, planner=planner, hardware=there, budget=1, **options)
    return refused.value.smallest


@cache
def least_of(name, overlap, rate):
    return least(traced(name), machine(overlap=overlap, read=rate, write=rate))


def plan_for(name, share, *, overlap=True, rate=1e8, **options):
    """A plan between the least memory and plain training's."""
    trace, there = traced(name), machine(overlap=overlap, read=rate, write=rate)
    low, high = least_of(name, overlap, rate), simulate(problem_for(trace), []).peak["cpu"]
    return holdall.plan(trace, planner="tsplit", hardware=there, budget=int(low + share * (high - low)), **options)


# the model


def test_a_lane_by_hand():
    lane = Lane([1.0, 2.0, 3.0, 4.0])
    assert lane.between(0, 0) == 1 and lane.between(1, 2) == 5 and lane.between(2, 1) == 0
    assert lane.fill(range(1, 4), 3.5) == 2
    assert lane.free == [1.0, 0.0, 1.5, 4.0] and lane.between(0, 2) == 2.5
    assert lane.fill(range(3, 1, -1), 4.5) == 2  # a fetch takes the last seconds before the need
    assert lane.free == [1.0, 0.0, 1.0, 0.0]


def held(nbytes, out, into):
    return HeldTensor(tensor=0, block=0, nbytes=nbytes, swap=Swap(evict=0, back=0, out=out, into=into))


def test_a_swap_costs_what_the_link_cannot_hide_around_the_op_at_hand():
    """Ops of one second: a copy of 3 s after op 1 and a fetch of 2 s before op 8 leave room at op 6, and one second is waited
    for at op 4; the second tensor finds the link taken."""
    trace = chain([10] * 5)
    trace = replace(trace, ops=tuple(replace(op, seconds=1.0) for op in trace.ops))
    model = StepModel(problem_for(trace, overlap=True))
    before = list(model.needed)
    tensor = held(7, 3.0, 2.0)
    assert model.waiting(tensor, 1, 8, 6) == 0
    assert model.waiting(tensor, 1, 8, 4) == 1
    model.swap(tensor, 1, 8, 6)
    assert [a - b for a, b in zip(before, model.needed, strict=True)][:9] == [0, 0, 0, 0, 0, 7, 7, 0, 0]
    assert model.waiting(tensor, 1, 8, 6) == 2 + 2
    model.swap(replace(tensor, tensor=1), 1, 8, WAITED)
    assert [a - b for a, b in zip(before, model.needed, strict=True)][:9] == [0, 0, 7, 7, 7, 14, 14, 7, 7]


def test_decisions_are_ranked_by_bytes_per_second():
    free, cheap, dear = Option(1, 0.0, {}), Option(30, 2.0, {}), Option(40, 4.0, {})
    assert sorted((dear, free, cheap), key=lambda o: o.rank) == [dear, cheap, free]


def test_the_model_counts_plain_training_as_the_simulator_does():
    for name in ("perceptrons", "convolutions"):
        model = StepModel(problem_for(traced(name)))
        assert model.needed[model.peak] == simulate(problem_for(traced(name)), []).peak["cpu"]


def test_a_fast_link_is_used_for_everything_and_without_one_all_is_computed_again():
    problem = problem_for(traced("perceptrons"), overlap=True)
    fast = replace(problem, hardware=machine(overlap=True, read=1e15, write=1e15))
    last = SplitSearch(fast, 1).states()[-1]
    assert last.swapped and not last.again
    last = SplitSearch(replace(problem, allow=frozenset({"recompute"})), 1).states()[-1]
    assert last.again and not last.swapped


# splits


def test_the_peak_of_a_split_perceptron_falls_as_one_over_the_pieces():
    """Check (1): linear, GELU, linear; predicted and measured."""
    trace = traced("one")
    peaks = {}
    for count in (2, 4, 8):
        plan = finish(Nop(), problem_for(trace), [Pieces(modules=("layers.0",), rows=256 // count)])
        run(plan, "one")
        peaks[count] = plan.predicted.peak["cpu"]
    assert peaks[2] - peaks[4] == 2 * (peaks[4] - peaks[8]) > 0


@pytest.mark.parametrize(
    ("module", "by"), [(nn.GELU(), "positions"), (nn.LayerNorm(8), "positions"), (nn.MaxPool2d(2), "samples")]
)
def test_row_wise_ops_have_the_same_bits_in_pieces(module, by):
    """Check (2), where no product is summed over fewer rows."""
    torch.manual_seed(0)
    found = []
    x = torch.randn(7, 3, 8, 8)
    for rows in (7, 2):
        undo = split(module, "it", rows, nullcontext, by=by)
        given = x.clone().requires_grad_()
        out = module(given)
        out.square().sum().backward()
        found.append((out.detach(), given.grad))
        undo()
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(("name", "by"), [("perceptrons", "positions"), ("convolutions", "samples"), ("groups", "samples")])
def test_gradients_of_split_modules_are_near(name, by):
    """Check (2), with rows of every module's own, which do not divide the batch evenly."""
    trace = traced(name)
    modules = list(regions(trace, by))
    actions = [Pieces(modules=(module,), rows=3 + n, by=by) for n, module in enumerate(modules)]
    plan = finish(Nop(), problem_for(trace), actions)
    assert len(actions) > 1
    run(plan, name)
    model, batch, optimizer = made(name)
    whole, _, _ = made(name)
    with holdall.apply(plan, model, optimizer, enforce=False):
        loss = model(*batch)
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
    plain = whole(*batch)
    plain.backward()
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    for g, p in zip(gradients, whole.parameters(), strict=True):
        assert (g - p.grad).norm() <= 1e-6 * p.grad.norm()


def test_sizes_of_their_own_save_what_one_size_does():
    """Two actions with one number of rows are one action with both modules."""
    trace = traced("perceptrons")
    one, two = regions(trace)
    together = simulate(problem_for(trace), [Pieces(modules=(one, two), rows=32)])
    apart = simulate(problem_for(trace), [Pieces(modules=(one,), rows=32), Pieces(modules=(two,), rows=32)])
    assert together.peak == apart.peak and together.seconds == pytest.approx(apart.seconds)


def test_a_batch_norm_is_never_split_by_samples():
    trace = traced("batches")
    block = trace.block("layers.0")
    assert isinstance(region_of(trace, block, "layers.0", "samples"), str)
    assert "may mix samples" in region_of(trace, block, "layers.0.norm", "samples")
    assert "layers.0.pool" in regions(trace, "samples")  # what can be split around it


# plans


@pytest.mark.parametrize(("name", "overlap"), [("perceptrons", True), ("convolutions", True), ("convolutions", False)])
def test_it_fits_where_a_uniform_split_does_and_is_never_slower_for_splitting(name, overlap):
    """Checks (3) and (4)."""
    trace, there = traced(name), machine(overlap=overlap, read=3e7, write=3e7)
    by = "samples" if name == "convolutions" else "positions"
    tokens = next(iter(regions(trace, by).values())).tokens
    lowest, without = least(trace, there), least(trace, there, pieces=1)
    assert lowest < 0.8 * without
    for count in (2, 4, 8):
        assert lowest <= simulate(problem_for(trace), [Pieces.of(trace, tokens // count, by)]).peak["cpu"]
    high = simulate(problem_for(trace), []).peak["cpu"]
    for share in (0, 0.5):
        budget = int(without + share * (high - without))
        whole, parted = (
            holdall.plan(trace, planner="tsplit", hardware=there, budget=budget, pieces=n).predicted.seconds for n in (1, 8)
        )
        assert parted <= whole


@pytest.mark.parametrize("name", ["tiny-vgg", "tiny-resnet", "convnet"])
def test_it_is_faster_than_vdnn_and_superneurons_in_their_least_memory(name):
    """The paper's orderings, on a link that does not hide all copies: at the budgets of the others, where they are slowest."""
    trace, there = trace_of(name), machine(overlap=True, read=3e7, write=3e7)
    for planner, bound in (("vdnn", 0.95), ("superneurons", 1.0)):
        budget = least(trace, there, planner)
        theirs, ours = (
            holdall.plan(trace, planner=p, hardware=there, budget=budget).predicted.seconds for p in (planner, "tsplit")
        )
        assert ours <= theirs * bound


def test_vgg_16_on_a_titan_x_needs_less_memory_and_time_than_under_the_others():
    """The paper's models and rivals, from datasheets: it trains where vDNN and Capuchin do not, faster than SuperNeurons."""
    batch = {
        "pixel_values": torch.empty(128, 3, 224, 224, device="meta"),
        "labels": torch.empty(128, dtype=torch.int64, device="meta"),
    }
    trace = holdall.trace(models.build(models.describe("vgg-16")), batch, device="cuda")

    def seconds(planner, size):
        try:
            return holdall.plan(trace, planner=planner, hardware=gpu("titan-x"), budget=size * GiB).predicted.seconds
        except Infeasible:
            return math.inf

    for size, fails in ((8, ["capuchin"]), (6, ["capuchin", "vdnn"])):
        found = {planner: seconds(planner, size) for planner in ("tsplit", "superneurons", "vdnn", "capuchin")}
        assert min(found, key=found.get) == "tsplit"
        assert sorted(p for p, s in found.items() if s == math.inf) == fails


def test_nothing_is_done_exactly_if_that_fits():
    plain = plain_peak("tiny-vgg")
    there = machine(overlap=True)
    assert holdall.plan(trace_of("tiny-vgg"), planner="tsplit", hardware=there, budget=plain).actions == ()
    assert holdall.plan(trace_of("tiny-vgg"), planner="tsplit", hardware=there, budget=plain - 1).actions


def test_what_is_not_allowed_is_not_used():
    problem = replace(problem_for(traced("perceptrons"), budget=1, overlap=True), allow=frozenset({"recompute"}))
    for allow, wanted in (({"recompute"}, {"reschedule"}), ({"offload"}, {"layer_swap"}), ({"pieces"}, {"pieces"})):
        with pytest.raises(Infeasible) as refused:
            Tsplit()(replace(problem, allow=frozenset(allow)))
        plan = Tsplit()(replace(problem, allow=frozenset(allow), budget={"cpu": refused.value.smallest}))
        assert {a.name for a in plan.actions} == wanted


def test_wrong_options_are_answered():
    with pytest.raises(InvalidInput, match="`pieces` is 0"):
        Tsplit(pieces=0)(problem_for(traced("perceptrons")))


# real steps


@pytest.mark.parametrize("name", ["perceptrons", "convolutions", "groups", "batches"])
@pytest.mark.parametrize("overlap", [True, False])
def test_small_nets_train_with_the_bytes_that_were_predicted(name, overlap):
    """All kinds of decisions, from the least memory on."""
    seen = set()
    for share in (0, 0.4):
        plan = plan_for(name, share, overlap=overlap)
        run(plan, name)
        seen |= {a.name for a in plan.actions}
    assert name == "batches" or "pieces" in seen


def test_late_copies_change_nothing():
    plan = plan_for("convolutions", 0.0)
    assert {a.name for a in plan.actions} == {"pieces", "offload"}
    run(plan, "convolutions", around=chaos(seed=3))


@pytest.mark.parametrize("name", ["tiny-vgg", "convnet"])
def test_whole_tensors_train_to_the_same_bits(name):
    plan = holdall.plan(
        trace_of(name), planner="tsplit", hardware=machine(overlap=True), budget=int(plain_peak(name) * 0.85), pieces=1
    )
    measured = check_under(plan, name)
    assert measured.traffic["cpu->far"] == measured.traffic["far->cpu"] > 0
    check_under(plan, name, around=chaos(seed=5))


def test_fit_takes_it_by_name():
    plan = check_fit("tiny-vgg", int(plain_peak("tiny-vgg") * 0.95), "tsplit", pieces=1)
    assert plan.actions and plan.predicted.peak["cpu"] <= plain_peak("tiny-vgg") * 0.95
    model, batch, optimizer = made("convolutions")
    budget = least(traced("convolutions"), machine(overlap=True))
    given = {"budget": budget, "planner": "tsplit", "hardware": machine(overlap=True), "repeat": False}
    with holdall.fit(model, optimizer, batch, **given) as harness:
        losses = train(model, batch, optimizer)
    assert "pieces" in {a.name for a in harness.plan.actions}
    assert max(harness.step_peaks) <= budget
    assert losses == pytest.approx(plainly("convolutions"), rel=NEAR)
