"""Li et al., "DISTFLASHATTN" (arXiv 2310.03294): recomputation that ends at attention, on one device."""

import copy
import functools
import gc

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import holdall
from holdall.planners.distflashattn import Distflashattn
from holdall.testing.contracts import problem_for, traced, train
from holdall.testing.worlds import machine

ROWS, LENGTH, WIDTH, HEADS = 2, 48, 32, 4


@functools.cache
def _traced(name):
    return traced(name)


def world(name):
    """A family's model, batch, optimizer and trace; traced once."""
    model, batch, _, trace = _traced(name)
    model = copy.deepcopy(model)
    return model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3), trace


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, h // HEADS).permute(2, 0, 3, 1, 4)
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(o.transpose(1, 2).reshape(b, s, h)))
        return x + self.drop(self.down(torch.tanh(self.up(self.norm2(x)))))


class Stack(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(n))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


class Counting(TorchDispatchMode):
    """How often attention and the products with weights were called in forward."""

    def __init__(self):
        super().__init__()
        self.attention = self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.attention += "scaled_dot_product" in name and "backward" not in name
        self.products += name == "aten.addmm.default"  # those with a bias: up and down
        return func(*args, **(kwargs or {}))


def make(n):
    torch.manual_seed(0)
    model, x = Stack(n), torch.randn(ROWS, LENGTH, WIDTH)
    return model, x, holdall.trace(model, x)


def planned(trace, **options):
    return holdall.plan(trace, planner="distflashattn", hardware=machine(), **options)


def held(n):
    """Bytes measured after forward, beside the weights."""
    model, x, trace = make(n)
    plan = planned(trace)
    gc.collect()
    with holdall.apply(plan, model) as harness:
        loss = model(x)
        gc.collect()
        live = harness.ledger.live - sum(p.nbytes for p in model.parameters())
        loss.backward()
    return live


def test_a_layer_holds_its_input_and_attentions_output_and_log_sum_exp():
    """Claim (3): nothing more, measured: a model of three layers against one of two."""
    hidden = ROWS * LENGTH * WIDTH * 4
    lse = ROWS * HEADS * LENGTH * 4
    assert 0 < held(3) - held(2) <= hidden + hidden + lse


@pytest.mark.parametrize("last", [True, False])
def test_attention_runs_once_and_gradients_are_the_same_bits(last):
    """Claim (3): one attention forward a layer a step; of the last layer what follows attention may be held."""
    n = 3
    model, x, trace = make(n)
    reference = copy.deepcopy(model)
    torch.manual_seed(1)
    with Counting() as plain:
        reference(x).backward()
    plan = planned(trace, last=last)
    with holdall.apply(plan, model) as harness, Counting() as counted:
        torch.manual_seed(1)
        model(x).backward()
    assert counted.attention == plain.attention == n
    assert plain.products == 2 * n
    assert counted.products == (4 * n if last else 4 * n - 2)
    assert harness.step_peaks == [plan.predicted.peak["cpu"]]
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def test_the_same_tensors_are_recomputed_as_by_loongtrain():
    """With layers as the unit, both rules come to the same set; they differ in what they do with the end."""
    _, _, trace = make(3)
    other = holdall.plan(trace, planner="loongtrain", hardware=machine())
    assert planned(trace).actions == other.actions
    assert planned(trace, last=False).actions[:-1] == other.actions[:-1]
    assert planned(trace, last=False).predicted.recompute_seconds < other.predicted.recompute_seconds


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "convnet"])
def test_real_models_train_to_the_same_weights(name):
    model, batch, optimizer, trace = world(name)
    reference = copy.deepcopy(model)
    expected = train(reference, batch, torch.optim.AdamW(reference.parameters(), lr=1e-3), 2)
    plan = Distflashattn(last=False)(problem_for(trace))
    with holdall.apply(plan, model, optimizer) as harness:
        assert train(model, batch, optimizer, 2) == expected
    assert all(torch.equal(v, reference.state_dict()[k]) for k, v in model.state_dict().items())
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]
    assert harness.notes == []
