"""Published planners by name through `fit`: plain training's losses, a peak under the budget and near the predicted one.

Claims about a GPU of rotor, pofo, rockmate, ProTrain and the planners that swap activations. Every test also runs on a CPU,
with smaller sizes, the bits of plain training and the far tier of a small machine.
"""

import gc
from functools import cache

import pytest
import torch

import holdall
from holdall.models.vgg import VGGConfig
from holdall.testing.worlds import machine

transformers = pytest.importorskip("transformers")

STEPS = 3
PLANNERS = {"rotor": {}, "pofo": {}, "rockmate": {"menus": "cut"}, "protrain": {}, "te_offload": {"elements": 1}}
PLANNERS |= {"tsplit": {"pieces": 1}, "swapadvisor": {"generations": 5}, "str": {"time_limit": 2.0}}
PLANNERS |= {"delta": {"director": "swap"}}  # all three ways take three times as long to plan
SWAP = {"capuchin": "gpt2", "te_offload": "gpt2", "memo": "gpt2", "yuan": "gpt2", "vdnn": "vgg", "autotm": "vgg"}
SWAP |= {"superneurons": "vgg", "str": "vgg", "swapadvisor": "vgg", "delta": "vgg", "tsplit": "gpt2", "flashneuron": "vgg"}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.fixture(autouse=True)
def same_bits():
    """The backward of an embedding adds in any order otherwise, and plain training differs from itself."""
    gc.collect()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def world(device, layers=None, family="gpt2"):
    """A GPT-2 (or VGG) and its batch: tiny on a CPU, and large enough on a GPU for activations to be most of its memory."""
    torch.manual_seed(0)
    if family == "vgg":
        rows, size, widths = (4, 16, (4, 8, 8)) if device == "cpu" else (64, 128, (64, 128, 256))
        shape = VGGConfig(image_size=size, num_labels=10, stages=[[w] * 2 for w in widths], hidden=16 * widths[0])
        images = torch.randn(rows, 3, size, size, device=device)
        return shape.make().to(device).train(), {"pixel_values": images, "labels": torch.arange(rows, device=device) % 10}
    width, count, rows, length = (32, 3, 4, 16) if device == "cpu" else (512, 8, 8, 512)
    config = transformers.GPT2Config(
        vocab_size=4 * width, n_embd=width, n_layer=layers or count, n_head=4, n_positions=length, attn_implementation="eager"
    )
    model = transformers.GPT2LMHeadModel(config).to(device).train()
    ids = torch.randint(0, 4 * width, (rows, length), device=device)
    return model, {"input_ids": ids, "labels": ids}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=next(model.parameters()).is_cuda)


def train(model, batch, optimizer):
    torch.manual_seed(0)  # dropout is on
    losses = []
    for _ in range(STEPS):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # no tensor is kept: it would count
    return torch.tensor(losses)


def hardware_of(device):
    return machine(overlap=True) if device == "cpu" else None


@cache
def traced(device, layers, family):
    model, batch = world(device, layers, family)
    return holdall.trace(model, batch, optimizer=adamw(model), device=device)


@cache
def plain_losses(device, layers, family):
    model, batch = world(device, layers, family)
    return train(model, batch, adamw(model))


def budget_for(name, device, share, layers=None, family="gpt2"):
    """Between the least that the planner needs and what plain training takes."""
    trace = traced(device, layers, family)
    hardware = hardware_of(device)
    home = "cpu" if device == "cpu" else "gpu"
    plain = holdall.plan(trace, planner="nop", hardware=hardware).predicted
    with pytest.raises(holdall.Infeasible) as refused:
        holdall.plan(trace, planner=name, budget=1, hardware=hardware, **PLANNERS.get(name, {}))
    least = refused.value.smallest
    return int(least + share * (max(plain.peak[home], plain.reserved or 0) - least))


def check(name, device, share, layers=None, family="gpt2"):
    """Run it; returns measured over predicted peak."""
    budget = budget_for(name, device, share, layers, family)
    expected = plain_losses(device, layers, family)
    model, batch = world(device, layers, family)
    gc.collect()
    optimizer = adamw(model)
    given = {"budget": budget, "planner": name, "hardware": hardware_of(device), "repeat": False, **PLANNERS.get(name, {})}
    with holdall.fit(model, optimizer, batch, **given) as harness:
        plan = harness.plan
        losses = train(model, batch, optimizer)
    assert plan.planner == name and plan.actions, "nothing was planned: the test shows nothing"
    if device == "cpu":
        assert torch.equal(losses, expected)
    else:  # the host's Adam rounds otherwise than the GPU's, by an ulp
        torch.testing.assert_close(losses, expected, rtol=2e-2, atol=0)
    home = "cpu" if device == "cpu" else "gpu"
    assert max(harness.step_peaks) <= budget
    return max(harness.step_peaks) / plan.predicted.peak[home]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name in PLANNERS if name not in SWAP])
def test_losses_are_plain_trainings_and_the_peak_is_under_the_budget(name, device):
    """Claims: rotor's measured peak is at most 1.03 of the predicted one; pofo's is within 3 %."""
    assert check(name, device, 0.4) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SWAP)
def test_a_swap_planner_trains_as_plain_training_does(name, device):
    assert check(name, device, 0.4, family=SWAP[name]) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("device", DEVICES)
def test_rockmate_stays_within_all_budgets_of_a_deeper_gpt2(device):
    """Claim: twelve layers of GPT-2 stay within the budget, over a sweep of budgets (one of them, four layers on a CPU)."""
    for share in (0.1,) if device == "cpu" else (0.9, 0.7, 0.5, 0.3, 0.1):
        check("rockmate", device, share, layers=4 if device == "cpu" else 12)
