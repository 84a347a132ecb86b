"""`mesh="auto"`: a pipeline for the ranks that run is chosen once, keeps the budget, and trains as one process does."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdall.pipelines
from holdall.errors import Infeasible, InvalidInput
from holdall.testing.ranks import on_ranks

LAYERS, WIDTH, ROWS, LENGTH, STEPS = 8, 32, 16, 4, 3
HELD = 64  # bytes: a thread of gloo may hold what was summed for a moment after its collective is over
CASES = {
    "plenty": {"budget": "1GiB"},
    "tight": {"budget": 480_000},
    "placed": {"budget": 430_000, "place": True, "offload": True},
    "counted": {"budget": "1GiB", "micro_batches": 4},
}


class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        inner = WIDTH * (1 + n % 3)
        self.a, self.norm, self.b = nn.Linear(WIDTH, inner), nn.LayerNorm(inner), nn.Linear(inner, WIDTH)

    def forward(self, x):
        return x + self.b(torch.tanh(self.norm(self.a(x))))


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(Block(n) for n in range(LAYERS))).double()


def batch(seed):
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, LENGTH, WIDTH, generator=made, dtype=torch.float64) for _ in range(2)]


def rule(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def whole(t):
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def plain():
    """Gradients of the first step, and weights after the last, clipped."""
    model = build()
    optimizer, gradients = rule(model.parameters()), {}
    for step in range(STEPS):
        inputs, targets = batch(step)
        nn.functional.mse_loss(model(inputs), targets).backward()
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters()}
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return gradients, {name: p.detach() for name, p in model.named_parameters()}


def train(asked):
    model = build()
    torch.manual_seed(1 + dist.get_rank())
    before = torch.get_rng_state()
    pipe = holdall.pipelines.start(model, loss=nn.functional.mse_loss, mesh="auto", sample=batch(0), optimizer=rule, **asked)
    same = torch.equal(before, torch.get_rng_state())  # nothing was drawn, also not by trials
    optimizer, gradients = pipe.optimizer(), {}
    for step in range(STEPS):
        inputs, targets = batch(step)
        pipe.step(*pipe.part(inputs, targets))
        gradients = gradients or {name: whole(p.grad) for name, p in pipe.named_parameters()}
        pipe.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    said = pipe.report()
    sizes = {name: size for name, size in pipe.mesh.sizes.items() if size > 1}
    chosen = (pipe.pipeline.name, pipe.pipeline.micro_batches, pipe.bounds, sizes, pipe.mesh.sharing.ways)
    weights = {name: whole(p) for name, p in pipe.named_parameters()}
    treated = sum(way != "keep" for way in said.ways.values()) + len(said.placed)
    return chosen, gradients, weights, max(said.measured.values()), max(said.predicted.values()), treated, same


def refusals():
    given = {"loss": nn.functional.mse_loss, "sample": batch(0), "optimizer": rule, "mesh": "auto", "budget": "1GiB"}
    said = []
    for asked in (
        {"mesh": "best"},
        {"budget": None},
        {"cut": [4]},
        {"recompute": True},
        {"sample": [t[:2] for t in batch(0)]},
        {"budget": 100_000},
        {"mesh": None},
    ):
        with pytest.raises((InvalidInput, Infeasible)) as error:
            holdall.pipelines.start(build(), **{**given, **asked})
        said.append(str(error.value))
    return said


def everything():
    return {case: train(asked) for case, asked in CASES.items()}, refusals()


@pytest.fixture(scope="module")
def ran():
    return on_ranks(4, everything)


@pytest.fixture(scope="module")
def expected():
    return plain()


@pytest.mark.parametrize("case", CASES)
def test_the_chosen_pipeline_trains_as_one_process(ran, expected, case):
    seen = set()
    for cases, _ in ran:
        _, gradients, weights, *_ = cases[case]
        for found, wanted in ((gradients, expected[0]), (weights, expected[1])):
            for name, t in found.items():
                assert (t - wanted[name]).abs().max() <= 1e-12 * wanted[name].abs().max(), name
        seen |= weights.keys()
    assert seen == expected[1].keys()


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_take_the_same_and_keep_the_budget(ran, case):
    budget = {"1GiB": 2**30}.get(CASES[case]["budget"], CASES[case]["budget"])
    assert len({str(cases[case][0]) for cases, _ in ran}) == 1
    (_, micro_batches, _, sizes, _), *_ = ran[0][0][case]
    assert sizes["pp"] >= 2 and sizes["pp"] * sizes.get("dp", 1) == 4
    assert case != "counted" or micro_batches == 4
    for cases, _ in ran:
        _, _, _, measured, predicted, _, is_random_as_before = cases[case]
        assert measured - HELD <= predicted <= budget and is_random_as_before
    treated = any(cases[case][5] for cases, _ in ran)
    assert (
        treated or case != "placed"
    )  # which no plan fits by itself; the other tight budget some do, whose times differ little
    assert not treated or budget < 2**30


def test_what_cannot_be_chosen_is_refused_in_one_line(ran):
    for _, (name, budget, cut, recompute, rows, tight, none) in ran:
        assert "best" in name and 'mesh="auto" looks for a pipeline that keeps a budget' in budget
        assert "chooses what `cut` says" in cut and "chooses what `recompute` says" in recompute
        assert "2 rows for 4 ranks" in rows
        assert "pipelines that were tried take" in tight and "use a budget of" in tight
        assert "needs a number of micro-batches" in none
