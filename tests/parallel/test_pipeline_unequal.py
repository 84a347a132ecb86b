"""Stages with different numbers of ranks, on 3 ranks: rows of micro-batches are split over the ranks of a stage."""

import pytest
import torch
from torch import nn

import holdall
import holdall.pipelines
from holdall.pipelines.hybrid.plans import HybridPlan
from holdall.pipelines.hybrid.starting import start_call
from holdall.pipelines.hybrid.strategies import Strategy
from holdall.testing.ranks import on_ranks

LAYERS, WIDTH, N, ROWS, STEPS = 6, 8, 3, 36, 3
CLIP = 0.05  # of a norm that is larger
CASES = {
    "2 1": ("1f1b", [2, 1], {}),
    "1 2": ("gpipe", [1, 2], {"recompute": [1, 3], "offload": [4]}),
    "in rounds": ("interleaved", [2, 1], {"micro_batches": 2, "recompute": [0, 2, 3]}),
    "three": ("1f1b", [3], {}),
    "each": ("dapple", [1, 1, 1], {}),
}


class Block(nn.Module):
    """Hands on what it got beside what it made."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, given):
        x, first = given if isinstance(given, tuple) else (given, given)
        return x + self.b(torch.tanh(self.a(x))) * first, first


class Mixed(nn.Module):
    """What a row gives depends on others."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(x - x.mean(0))


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, given):
        return self.out(given[0])


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS - 1)), Last()).double()


def batch(step, rows=ROWS):
    made = torch.Generator().manual_seed(step)
    return [torch.randn(rows, WIDTH, generator=made, dtype=torch.float64) for _ in range(2)]


def loss(output, target):
    return nn.functional.smooth_l1_loss(output, target)


def optimizer_of(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(schedule, replicas, asked):
    given = {"micro_batches": N, "loss": loss, "sample": batch(0), "replicas": replicas} | asked
    pipe = holdall.pipelines.start(build(), schedule=schedule, **given)
    optimizer, losses, seen, norms = optimizer_of(pipe.parameters()), [], [], []
    for step in range(STEPS):
        losses.append(pipe.step(*batch(step, ROWS * (1 + step % 2))).item())  # other numbers of rows
        if pipe.saving is not None and step % 2 == 0:
            seen.append((pipe.saving.predicted, pipe.saving.held.most, pipe.saving.held.now))
        if step < STEPS - 1:
            norms.append(pipe.clip_grad_norm_(CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
    gradients = {key: p.grad for key, p in pipe.named_parameters()}
    return losses + norms, gradients, dict(pipe.named_parameters()), seen


def refusals():
    said = []
    given = {"micro_batches": N, "loss": loss, "sample": batch(0), "replicas": [2, 1]}
    for asked in (
        {"replicas": [2, 2]},
        {"replicas": [3, 0]},
        {"sample": None},
        {"mesh": {"pp": 3}},
        {"schedule": "zb_h1"},
        {"schedule": "chimera", "micro_batches": 2},
        {"model": nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), Last()).double()},
        {"model": nn.Sequential(Mixed(), Mixed(), Mixed()).double(), "cut": [1]},
        {"sample": batch(0, 9)},
    ):
        with pytest.raises(holdall.HoldallError) as error:
            holdall.pipelines.start(**{"model": build(), **given, **asked})
        said.append(str(error.value))
    pipe = holdall.pipelines.start(build(), **given)
    for rows in ([t[:9] for t in batch(0)], [t.view(ROWS // 2, 2, WIDTH) for t in batch(0)]):
        with pytest.raises(holdall.HoldallError) as error:
            pipe.step(*rows)
        said.append(str(error.value))
    return said


REFUSALS = (
    "`replicas` are [2, 2], and the process group has 3 ranks",
    "`replicas` are [3, 0]",
    "need a batch to look at",
    "`replicas` lays out all ranks",
    "`zb_h1` splits backward",
    "`chimera` splits backward, has copies",
    "`1` takes averages over rows",
    "compute something else when they are divided",
    "a micro-batch of 3 rows does not split over the 2 ranks of a stage",
    "a micro-batch of 3 rows does not split over the 2 ranks of a stage",
    "inputs of shape (18, 2, 8) are not like the sample's, (12, 8)",
)


def dropped():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    inputs = [torch.ones(2, WIDTH)] * 2
    pipe = holdall.pipelines.start(model, micro_batches=1, loss=loss, replicas=[2, 1], sample=inputs, cut=[2])
    masks = []
    for layer in pipe.modules[pipe.rank].children():
        if isinstance(layer, nn.Dropout):
            layer.register_forward_hook(lambda _, __, out: masks.append(out == 0))
    torch.manual_seed(1)
    pipe.step(*inputs)
    return masks


def planned():
    """A plan of unequal stages, by the call that it is shown with."""
    each = (Strategy(1, 2),) * 3 + (Strategy(1, 1, recompute=True),) * 3
    plan = HybridPlan(cut=(0, 3, 6), devices=(2, 1), strategies=each, micro_batches=N)
    model = build()
    call, why = start_call(plan, model)
    pipe = eval(call, {"holdall": holdall, "model": model, "loss": loss, "batch": batch(0)})
    pipe.step(*batch(0))
    return call, why, {key: p.grad for key, p in pipe.named_parameters()}


def everything():
    return {case: train(*asked) for case, asked in CASES.items()}, refusals(), dropped(), planned()


@pytest.fixture(scope="module")
def ran():
    return on_ranks(3, everything)


def plain(micro_batches, steps=STEPS):
    model, losses, norms = build(), [], []
    optimizer = optimizer_of(model.parameters())
    for step in range(steps):
        values = []
        for x, y in zip(*(t.chunk(micro_batches) for t in batch(step, ROWS * (1 + step % 2))), strict=True):
            value = loss(model(x), y)
            (value / micro_batches).backward()
            values.append(value.item())
        losses.append(sum(values) / len(values))
        if step < steps - 1:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses + norms, {key: p.grad for key, p in model.named_parameters()}, dict(model.named_parameters())


def near(found, expected):
    largest = max(t.abs().max().item() for t in expected.values())
    return all((found[key] - expected[key]).abs().max().item() <= 1e-14 * largest for key in found)


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_one_process(ran, case):
    asked = CASES[case][2]
    losses, gradients, weights = plain(asked.get("micro_batches", N))
    seen = set()
    for found, *_ in ran:
        own = found[case]
        assert own[0] == pytest.approx(losses, rel=1e-6) and min(losses[STEPS:]) > CLIP  # float32
        assert near(own[1], gradients) and near(own[2], weights)
        seen |= own[1].keys()
    assert seen == gradients.keys()


def test_ranks_of_a_stage_stay_alike(ran):
    first, second = (found["2 1"] for found, *_ in ran[:2])
    for part in (1, 2):
        assert all(torch.equal(t, second[part][key]) for key, t in first[part].items())


def test_autograd_holds_the_bytes_that_were_predicted(ran):
    for found, *_ in ran:
        for case in ("1 2", "in rounds"):
            assert found[case][3] and all((most, now) == (predicted, 0) for predicted, most, now in found[case][3])


def test_a_plan_of_unequal_stages_is_run_by_its_call(ran):
    _, gradients, _ = plain(N, steps=1)
    for *_, (call, why, found) in ran:
        assert not why and call == (
            'holdall.pipelines.start(model, loss=loss, schedule="one_f_one_b", micro_batches=3, cut=[3], replicas=[2, 1], '
            "recompute=[3, 4, 5], sample=batch)"
        )
        assert near(found, gradients)


def test_ranks_of_a_stage_drop_other_rows(ran):
    first, second = (masks[-1] for _, _, masks, _ in ran[:2])
    assert first.shape == second.shape == (1, WIDTH) and not torch.equal(first, second)


def test_what_does_not_work_is_refused_in_one_line(ran):
    for _, said, *_ in ran:
        assert len(said) == len(REFUSALS)
        for found, part in zip(said, REFUSALS, strict=True):
            assert part in found.splitlines()[0]
