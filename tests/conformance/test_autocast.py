"""Loops under `torch.autocast`: traced as they run, the same bits as plain autocast training, the peak as predicted."""

import copy
import logging

import pytest
import torch
from torch import nn

import holdall
from holdall.errors import Infeasible, InvalidInput
from holdall.planning.to_programs import by_programs
from holdall.problem import make_problem
from holdall.testing.worlds import family, machine
from holdall.tracing.autocast import outside_autocast

BF16 = torch.bfloat16


def bf16(enabled=True):
    return torch.autocast("cpu", BF16, enabled=enabled)


def call(model, batch):
    out = model(**batch) if isinstance(batch, dict) else model(*batch)
    return out if isinstance(out, torch.Tensor) else out.loss


def train(model, batch, optimizer, steps=3, enabled=True):
    losses = []
    torch.manual_seed(1)
    for _ in range(steps):
        with bf16(enabled):
            loss = call(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain(model, batch, **how):
    model = copy.deepcopy(model)
    losses = train(model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3), **how)
    return model, losses


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def peak(trace):
    return holdall.plan(trace, hardware=machine()).predicted.peak["cpu"]


# traces


def test_a_trace_is_made_under_the_autocast_of_the_context():
    model, batch = family("tied")
    bare = holdall.trace(model, batch)
    with bf16():
        inside = holdall.trace(model, batch)
        off = holdall.trace(model, batch, autocast=False)
    asked = holdall.trace(model, batch, autocast="bf16")
    assert bare.about.autocast is None and inside.about.autocast == "bfloat16"
    assert inside.fingerprint == asked.fingerprint != bare.fingerprint == off.fingerprint
    products = [op for op in inside.ops if "mm" in op.site.op]
    assert products and all(op.dtype == "bfloat16" for op in products)
    casts = [t for t in inside.tensors.values() if t.saved and t.dtype == "bfloat16" and t.shape == (64, 32)]
    assert casts  # of a weight, which the graph keeps until backward


def test_a_loss_that_enters_autocast_itself_is_what_was_traced():
    model, batch = family("tied")

    def loss(m, b):
        with bf16():
            return m(*b)

    traced = holdall.trace(model, batch, loss=loss)
    assert traced.about.autocast == "bfloat16"
    assert traced.fingerprint == holdall.trace(model, batch, autocast=True).fingerprint


def test_a_trace_leaves_autocast_as_it_was():
    model, batch = family("tied")
    x, linear = torch.randn(2, 4), nn.Linear(4, 4)
    with bf16():
        with torch.autocast("cpu", torch.float16):
            holdall.trace(model, batch)
            assert torch.get_autocast_dtype("cpu") == torch.float16
        assert torch.get_autocast_dtype("cpu") == BF16
        assert linear(x).dtype == BF16
        with outside_autocast():
            assert linear(x).dtype == torch.float32
        assert linear(x).dtype == BF16
    assert not torch.is_autocast_enabled("cpu")
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


@pytest.mark.parametrize("wrong", ["int8", torch.int8, "bf15"])
def test_what_autocast_cannot_cast_to_is_refused(wrong):
    model, batch = family("tied")
    with pytest.raises(InvalidInput, match="autocast") as refused:
        holdall.trace(model, batch, autocast=wrong)
    assert "bf16" in refused.value.hint


def test_a_gpu_that_is_not_here_casts_by_its_own_lists():
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    model, batch = family("tiny-gpt2")
    traced = holdall.trace(model, batch, device="cuda", autocast="bf16")
    assert traced.about.autocast == "bfloat16"
    norms = [op for op in traced.ops if "native_layer_norm.default" in op.site.op]
    attention = [op for op in traced.ops if "attention" in op.site.op]
    assert norms and all(traced.tensors[op.writes[0]].dtype == "float32" for op in norms)
    assert attention and all(op.dtype == "bfloat16" for op in attention)


# fit


@pytest.mark.parametrize("name", ["tied", "tiny-llama", "tiny-t5", "convnet", "branching"])
def test_bits_and_peak_under_autocast(name):
    model, batch = family(name)
    reference, expected = plain(model, batch)
    optimizer = adam(model)
    with holdall.fit(model, optimizer, batch, autocast="bf16") as harness:
        assert train(model, batch, optimizer) == expected
        report = harness.report()
    assert same(model, reference)
    assert harness.notes == []
    assert report.measured.peak == report.predicted.peak


@pytest.mark.parametrize("name", ["tied", "tiny-llama"])
@pytest.mark.parametrize("options", [{}, {"planner": "chen"}, {"planner": "zero_offload"}], ids=str)
def test_bits_and_peak_under_autocast_in_a_budget(name, options):
    model, batch = family(name)
    reference, expected = plain(model, batch)
    optimizer = adam(model)
    with bf16():
        traced = holdall.trace(model, batch, optimizer=optimizer)
        budget = int(0.8 * peak(traced))
        try:
            harness = holdall.fit(model, optimizer, batch, budget=budget, hardware=machine(), **options)
        except Infeasible as error:
            harness = holdall.fit(model, optimizer, batch, budget=error.smallest, hardware=machine(), **options)
    with harness:
        assert harness.plan.actions
        assert train(model, batch, optimizer) == expected
        report = harness.report()
    assert same(model, reference)
    assert report.fits
    assert abs(report.measured.peak["cpu"] / report.predicted.peak["cpu"] - 1) < 0.02
    assert not [n for n in harness.notes if "whole" in n or "autocast" in n]


@pytest.mark.parametrize("name", ["tied", "tiny-llama", "tiny-bert"])
def test_blocks_captured_op_by_op_are_those_that_were_traced(name):
    model, batch = family(name)
    reference, expected = plain(model, batch)
    optimizer = adam(model)
    traced = holdall.trace(model, batch, optimizer=optimizer, autocast="bf16")
    kept = holdall.plan(traced, hardware=machine(), planner="nop")
    made = by_programs(make_problem(traced, hardware=machine()), kept)
    assert any(action.name == "reschedule" for action in made.actions)
    with holdall.apply(made, model, optimizer) as harness:
        assert train(model, batch, optimizer) == expected
        report = harness.report()
    assert same(model, reference)
    assert harness.notes == []  # a block that is another than was planned would be recomputed whole, and noted
    assert report.measured.peak["cpu"] <= 1.02 * report.predicted.peak["cpu"]


# the loop runs under another autocast than was traced


def test_a_first_forward_under_autocast_is_planned_for(caplog):
    model, batch = family("tied")
    reference, expected = plain(model, batch)
    optimizer = adam(model)
    with caplog.at_level(logging.WARNING, "holdall"), holdall.fit(model, optimizer, batch) as harness:
        assert harness.plan.about.autocast is None
        state = torch.get_rng_state()
        with torch.no_grad():
            model(*batch)  # an evaluation is none of it
        torch.set_rng_state(state)
        assert harness.plan.about.autocast is None
        assert train(model, batch, optimizer) == expected
        assert harness.plan.about.autocast == "bfloat16"
        report = harness.report()
    assert same(model, reference)
    assert report.measured.peak == report.predicted.peak
    assert len(harness.notes) == 1 and "autocast to bfloat16" in harness.notes[0] and "without autocast" in harness.notes[0]


def test_a_first_forward_without_autocast_is_planned_for():
    model, batch = family("tied")
    reference, expected = plain(model, batch, enabled=False)
    optimizer = adam(model)
    with bf16():
        harness = holdall.fit(model, optimizer, batch, repeat=False)
    with harness:
        assert train(model, batch, optimizer, enabled=False) == expected
        report = harness.report()
    assert same(model, reference)
    assert report.measured.peak == report.predicted.peak
    assert len(harness.notes) == 1 and harness.plan.about.autocast is None


@pytest.mark.parametrize("how", [{"planner": "zero_offload"}, {"lengths": [16, 8]}, {"lengths": "auto"}], ids=str)
def test_placed_states_and_several_sizes_are_planned_anew(how):
    model, batch = family("tied")
    reference, expected = plain(model, batch)
    optimizer = adam(model)
    with holdall.fit(model, optimizer, batch, hardware=machine(), loss=lambda m, b: m(*b), **how) as harness:
        assert train(model, batch, optimizer) == expected
        assert harness.plan.about.autocast == "bfloat16"
        short = (batch[0][:, :8].contiguous(),)
        train(model, short, optimizer, steps=1)
        assert harness.plan.about.autocast == "bfloat16"
    train(reference, short, adam(reference), steps=0)
    assert len([n for n in harness.notes if "autocast" in n]) == 1


def test_a_later_change_is_said_once():
    model, batch = family("tied")
    optimizer = adam(model)
    with holdall.fit(model, optimizer, batch, autocast=True, enforce=False) as harness:
        train(model, batch, optimizer, steps=1)
        train(model, batch, optimizer, steps=2, enabled=False)
    assert len(harness.notes) == 1 and "will differ" in harness.notes[0]


def test_where_nothing_fits_under_the_autocast_of_the_loop_the_model_is_left_plain():
    model, batch = family("tied")
    reference, expected = plain(model, batch, enabled=False)
    optimizer = adam(model)
    with bf16():
        traced = holdall.trace(model, batch, optimizer=optimizer)
    narrow, wide = peak(traced), peak(holdall.trace(model, batch, optimizer=optimizer))
    assert narrow != wide
    planned, ran = (True, False) if narrow < wide else (False, True)
    harness = holdall.fit(model, optimizer, batch, autocast=planned, budget=min(narrow, wide), allow=[], hardware=machine())
    with pytest.raises(Infeasible), bf16(ran):
        call(model, batch)
    assert train(model, batch, optimizer, enabled=False) == expected
    assert same(model, reference)
    harness.close()


def test_the_loss_may_be_outside_and_the_gradients_scaled():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)])
    x, y = torch.randn(16, 32), torch.randn(16, 32)

    def run(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        losses = []
        for _ in range(3):
            with bf16():
                out = model(x)
            loss = nn.functional.mse_loss(out.float(), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    reference = copy.deepcopy(model)
    expected = run(reference, adam(reference))
    optimizer = adam(model)
    with holdall.fit(model, optimizer, (x, y), loss=lambda m, b: nn.functional.mse_loss(m(b[0]).float(), b[1])) as harness:
        assert run(model, optimizer) == expected
        report = harness.report()
    assert same(model, reference)
    assert harness.plan.about.autocast == "bfloat16" and report.fits
