"""Pipelines that never flush, on 2 and 4 gloo ranks, against one process that does what their papers say."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import holdall.pipelines
from holdall.pipelines import pipeline, simulate
from holdall.testing.ranks import on_ranks

WIDTH, LAYERS, N = 8, 4, 8
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
}
CASES = [
    ("pipedream", "sgd"),
    ("pipedream", "adam"),
    ("pipedream_2bw", "momentum"),
    ("xpipe", "momentum"),
    ("xpipe", "adam"),
    ("xpipe:per_update=2", "adam"),
    ("xpipe:per_update=4", "adam"),
]


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def batch():
    made = torch.Generator().manual_seed(1)
    return torch.randn(2 * N, WIDTH, generator=made), torch.randn(2 * N, WIDTH, generator=made)


def loss(output, target):
    return ((output - target) ** 2).mean()


def steps(cases):
    found = []
    for name, rule in cases:
        pipe = holdall.pipelines.start(build(), schedule=name, micro_batches=N, loss=loss, optimizer=OPTIMIZERS[rule], cut=None)
        pipe.step(*batch())
        (stage,) = pipe.stages.values()
        weights = {key: p.detach() for key, p in pipe.named_parameters()}
        found.append((weights, stage.most, stage.used, stage.gaps))
    return found


@pytest.fixture(scope="module", params=[2, 4])
def ran(request):
    return request.param, on_ranks(request.param, steps, CASES)


class Emulated:
    """One stage of the emulator: its weights after every update, and what XPipe would predict from each."""

    def __init__(self, names, model, rule):
        self.names = names
        self.p = [nn.Parameter(dict(model.named_parameters())[n].detach().clone()) for n in names]
        self.optimizer = OPTIMIZERS[rule](self.p)
        self.history = [[p.detach().clone() for p in self.p]]
        self.slopes = [[torch.zeros_like(p) for p in self.p]]  # expected change of weights by an update

    def update(self, gradients):
        for p, g in zip(self.p, gradients, strict=True):
            p.grad = g
        self.optimizer.step()
        self.history.append([p.detach().clone() for p in self.p])
        self.slopes.append([self.slope(p) for p in self.p])

    def slope(self, p):
        state, group = self.optimizer.state[p], self.optimizer.param_groups[0]
        if "exp_avg" in state:
            t = state["step"].item()
            first = state["exp_avg"] / (1 - group["betas"][0] ** t)
            second = state["exp_avg_sq"] / (1 - group["betas"][1] ** t)
            return (group["lr"], first, second.sqrt() + group["eps"])
        if state.get("momentum_buffer") is None:
            return torch.zeros_like(p)
        return (group["lr"], state["momentum_buffer"].clone(), None)

    def ahead(self, version, updates):
        def moved(weight, slope):
            if not updates or not isinstance(slope, tuple):
                return weight
            lr, first, root = slope
            return weight - updates * lr * first if root is None else weight - updates * lr * first / root

        return [moved(w, s) for w, s in zip(self.history[version], self.slopes[version], strict=True)]


def emulate(name, rule, ranks):
    """Weights after all micro-batches, in one process: which version each stage used is written out by the paper's rule."""
    model = build()
    per = LAYERS // ranks
    keys = [[k for k, _ in model.named_parameters() if int(k.split(".")[0]) // per == s] for s in range(ranks)]
    stages = [Emulated(k, model, rule) for k in keys]
    size = {"pipedream": 1, "pipedream_2bw": ranks}.get(name) or int((name + "=1").split("=")[1])
    sums = [None] * ranks
    inputs, targets = batch()
    for m, (x, y) in enumerate(zip(inputs.chunk(N), targets.chunk(N), strict=True)):
        used, g = {}, m // size
        for s, stage in enumerate(stages):
            if name == "pipedream":  # w(t - P + 1 + s)
                values = stage.history[max(0, m - (ranks - 1 - s))]
            elif name == "pipedream_2bw":  # w(t - 1)
                values = stage.history[max(0, g - 1)]
            else:  # the weights when the mini-batch's first micro-batch came, moved to its own update
                there = max(0, g * size - (ranks - 1 - s)) // size
                values = stage.ahead(there, g - there)
            used |= {k: nn.Parameter(v.clone()) for k, v in zip(stage.names, values, strict=True)}
        loss(functional_call(model, used, (x,)), y).backward()
        for s, stage in enumerate(stages):
            new = [used[k].grad for k in stage.names]
            sums[s] = new if sums[s] is None else [a + b for a, b in zip(sums[s], new, strict=True)]
            if (m + 1) % size == 0:
                stage.update([g / size for g in sums[s]])
                sums[s] = None
    return {k: w for stage in stages for k, w in zip(stage.names, stage.history[-1], strict=True)}


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: "-".join(CASES[i]))
def test_weights_are_the_bits_of_the_emulator(ran, case):
    ranks, results = ran
    expected = emulate(*CASES[case], ranks)
    found = {key: w for result in results for key, w in result[case][0].items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: "-".join(CASES[i]))
def test_versions_at_once_are_those_simulated(ran, case):
    ranks, results = ran
    name, _ = CASES[case]
    measured = tuple(result[case][1] for result in results)
    assert measured == simulate(pipeline(name, ranks=ranks, micro_batches=N)).versions
    if name == "pipedream":
        assert measured == tuple(ranks - s for s in range(ranks))
    if name == "pipedream_2bw":
        assert max(measured) == 2


@pytest.mark.parametrize("size", [1, 2, 4])
def test_xpipe_predicts_over_the_updates_that_really_come_between(ran, size):
    ranks, results = ran
    case = CASES.index(("xpipe" if size == 1 else f"xpipe:per_update={size}", "adam"))
    for s, result in enumerate(results):
        steady = -(-(ranks - 1 - s) // size)  # ceil((P - 1 - s) / M)
        assert [min(steady, g) for g in range(N // size)] == result[case][3]
