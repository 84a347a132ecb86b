"""Gu et al., "LoongTrain" (arXiv 2406.18485): selective checkpoint++, on one device."""

import copy
import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import holdall
from holdall.planners.loongtrain import Loongtrain
from holdall.testing.contracts import problem_for, traced, train
from holdall.testing.worlds import machine


@functools.cache
def _traced(name):
    return traced(name)


def world(name):
    """A family's model, batch, optimizer and trace; traced once."""
    model, batch, _, trace = _traced(name)
    model = copy.deepcopy(model)
    return model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3), trace


class Attentions(TorchDispatchMode):
    """Counts attention's products: the fused kernel, or, where it is written out, batched ones (those of backward too)."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.ran = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran += str(func) == self.name
        return func(*args, **(kwargs or {}))


FUSED = "aten._scaled_dot_product_flash_attention_for_cpu.default"


@pytest.mark.parametrize(("name", "op", "count"), [("tiny-llama", FUSED, 4), ("tiny-gpt2", "aten.bmm.default", 4 * 6)])
def test_attention_runs_once_and_gradients_are_the_same_bits(name, op, count):
    """Claims (2): everything is recomputed but attention, which runs as often as in plain training."""
    model, batch, optimizer, trace = world(name)

    def step():
        model.zero_grad()
        torch.manual_seed(1)
        with Attentions(op) as counted:
            model(**batch).loss.backward()
        return counted.ran, [p.grad.clone() for p in model.parameters()]

    plain, expected = step()
    assert plain == count
    plan = holdall.plan(trace, planner="loongtrain", hardware=machine())
    assert len(plan.actions) == 4
    assert all(a.name == "reschedule" for a in plan.actions)  # nothing of a block runs again that is not needed
    with holdall.apply(plan, model, optimizer) as harness:
        ran, got = step()
    assert ran == plain
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
    assert harness.notes == []
    full = holdall.plan(trace, planner="chen", variant="all", last=True, hardware=machine())
    with holdall.apply(full, model, optimizer):
        assert step()[0] > plain  # what the count would say if attention ran again
    assert plan.predicted.recompute_seconds < full.predicted.recompute_seconds


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
def test_two_micro_batches_under_way_give_the_right_gradients(name):
    """Claim (4): what is kept belongs to a call, so forwards may follow each other before the backwards, in any order."""
    model, batch, optimizer, trace = world(name)
    other = {k: v.flip(0).clone() for k, v in batch.items()}

    def gradients(order):
        model.zero_grad()
        torch.manual_seed(1)
        losses = [model(**batch).loss, model(**other).loss]
        for n in order:
            losses[n].backward()
        return [loss.item() for loss in losses], [p.grad.clone() for p in model.parameters()]

    for order in ((0, 1), (1, 0)):
        losses, expected = gradients(order)
        with holdall.apply(Loongtrain()(problem_for(trace)), model, optimizer):
            again, got = gradients(order)
        assert again == losses
        assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "convnet"])
def test_real_models_train_to_the_same_weights(name):
    model, batch, optimizer, trace = world(name)
    reference = copy.deepcopy(model)
    expected = train(reference, batch, torch.optim.AdamW(reference.parameters(), lr=1e-3), 2)
    plan = Loongtrain()(problem_for(trace))
    with holdall.apply(plan, model, optimizer) as harness:
        assert train(model, batch, optimizer, 2) == expected
    assert all(torch.equal(v, reference.state_dict()[k]) for k, v in model.state_dict().items())
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]
    assert harness.notes == []
    if name == "convnet":
        assert "no attention" in plan.why[0]
