"""Optimizer states of layers of a pipeline in host memory: weights, bytes, checkpoints and refusals."""

import tempfile

import pytest
import torch
from torch import nn

import holdall
import holdall.pipelines
from holdall.errors import InvalidInput, Unsupported
from holdall.runtime.budget.ledger import Ledger
from holdall.testing.chaos import chaos
from holdall.testing.ranks import on_ranks

LAYERS, WIDTH, N, ROWS, STEPS = 8, 8, 4, 16, 3
RULES = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "groups": lambda parameters: torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1, "amsgrad": True},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-2},
        ],
        lr=1e-2,
        fused=True,
    ),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}
CASES = {
    "all": ("1f1b", {"place": True}, "adamw"),
    "some": ("interleaved", {"place": [0, 3, 6]}, "groups"),
    "first": ("zb_h1", {"place": [0]}, "sgd"),
    "rows": ("gpipe", {"place": [1, 2, 7]}, "adafactor"),
    "twins": ("chimera", {"place": True}, "adamw"),
    "saved": ("1f1b", {"place": [0, 5], "recompute": [0, 1], "offload": [4]}, "adamw"),
}


class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        inner = WIDTH * (1 + n % 3)
        self.a, self.norm, self.b = nn.Linear(WIDTH, inner), nn.LayerNorm(inner), nn.Linear(inner, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.b(self.drop(torch.tanh(self.norm(self.a(x)))))


def build():
    torch.manual_seed(0)
    made = nn.Sequential(*(Block(n) for n in range(LAYERS)))
    made[3].norm.bias.requires_grad_(False)
    return made


def batch(seed):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=made), torch.randn(ROWS, WIDTH, generator=made)


def begun(schedule, rule, **asked):
    pipe = holdall.pipelines.start(
        build(), schedule=schedule, micro_batches=N, loss=nn.functional.mse_loss, sample=batch(0), **asked
    )
    optimizer = pipe.optimizer(RULES[rule])
    return pipe, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def train(pipe, optimizer, scheduler, steps=range(STEPS)):
    """Two batches a step, clipped."""
    means = []
    for step in steps:
        torch.manual_seed(step)
        means += [pipe.step(*batch(2 * step + n + pipe.replica)).item() for n in range(2)]
        assert pipe.clip_grad_norm_(0.05) > 0.05
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return means


def values(pipe, optimizer):
    """Weights and states, copied."""
    states = [{k: torch.as_tensor(v).clone() for k, v in optimizer.state[p].items()} for p in pipe.parameters()]
    return [p.detach().clone() for p in pipe.parameters()], states


def ran(case):
    schedule, asked, rule = CASES[case]
    found = []
    for placed in (False, True):
        given = {k: v for k, v in asked.items() if placed or k != "place"}
        pipe, optimizer, scheduler = begun(schedule, rule, **given)
        found.append((train(pipe, optimizer, scheduler), *values(pipe, optimizer)))
    return *found, pipe.placed and (pipe.placed.layers, pipe.placed.predicted, pipe.placed.used)


def measured():
    """Bytes on the device between steps, and at most in a step of the optimizer; and what the host has."""
    found = []
    for place in (None, True):
        pipe, optimizer, scheduler = begun("1f1b", "adamw", place=place)
        train(pipe, optimizer, scheduler, range(1))
        pipe.step(*batch(9))
        seed = [t for p in pipe.parameters() for t in (p, p.grad) if t is not None]
        held = [t for p in pipe.parameters() for t in optimizer.state[p].values()]
        counters = [t for t in held if not t.dim()]
        with Ledger(seed=[*seed, *(counters if place else held)]) as ledger:
            before = ledger.live
            optimizer.step()
            found.append((before, ledger.live, ledger.peak))
    states = sum(2 * p.nbytes for p in pipe.parameters() if p.requires_grad)
    largest = max(p.nbytes for p in pipe.parameters())
    return found, states, largest, (pipe.placed.predicted, pipe.placed.used, pipe.placed.passing)


def resumed(folder):
    """Two steps, a checkpoint, two more; the same from the checkpoint, placed and not; and by `load_state_dict`."""
    pipe, optimizer, scheduler = begun("1f1b", "adamw", place=[0, 2, 5, 7])
    train(pipe, optimizer, scheduler, range(2))
    holdall.save_checkpoint(folder, pipe, optimizer, step=2, scheduler=scheduler)
    said = {"state": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    weights = [p.detach().clone() for p in pipe.parameters()]
    said["state"] = {**said["state"], "state": {n: dict(s) for n, s in said["state"]["state"].items()}}
    kept = {n: {k: v.clone() for k, v in s.items()} for n, s in said["state"]["state"].items()}
    train(pipe, optimizer, scheduler, range(2, STEPS))
    found = [values(pipe, optimizer)]
    for place in (None, True):
        pipe, optimizer, scheduler = begun("1f1b", "adamw", place=place)
        holdall.load_checkpoint(folder, pipe, optimizer, scheduler=scheduler)
        train(pipe, optimizer, scheduler, range(2, STEPS))
        found.append(values(pipe, optimizer))
    pipe, optimizer, scheduler = begun("1f1b", "adamw", place=True)
    train(pipe, optimizer, scheduler, range(1))  # states that the loaded ones replace
    with torch.no_grad():
        for p, w in zip(pipe.parameters(), weights, strict=True):
            p.copy_(w)
    optimizer.load_state_dict({**said["state"], "state": kept})
    scheduler.load_state_dict(said["scheduler"])
    train(pipe, optimizer, scheduler, range(2, STEPS))
    found.append(values(pipe, optimizer))
    return found, pipe.placed.used == pipe.placed.predicted


def late_copies():
    found = []
    for delayed in (False, True):
        pipe, optimizer, scheduler = begun("1f1b", "adamw", place=True)
        if delayed:
            with chaos(seed=1):
                train(pipe, optimizer, scheduler, range(2))
                found.append(values(pipe, optimizer))
        else:
            train(pipe, optimizer, scheduler, range(2))
            found.append(values(pipe, optimizer))
    return found


def refusals():
    given = {"micro_batches": N, "loss": nn.functional.mse_loss}
    said = []
    for asked in ({"place": [8]}, {"place": True, "schedule": "pipedream", "optimizer": torch.optim.SGD}):
        with pytest.raises((InvalidInput, Unsupported)) as error:
            holdall.pipelines.start(build(), **given, **asked)
        said.append(str(error.value))
    pipe = holdall.pipelines.start(build(), **given, place=True)
    for wrong in (lambda: pipe.step(*batch(0)), lambda: pipe.optimizer(torch.optim.LBFGS)):
        with pytest.raises((InvalidInput, Unsupported)) as error:
            wrong()
        said.append(str(error.value))
    with pytest.raises(Unsupported) as error:
        pipe.optimizer(RULES["sgd"]).step(lambda: pipe.step(*batch(0)))
    return [*said, str(error.value)]


def everything(folder):
    return {case: ran(case) for case in CASES}, measured(), resumed(folder), late_copies(), refusals()


@pytest.fixture(scope="module")
def two():
    with tempfile.TemporaryDirectory() as folder:
        return on_ranks(2, everything, folder)


def same(found, expected):
    (weights, states), (others, their) = found, expected
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    for one, other in zip(states, their, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("case", CASES)
def test_weights_and_states_have_the_bits_of_an_optimizer_without_placing(two, case):
    asked = CASES[case][1]["place"]
    layers, frozen = set(), 0
    for cases, *_ in two:
        (means, *plain), (own_means, *own), placed = cases[case]
        assert means == own_means
        same(own, plain)
        frozen += sum(not state and not w.any() for w, state in zip(*own, strict=True))
        if placed is not None:
            layers |= set(placed[0])
            assert placed[1] == placed[2] > 0
    assert layers == (set(range(LAYERS)) if asked is True else set(asked))
    assert frozen == (2 if case == "twins" else 1)  # the frozen bias has no states, and is what it was


def test_the_device_holds_no_states_between_steps_and_those_of_one_parameter_in_a_step(two):
    for _, (found, states, largest, (predicted, used, passing)), *_ in two:
        (before, after, peak), (own_before, own_after, own_peak) = found
        assert predicted == used == states and passing == 2 * largest
        assert before - own_before == after - own_after == states
        assert own_after == own_before
        assert own_peak - own_before == passing + 2 * largest  # AdamW makes two temporaries of a parameter's size
        assert own_peak < peak


def test_checkpoints_and_state_dicts_hold_the_states_wherever_they_are(two):
    for _, _, (found, is_used), *_ in two:
        for other in found[1:]:
            same(other, found[0])
        assert is_used


def test_late_copies_change_nothing(two):
    for *_, found, _ in two:
        same(*found)


def test_what_does_not_work_is_refused_in_one_line(two):
    for *_, (number, versions, nobody, together, closure) in two:
        assert "`place` names layer 8, but the model's are 0 to 7" in number
        assert "`place` keeps states of whole parameters" in versions
        assert "no optimizer has been made" in nobody
        assert "LBFGS updates all parameters together" in together
        assert "computes gradients inside the step" in closure


MESH = {"pp": 2, "dp": 2}


def replicas():
    found = []
    for place in (None, [1, 4, 6]):
        pipe, optimizer, scheduler = begun("1f1b", "adamw", mesh=MESH, place=place)
        found.append((train(pipe, optimizer, scheduler), *values(pipe, optimizer)))
    with pytest.raises(Unsupported) as error:
        begun("1f1b", "adamw", mesh=MESH, shard="zero2", place=True)
    return *found, str(error.value)


def test_replicas_of_a_pipeline_place_states_too():
    for (means, *plain), (own_means, *own), refused in on_ranks(4, replicas):
        assert means == own_means
        same(own, plain)
        assert 'use shard="ddp"' in refused
