"""Precision recipes: bytes per parameter as allocated, updates that arrive, a model given back as it came."""

import copy
import gc

import pytest
import torch
from torch import nn

import holdall
from holdall import precision
from holdall.errors import Infeasible, InvalidInput, MissingExtra
from holdall.precision import Recipe
from holdall.runtime.budget.ledger import Ledger
from holdall.testing.worlds import family

APART = ("fp8-torchao", "qat-int8", "qat-fp8", "layerwise", "nf4")  # through torchao; wants names of layers; wants frozen ones
NAMES = [name for name in precision.names() if name not in APART]


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def train(session, model, steps, x, y):
    losses = []
    for _ in range(steps):
        with session.autocast():
            loss = nn.functional.mse_loss(model(x).float(), y)
        session.backward(loss)
        session.step(clip=1.0)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_bytes_per_parameter_are_what_is_allocated(name, optimizer):
    said = precision.bytes_per_parameter(name, optimizer)
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    gc.collect()
    with Ledger(seed=[x, y]) as ledger:
        before = ledger.live
        model = make()
        made = optimizer(model.parameters(), lr=1e-3)
        with precision.prepare(name, model, made) as session:
            train(session, model, 1, x, y)
            with session.autocast():
                loss = nn.functional.mse_loss(model(x).float(), y)
            session.backward(loss)
            del loss
            gc.collect()
            numel, tensors = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
            beside = 3 * 4 if session._scaler is not None else 0  # the scale, its count of clean steps, and what it looks at
            assert ledger.live - before == numel * said.total + tensors * said.each + beside


def test_the_ledger_of_the_survey():
    """AdamW: fp32 4 + 4 + 8; with masters 2 + 2 + 12; bf16 alone 2 + 2 + 4; SGD has no states."""
    totals = {name: precision.bytes_per_parameter(name, torch.optim.AdamW).total for name in NAMES}
    assert totals["fp32"] == totals["bf16-autocast"] == totals["fp16-autocast"] == 16
    assert totals["bf16-master"] == totals["fp16-master"] == 16
    assert totals["bf16-weights"] == totals["fp16-weights"] == 8
    assert totals["bf16-stochastic"] == 12
    assert precision.bytes_per_parameter("bf16", torch.optim.SGD).total == 4
    momentum = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1, momentum=0.9)
    assert precision.bytes_per_parameter("fp32", momentum).states == 4


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_learns_and_gives_the_model_back(name):
    model = make()
    x = torch.randn(32, 16)
    y = (x @ torch.randn(16, 4)) * 0.3
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, eps=1e-4 if name == "fp16-weights" else 1e-8
    )  # float16 has no 1e-8
    identities = [id(p) for p in model.parameters()]
    with precision.prepare(name, model, optimizer) as session:
        losses = train(session, model, 20, x, y)
    assert losses[-1] < 0.7 * losses[0]
    assert [id(p) for p in model.parameters()] == identities
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert model(x).dtype == torch.float32


def test_fp32_is_plain_training_to_the_bit():
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    ours, plain = make(), make()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with precision.prepare("O0", ours, torch.optim.AdamW(ours.parameters(), lr=1e-2)) as session:
        for _ in range(3):
            session.backward(nn.functional.mse_loss(ours(x), y))
            session.step()
            nn.functional.mse_loss(plain(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))


def test_masters_take_updates_that_narrow_weights_would_lose():
    """A step of 1e-5 on a weight of 1: bfloat16 has no number so close."""
    moved = {}
    for name in ("bf16", "bf16-master", "bf16-stochastic"):
        model = nn.Linear(64, 64, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        with precision.prepare(name, model, optimizer) as session:
            for _ in range(100):
                model.weight.grad = torch.ones_like(model.weight)
                session.step()
        moved[name] = 1 - model.weight.mean().item()
    assert moved["bf16"] == 0
    assert moved["bf16-master"] == pytest.approx(1e-3, rel=5e-3)
    assert moved["bf16-stochastic"] == pytest.approx(1e-3, rel=0.1)


def test_stochastic_rounding_is_unbiased_and_exact_for_what_fits():
    source = torch.Generator().manual_seed(0)
    x = torch.randn(200, generator=source)
    many = precision.round_stochastically(x.expand(4000, 200).contiguous(), source).double()
    fits = x.to(torch.bfloat16).float()
    assert torch.equal(precision.round_stochastically(fits, source).float(), fits)
    assert len(many[:, 0].unique()) == 2
    sigma = many.std(0) / 4000**0.5
    assert ((many.mean(0) - x).abs() <= 4 * sigma + 1e-9).all()
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0])
    back = precision.round_stochastically(special, source)
    assert back[0] == float("inf") and back[1] == -float("inf") and back[2].isnan() and back[3] == 0


def test_stochastic_rounding_leaves_the_models_random_numbers_alone():
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    model = make()
    with precision.prepare("bf16-stochastic", model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        state = torch.get_rng_state()
        train(session, model, 2, x, y)
        assert torch.equal(torch.get_rng_state(), state)


def test_tied_weights_are_cast_and_updated_once():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 8).bfloat16().float()
    with precision.prepare("bf16-master", model, optimizer) as session:
        assert model[1].weight is model[0].weight and len(session._masters) == 1
        session.backward(model(x).pow(2).mean())
        session.step()
    reference(x).pow(2).mean().backward()
    expected = reference[0].weight - 0.1 * reference[0].weight.grad
    assert torch.allclose(model[0].weight, expected, atol=2e-3)


def test_batch_norm_keeps_float32_with_masters():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    with precision.prepare("bf16-master", model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        assert model[0].weight.dtype == torch.bfloat16
        assert model[1].weight.dtype == model[1].running_mean.dtype == torch.float32
        session.backward(model(torch.randn(2, 3, 6, 6)).pow(2).mean())
        assert session.step()
    assert model[0].weight.dtype == torch.float32


def test_wrong_use_is_answered_with_one_line():
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidInput, match="float16 without loss scaling") as refused:
        precision.prepare("fp16", model, optimizer)
    assert "\n" not in refused.value.fact and "bf16-autocast" in refused.value.hint
    with pytest.raises(InvalidInput, match="float16 without loss scaling"):
        precision.find(type("Mine", (Recipe,), {"name": "mine", "compute": torch.float16})())
    with pytest.raises(InvalidInput, match="unknown precision `bf61`"):
        precision.prepare("bf61", model, optimizer)
    with precision.prepare("O1", model, optimizer) as session:
        with session.autocast():
            model(torch.randn(2, 16)).sum().backward()
        with pytest.raises(InvalidInput, match="the loss was not scaled"):
            session.step()
    with pytest.raises(InvalidInput, match=r"`0.weight` is not float32"):
        precision.prepare("bf16-master", make().bfloat16(), optimizer)


# through torchao


def test_without_torchao_the_way_to_get_it_is_said(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(MissingExtra, match=r"need torchao.*\nhint: pip install torchao"):
        precision.float8_training(make())


def test_unknown_schemes_are_refused():
    with pytest.raises(InvalidInput, match="unknown QAT scheme `int9`"):
        precision.prepare_qat(make(), scheme="int9")
    with pytest.raises(InvalidInput, match="unknown FP8 recipe"):
        precision.float8_training(make(), recipe="columnwise")


@pytest.mark.parametrize("scheme", ["int8", "int8-int4"])
def test_a_model_after_qat_computes_as_it_did_in_training(scheme):
    """Works when: converted output equals prepared-eval output within one step of the rounding."""
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    x = torch.randn(4, 64)
    precision.prepare_qat(model, scheme=scheme)
    model(x).sum().backward()
    assert model[0].weight.grad.abs().sum() > 0  # straight through the rounding
    model.eval()
    with torch.no_grad():
        trained = model(x)
        precision.finish_qat(model, scheme=scheme)
        assert torch.allclose(model(x), trained, atol=2e-2)


@pytest.mark.parametrize("scheme", ["int8", "int8-int4", "fp8"])
def test_gradients_go_straight_through_the_rounding(scheme):
    """Those of rounded values, within the size of the rounding; torchao's own of FP8 are off by seven times their norm."""
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    rounded = precision.prepare_qat(copy.deepcopy(plain), scheme=scheme)
    x = torch.randn(32, 64)
    for model in (plain, rounded):
        model(x).square().mean().backward()
    for p, q in zip(plain.parameters(), rounded.parameters(), strict=True):
        assert (q.grad - p.grad).norm() < 0.25 * p.grad.norm()


def test_a_head_that_a_recipe_has_replaced_is_not_asked_for_in_chunks():
    pytest.importorskip("torchao")
    model, batch = family("tiny-llama")
    ids = torch.zeros(1, 512, dtype=torch.int64)
    with pytest.raises(Infeasible, match="the smallest found needs"):
        holdall.fit(model, "adamw", {**batch, "input_ids": ids, "labels": ids}, budget="100KiB", precision="qat-int8")


def test_fp8_products_are_close_where_they_are_emulated():
    """Works when: an emulated product on a CPU matches float64 within the error of e4m3."""
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16, bias=False), nn.Linear(16, 5, bias=False)).bfloat16()
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    exact = (x.double() @ model[0].weight.double().T).detach()
    precision.float8_training(model, emulate=True)
    assert type(model[0]).__name__ == "Float8Linear" and type(model[1]).__name__ == "Linear"  # 5 is no multiple of 16
    out = model[0](x)
    assert ((out.double() - exact).norm() / exact.norm()).item() < 0.06


def test_a_trace_leaves_the_weights_to_the_bit():
    """Under `bf16-weights` they are bf16 while it is traced; cast back, they would be rounded."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    before = [p.detach().clone() for p in model.parameters()]
    given = {"optimizer": torch.optim.SGD(model.parameters()), "loss": lambda model, batch: model(batch[0]).float().mean()}
    for recipe in ("bf16-weights", "bf16-autocast", "bf16-under-autocast", "bf16", "fp8"):
        holdall.trace(model, (torch.randn(4, 8),), precision=recipe, **given)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)), recipe
