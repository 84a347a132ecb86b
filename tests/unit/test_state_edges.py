"""What loops do besides stepping, while model states are placed: each is done with and without a plan, and must be the same."""

import copy
import os
import threading
import time
from functools import cache

import pytest
import torch

import holdall
from holdall.actions.place import Place, streamable
from holdall.errors import Infeasible, OverBudget, Unsupported
from holdall.planners._finish import finish
from holdall.planners.nop import Nop
from holdall.runtime.harness import Harness
from holdall.runtime.updating import Updater
from holdall.testing.contracts import problem_for
from holdall.testing.worlds import family, machine
from holdall.tiers.far import Far
from holdall.types import Problem

KINDS = {
    "device": ("resident", "device"),
    "host": ("resident", "host"),
    "through": ("resident", "through"),
    "streamed": ("streamed", "host"),
}
PLACES = ["host step", "host spill", "through step", "through spill", "streamed step", "streamed spill", "mixed spill"]
every_place = pytest.mark.parametrize("place", PLACES)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return x + torch.nn.functional.dropout(self.down(self.up(self.norm(x)).relu()), 0.1, self.training)


class Net(torch.nn.Module):
    """Four units. `spare` is not used; `tied`: the head is the embedding."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))
        self.head = torch.nn.Linear(8, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def net(tied=False):
    torch.manual_seed(0)
    return Net(tied)


def frozen():
    """A wholly frozen block, and one of which a part is."""
    model = net()
    for p in (*model.embed.parameters(), *model.layers[1].parameters(), model.layers[2].up.weight):
        p.requires_grad_(False)
    return model


def with_spare():
    """A parameter that no forward uses, inside of a block, and a module of such."""
    model = net()
    model.layers[1].spare = torch.nn.Parameter(torch.ones(5))
    model.unused = torch.nn.Linear(8, 8)
    return model


def with_lora():
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    model, _ = family("tiny-llama")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    torch.manual_seed(0)
    return peft.get_peft_model(model, config).train()


def ids(n=0, rows=2):
    return torch.randint(0, 16, (rows, 4), generator=torch.Generator().manual_seed(n))


def adamw(model):
    """Two groups, and frozen parameters in them too."""
    params = list(model.parameters())
    groups = [{"params": [p for p in params if p.dim() > 1]}, {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


@cache
def traced(make, precision=None):
    """(model, trace); the model is to be copied."""
    model = make()
    return model, holdall.trace(model, ids(), optimizer=adamw(model), precision=precision)


def place_of(trace, place):
    """"host spill": every unit that allows it, updated so and then; "mixed": all kinds in turn."""
    kind, when = place.split()
    can = streamable(trace)
    turn = list(KINDS.values()) if kind == "mixed" else [KINDS[kind]]
    rows = {u.name: turn[n % len(turn)] for n, u in enumerate(trace.units)}
    return Place.of(trace, {u: ("resident" if u not in can else w, d) for u, (w, d) in rows.items()}, when=when, share=False)


def planned(make, place, precision=None):
    trace = traced(make, precision)[1]
    return finish(Nop(), problem_for(trace), [place_of(trace, place)])


def applied(make, place, model, optimizer):
    return Harness(planned(make, place), model, optimizer, store=Far())


def fresh(make):
    model = copy.deepcopy(traced(make)[0])
    return model, adamw(model)


def states(model, optimizer):
    return copy.deepcopy({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})


def differences(mine, theirs, path=""):
    """Paths at which two nests of dicts, lists, tensors and values are not the same, bit for bit."""
    if isinstance(theirs, dict):
        if not isinstance(mine, dict) or mine.keys() != theirs.keys():
            return [f"{path}: keys"]
        return [d for k in theirs for d in differences(mine[k], theirs[k], f"{path}/{k}")]
    if isinstance(theirs, (list, tuple)):
        if len(mine) != len(theirs):
            return [f"{path}: length"]
        return [d for n, (a, b) in enumerate(zip(mine, theirs, strict=True)) for d in differences(a, b, f"{path}/{n}")]
    if isinstance(theirs, torch.Tensor):
        same = isinstance(mine, torch.Tensor) and mine.dtype == theirs.dtype and torch.equal(mine, theirs)
        return [] if same else [path]
    return [] if mine == theirs else [path]


def backward(model, n=0):
    torch.manual_seed(n)
    loss = model(ids(n))
    loss.backward()
    return loss.item()


def step(model, optimizer, n):
    """One plain step, clipped."""
    seen = [backward(model, n), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()]
    optimizer.step()
    optimizer.zero_grad()
    return seen


def steps(model, optimizer, first=0, last=3):
    return [step(model, optimizer, n) for n in range(first, last)]


def assert_the_same(make, place, loop):
    """The loop with and without a plan: what it saw, and all states, from inside and after."""
    reference, plain = fresh(make)
    expected = loop(reference, plain), states(reference, plain)
    model, optimizer = fresh(make)
    with applied(make, place, model, optimizer):
        seen = loop(model, optimizer)
        inside = states(model, optimizer)
    assert differences((seen, inside), expected) == []
    assert differences(states(model, optimizer), expected[1]) == []


@pytest.fixture
def slow_host(monkeypatch):
    """Updates on the host come late: who does not wait for them sees the old values."""
    submit = Updater.submit

    def later(self, job):
        return submit(self, lambda: (time.sleep(0.03), job())[1])

    monkeypatch.setattr(Updater, "submit", later)


# models


@every_place
def test_tied_weights_are_one_parameter_throughout(place):
    def tied():
        return net(tied=True)

    def loop(model, optimizer):
        seen = steps(model, optimizer)
        assert model.head.weight is model.embed.weight
        return seen

    globals()["tied"] = tied
    assert_the_same(_tied, place, loop)


def _tied():
    return net(tied=True)


@every_place
def test_frozen_weights_stay_and_the_others_train(place):
    def loop(model, optimizer):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        seen = steps(model, optimizer)
        for name, p in model.named_parameters():
            assert torch.equal(p, before[name]) == (not p.requires_grad), name
            assert p.requires_grad == dict(traced(frozen)[0].named_parameters())[name].requires_grad
        return seen

    assert_the_same(frozen, place, loop)
