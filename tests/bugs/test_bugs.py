"""Each bug leaves a test: what went wrong once, in the smallest world that shows it."""

import copy
import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

import holdall
from holdall.actions.offload import Offload
from holdall.actions.place import Place
from holdall.actions.recompute import Recompute
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.runtime.activations.recompute import Made, Result, Segment
from holdall.testing.contracts import problem_for, train
from holdall.testing.worlds import chain, family, far_peak, far_used, machine

WIDTH = 32


class Stack(nn.Module):
    """Layers one after the other; `between` is done to what passes from each to the next."""

    def __init__(self, layers, between=None):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.between = between

    def forward(self, x):
        for n, layer in enumerate(self.layers):
            if self.between is not None and n:
                x = self.between(x)
            x = layer(x)
        return x.pow(2).mean()


def same_under(model, batch, choose, *, steps=3):
    """Train plainly and under actions; assert the same bits everywhere and the predicted peak. Returns the harness."""

    def loop(model, optimizer):
        torch.manual_seed(1)
        losses = []
        for _ in range(steps):
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    reference = copy.deepcopy(model)
    expected = loop(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = holdall.trace(model, batch, optimizer=optimizer)
    plan = finish(Nop(), problem_for(trace), choose(trace))
    assert plan.actions
    gc.collect()
    with holdall.apply(plan, model, optimizer) as harness:
        got = loop(model, optimizer)
    assert got == expected
    mine, theirs = model.state_dict(), reference.state_dict()
    assert all(torch.equal(mine[k], theirs[k]) for k in theirs)
    assert harness.notes == []
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]
    return harness


def recompute_each(trace):
    return [Recompute.of(trace, [b]) for b in trace.blocks if b.saves and b.backward is not None]


def recompute_together(trace):
    return [Recompute.of(trace, [b for b in trace.blocks if b.saves and b.backward is not None])]


# what a recomputed call was given was held by the hooks that autograd keeps, until the whole block was through backward


class Guided(nn.Module):
    """Takes a large extra tensor that only its first op uses, then saves something small for long."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *, guide=None):
        x = x + (self.first(x) * guide.sum(0)).tanh()
        return self.second(x).tanh()


class GuidedStack(nn.Module):
    def __init__(self, n=3):
        super().__init__()
        self.layers = nn.ModuleList(Guided() for _ in range(n))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, guide=torch.ones(200, *x.shape))  # fresh for each layer: nobody else holds it
        return x.pow(2).mean()


def test_an_extra_input_of_a_recomputed_block_is_let_go_after_its_replay():
    torch.manual_seed(0)
    same_under(GuidedStack(), (torch.randn(8, WIDTH),), recompute_each)


def test_nothing_of_a_segment_outlives_its_replay():
    """The same at the level of one segment: after the replay only autograd's own tensors are there."""
    torch.manual_seed(0)
    block, x = Guided(), torch.randn(8, WIDTH, requires_grad=True)
    alive = []

    def fresh():
        guide = torch.ones(200, 8, WIDTH)
        alive.append(torch.multiprocessing.reductions.StorageWeakRef(guide.untyped_storage()))
        return guide

    segment = Segment()
    out, call = segment.run(block, block.forward, (x,), {"guide": fresh()})
    assert not alive[0].expired()  # needed for the replay
    inside = [promise() for promise in call.promises.values()]
    segment.replay()
    assert alive[0].expired()
    del inside, out, call


# running statistics moved twice, once in forward and once in the replay


@pytest.mark.parametrize("choose", [recompute_each, recompute_together])
def test_batch_norm_counts_a_step_once_under_recompute(choose):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(3)]
    model = Stack(layers)
    same_under(model, (torch.randn(8, WIDTH),), choose, steps=3)
    assert [layer[1].num_batches_tracked.item() for layer in model.layers] == [3, 3, 3]


# Hugging Face layers return tuples and pass `out[0]`, or a full slice, on: it was not seen to be the result, and was held


def layers():
    return [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3)]


@pytest.mark.parametrize(
    "between", [None, lambda x: x[:], lambda x: x[..., :], lambda x: x.view(x.shape), lambda x: x[:, : WIDTH // 2].repeat(1, 2)]
)
def test_a_full_slice_between_the_blocks_of_a_segment(between):
    torch.manual_seed(0)
    same_under(Stack(layers(), between), (torch.randn(8, WIDTH),), recompute_together)


def test_a_result_changed_in_place_between_the_blocks_of_a_segment_is_not_taken_for_the_result():
    torch.manual_seed(0)
    model = Stack(layers(), lambda x: x.mul_(2))
    x = torch.randn(8, WIDTH)
    reference = copy.deepcopy(model)
    reference(x).backward()
    trace = holdall.trace(model, x)
    plan = finish(Nop(), problem_for(trace), recompute_each(trace))
    joined = [Recompute.of(trace, [b for b in trace.blocks if b.saves])]
    for actions in (plan.actions, joined):
        model.zero_grad()
        with holdall.apply(finish(Nop(), problem_for(trace), actions), model, enforce=False):
            model(x).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def test_which_tensors_count_as_a_result():
    made = torch.randn(4, 6)
    result = Result(made)
    assert result.equals(made)
    assert result.equals(made[:])
    assert result.equals(made.view(4, 6))
    assert not result.equals(made.view(6, 4))
    assert not result.equals(made[:2])
    assert not result.equals(made.t())
    assert not result.equals(made.clone())
    made.mul_(2)
    assert not result.equals(made)
    assert not result.equals(made[:])


def test_a_segment_holds_a_result_that_was_changed_and_not_one_that_was_not():
    layer = nn.Linear(WIDTH, WIDTH)
    for change, kind in ((lambda x: x[:], Made), (lambda x: x.mul_(2), None)):
        segment = Segment()
        out, _ = segment.run(layer, layer.forward, (torch.randn(8, WIDTH),), {})
        _, second = segment.run(layer, layer.forward, (change(out),), {})
        assert isinstance(second.inputs[0], Made) == (kind is Made)


# a block that ends in relu saves its own output, which the next block holds too: it must not leave


class EndsInRelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return torch.relu(self.down(torch.relu(self.up(x))))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("which", [slice(None), slice(0, 1), slice(1, 2), slice(2, 3)])
def test_an_offloaded_block_that_saves_its_own_output(overlap, which):
    torch.manual_seed(0)
    model = Stack([EndsInRelu() for _ in range(3)])

    def choose(trace):
        return [Offload.of(trace, b, overlap=overlap) for b in [b for b in trace.blocks if b.saves][which]]

    harness = same_under(model, (torch.randn(8, WIDTH),), choose)
    assert far_peak(harness) == harness.plan.predicted.peak["far"]
    assert far_used(harness) == 0


# a segment was run again before the weights of its first blocks had come back


def test_segments_of_blocks_whose_weights_come_and_go_are_not_planned():
    import holdall
    from holdall.testing.worlds import machine

    model = Stack([nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(2)])
    trace = holdall.trace(model, torch.randn(64, WIDTH), optimizer=torch.optim.AdamW(model.parameters()))
    with pytest.raises(holdall.Infeasible) as refusal:  # it said Illegal
        holdall.plan(trace, budget=1, hardware=machine(), allow=("recompute", "place"))
    holdall.plan(trace, budget=refusal.value.smallest, hardware=machine(), allow=("recompute", "place"))


def test_narrow_parameters_on_the_host_are_updated_by_their_own_optimizer():
    """The fast kernel is for float32; it was given bfloat16."""
    torch.manual_seed(0)
    model = Stack([nn.Linear(WIDTH, WIDTH) for _ in range(3)]).bfloat16()
    reference, batch = copy.deepcopy(model), torch.randn(4, WIDTH).bfloat16()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (model, reference)]
    trace = holdall.trace(model, batch, optimizer=optimizers[0])
    plan = finish(Nop(), problem_for(trace), [Place.all(trace, update="host", when="overlap_forward")])
    with holdall.apply(plan, model, optimizers[0]):
        for trained, optimizer in zip((model, reference), optimizers, strict=True):
            for _ in range(3):
                trained(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_stay_ends_with_the_last_of_its_own_moments_not_of_all():
    """A block's input is held by eager code for a while, offloaded, and held again: only the second hold was seen."""
    model, _ = family("convnet")
    batch = (torch.randn(8, 3, 24, 24), torch.randint(0, 10, (8,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    trace = holdall.trace(model, batch, optimizer=optimizer)
    blocks = [b for b in trace.blocks if b.saves and b.backward is not None]
    plan = finish(Nop(), problem_for(trace), [Offload.of(trace, b, overlap=False) for b in blocks])
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:
        train(model, batch, optimizer, 2)
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]


def test_gradients_are_used_up_one_by_one_although_the_heads_was_made_in_forward():
    """A chunked head saves the gradient of its weights, which lives on: every gradient after it seemed to be held as long."""
    from holdall import models
    from holdall.actions.in_backward import moments

    pytest.importorskip("transformers")
    source = models.describe("tiny-llama")
    model, batch = models.build(source), models.sample_batch(source, batch=2, seq=16)
    trace = holdall.trace(model, batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), head=8)
    gone = sorted(moments(trace).values())
    assert gone[len(gone) // 2] < gone[-1] - (gone[-1] - gone[0]) // 4


def test_a_batch_that_is_a_piece_of_something_larger_keeps_all_of_it_in_memory():
    """Only the piece was counted; two pieces of one storage are one storage."""
    torch.manual_seed(0)
    model = Stack([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
    data = torch.randn(64, WIDTH)
    batch = (data[8:12],)
    trace = holdall.trace(model, batch)
    assert [t.nbytes for t in trace.tensors.values() if t.name.startswith("batch.")] == [data.nbytes]
    plan = holdall.plan(trace, planner="nop", hardware=machine())
    with holdall.apply(plan, model) as harness:
        model(*batch).backward()
    assert harness.step_peaks == [plan.predicted.peak["cpu"]]


@pytest.mark.parametrize("planner", ["capuchin", "tsplit"])
def test_planners_of_swaps_plan_for_a_machine_without_a_host(planner):
    """They priced copies to where the tensors are, and ended in a ValueError."""
    there = machine()
    trace = chain([30, 12, 45, 8])
    budget = holdall.plan(trace, planner="nop", hardware=there).predicted.peak["cpu"] * 9 // 10
    plan = holdall.plan(trace, planner=planner, hardware=replace(there, tiers=there.tiers[:1]), budget=budget)
    assert plan.actions and not plan.predicted.traffic and plan.predicted.peak["cpu"] <= budget
