"""Lv et al., LOMO (ACL 2024, arXiv 2306.09782), and update-in-backward for any optimizer: what they say, on real models."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import holdall
from holdall.errors import InvalidInput, Unsupported
from holdall.optim import in_backward
from holdall.optim.lomo import Lomo
from holdall.runtime.budget.ledger import Ledger
from holdall.testing.contracts import train as train_family
from holdall.testing.stand_ins import pieces_of
from holdall.testing.worlds import SharedTwice, family, machine


def make(**options):
    torch.manual_seed(0)
    return SharedTwice(**options), [torch.randint(0, 40, (3, 5)) for _ in range(10)]


def same(model, other):
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def train(model, batches, optimizer, scheduler=None, clip=None):
    torch.manual_seed(1)
    losses = []
    for batch in batches:
        loss = model(batch)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def test_ten_steps_give_the_bits_of_sgd_with_tied_weights_dropout_and_a_scheduler():
    model, batches = make()
    reference = copy.deepcopy(model)
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    with Lomo(model.parameters(), lr=0.1) as lomo:
        got = train(model, batches, lomo, torch.optim.lr_scheduler.CosineAnnealingLR(lomo, 10))
    expected = train(reference, batches, sgd, torch.optim.lr_scheduler.CosineAnnealingLR(sgd, 10))
    assert got == expected
    assert same(model, reference)


def test_no_more_than_two_gradients_live_at_any_moment():
    """Claim: the gradient's memory is O(1): sampled at every op of backward, at most two of the largest parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(12)])
    largest = 64 * 64 * 4
    peaks = {}
    for name, make_optimizer in {"lomo": Lomo, "sgd": torch.optim.SGD}.items():
        optimizer = make_optimizer(model.parameters(), lr=1e-3)
        x = torch.randn(1, 64)  # activations of 256 bytes: what is counted is gradients
        with Ledger(seed=[*model.parameters(), x]) as ledger:
            before = ledger.live
            model(x).sum().backward()
            peaks[name] = ledger.peak - before
            optimizer.step()
            optimizer.zero_grad()
        if name == "lomo":
            optimizer.close()
    assert peaks["lomo"] <= 2 * largest + 12 * 2 * 256
    assert peaks["sgd"] >= 12 * largest


@pytest.mark.parametrize("how", ["closure", "retained", "second forward"])
def test_clipping_in_two_passes_equals_clip_grad_norm_and_sgd(how):
    model, batches = make(dropout=0.1 if how == "closure" else 0.0)
    reference = copy.deepcopy(model)
    train(reference, batches, torch.optim.SGD(reference.parameters(), lr=0.5), clip=0.3)
    torch.manual_seed(1)
    with Lomo(model.parameters(), lr=0.5, clip_grad_norm=0.3) as lomo:
        for batch in batches:
            if how == "closure":

                def closure(batch=batch):
                    lomo.zero_grad()
                    loss = model(batch)
                    loss.backward()
                    return loss

                lomo.step(closure)
            else:
                loss = model(batch)
                norm = lomo.grad_norm(loss, retain_graph=how == "retained")
                assert norm > 0.3
                (loss if how == "retained" else model(batch)).backward()
                lomo.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_clipping_by_value_and_per_parameter_norm_are_what_they_say():
    for option, clip in {
        "clip_grad_value": lambda p: p.grad.clamp_(-0.01, 0.01),
        "clip_param_norm": lambda p: nn.utils.clip_grad_norm_([p], 0.01),
    }.items():
        model, batches = make(dropout=0.0)
        reference = copy.deepcopy(model)
        with Lomo(model.parameters(), lr=0.5, **{option: 0.01}) as lomo:
            train(model, batches[:3], lomo)
        sgd = torch.optim.SGD(reference.parameters(), lr=0.5)
        for batch in batches[:3]:
            reference(batch).backward()
            for p in reference.parameters():
                clip(p)
            sgd.step()
            sgd.zero_grad()
        assert same(model, reference)


def test_a_weight_shared_by_reentrant_checkpoints_is_refused_and_by_others_is_exact():
    model, batches = make(reentrant=True)
    with Lomo(model.parameters(), lr=0.1), pytest.raises(Unsupported, match="reentrant") as refused:
        model(batches[0]).backward()
    assert "use_reentrant=False" in refused.value.hint
    model, batches = make(reentrant=False)
    reference = copy.deepcopy(model)
    with Lomo(model.parameters(), lr=0.1) as lomo:
        train(model, batches, lomo)
    train(reference, batches, torch.optim.SGD(reference.parameters(), lr=0.1))
    assert same(model, reference)


def test_reentrant_checkpoints_without_a_shared_weight_are_exact():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
    reference, x = copy.deepcopy(model), torch.randn(4, 8, requires_grad=True)

    def run(model, optimizer):
        for _ in range(3):
            y = x
            for block in model:
                y = checkpoint(block, y, use_reentrant=True)
            y.pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with Lomo(model.parameters(), lr=0.1) as lomo:
        run(model, lomo)
    run(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    assert same(model, reference)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.Adafactor, {}),
    ],
)
def test_any_optimizer_in_backward_gives_its_own_bits_and_state(cls, options):
    model, batches = make()
    reference = copy.deepcopy(model)
    optimizer = cls(model.parameters(), lr=1e-2, foreach=False, **options)
    plain = cls(reference.parameters(), lr=1e-2, foreach=False, **options)
    with in_backward(optimizer):
        got = train(model, batches, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer))
    expected = train(reference, batches, plain, torch.optim.lr_scheduler.LinearLR(plain))
    assert got == expected
    assert same(model, reference)
    mine, theirs = optimizer.state_dict()["state"], plain.state_dict()["state"]
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[n][key], theirs[n][key]) for n in theirs for key in theirs[n])
    model(batches[0]).backward()  # nothing is left behind
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())


def test_after_backward_the_gradient_is_gone_and_whoever_reads_it_is_told():
    model, batches = make()
    for optimizer in (Lomo(model.parameters(), lr=0.1), in_backward(torch.optim.AdamW(model.parameters()))):
        with optimizer:
            model(batches[0]).backward()
            before = [p.detach().clone() for p in model.parameters()]
            with pytest.raises(Unsupported, match="gradient is gone"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with pytest.raises(Unsupported, match="gradient is gone"):
                model.embed.weight.grad.norm()
            with pytest.raises(Unsupported, match="were already applied and freed"):
                model(batches[1]).backward()
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert all(p.grad is None for p in model.parameters())


def test_a_grad_scaler_that_comes_after_backward_is_refused():
    model, batches = make()
    scaler = torch.amp.GradScaler("cpu")
    with Lomo(model.parameters(), lr=0.1) as lomo:
        scaler.scale(model(batches[0])).backward()
        with pytest.raises(Unsupported, match="gradient is gone"):
            scaler.step(lomo)


def test_clipping_by_the_norm_without_a_norm_pass_is_refused_before_anything_changes():
    model, batches = make()
    before = copy.deepcopy(model)
    with Lomo(model.parameters(), lr=0.1, clip_grad_norm=1.0), pytest.raises(InvalidInput, match="norm of all gradients"):
        model(batches[0]).backward()
    assert same(model, before)


def test_wrong_options_are_refused_in_one_line():
    model, _ = make()
    for options, words in [
        ({"clip_grad_norm": 1.0, "clip_grad_value": 1.0}, "one kind of clipping"),
        ({"clip_grad_norm": -1.0}, "not above 0"),
        ({"loss_scale": "auto"}, "loss_scale"),
        ({"momentum": 0.9}, "unknown option"),
    ]:
        with pytest.raises(InvalidInput, match=words):
            Lomo(model.parameters(), lr=0.1, **options)
    with pytest.raises(InvalidInput, match="fp16"):
        Lomo([nn.Parameter(torch.zeros(3, dtype=torch.float16))], lr=0.1)
    with pytest.raises(Unsupported, match="cannot be copied"):
        copy.deepcopy(Lomo(model.parameters()))
    with pytest.raises(InvalidInput, match="by itself"), in_backward(Lomo(model.parameters())):
        pass


def test_fp16_halves_its_scale_on_overflow_and_changes_no_bit():
    p = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float16))
    with Lomo([p], lr=0.1, loss_scale="dynamic") as lomo:
        closure = lambda: lomo.scale((p.float() * torch.tensor([3.0, 4.0])).sum()).backward()  # noqa: E731
        scales, values = [], []
        for _ in range(22):
            lomo.step(closure)
            scales.append(lomo.param_groups[0]["scale"])
            values.append(p.detach().clone())
    first = next(n for n, scale in enumerate(scales) if n and scale == scales[n - 1])  # the first step that was made
    assert scales[:first] == [2.0**32 / 2 ** (n + 1) for n in range(first)]
    assert 4 * scales[first] < 65504 <= 4 * scales[first] * 2
    assert all(torch.equal(value, torch.tensor([1.0, 2.0], dtype=torch.float16)) for value in values[:first])
    torch.testing.assert_close(values[first].float(), torch.tensor([0.7, 1.6]), rtol=1e-3, atol=1e-3)


def test_fp16_with_a_fixed_scale_skips_what_overflows():
    p = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float16))
    with Lomo([p], lr=0.1, loss_scale=1024.0) as lomo:
        with pytest.raises(InvalidInput, match="norm of all gradients"):
            lomo.scale(p.float().sum()).backward()
        lomo.step(lambda: lomo.scale((p.float() * 1e5).sum()).backward())
        assert torch.equal(p, torch.tensor([1.0, 2.0], dtype=torch.float16))
        lomo.step(lambda: lomo.scale(p.float().sum()).backward())
    torch.testing.assert_close(p.float(), torch.tensor([0.9, 1.9]), rtol=1e-3, atol=1e-3)
    assert lomo.param_groups[0]["scale"] == 1024.0


@pieces_of(8)
def test_bf16_parameters_are_updated_in_32_bits_a_stretch_at_a_time():
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(5, 6).bfloat16())
    grad, before = torch.randn(5, 6).bfloat16(), p.detach().clone()
    lomo = Lomo([p], lr=0.1, weight_decay=0.5)
    p.grad = grad.clone()
    lomo.step()
    expected = before.float().mul_(1 - 0.1 * 0.5).add_(grad.float(), alpha=-0.1)
    assert torch.equal(p, expected.bfloat16())


def test_a_parameter_that_is_unfrozen_later_is_trained_from_then_on():
    model, batches = make(dropout=0.0)
    reference = copy.deepcopy(model)
    for m in (model, reference):
        m.middle.weight.requires_grad_(False)
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    with Lomo(model.parameters(), lr=0.1) as lomo:
        for m, optimizer in ((model, lomo), (reference, sgd)):
            train(m, batches[:2], optimizer)
            m.middle.weight.requires_grad_(True)
            train(m, batches[2:5], optimizer)
    assert same(model, reference)


def test_hooks_go_with_close_and_with_the_optimizer():
    model, batches = make()
    lomo = Lomo(model.parameters(), lr=0.1)
    lomo.close()
    model(batches[0]).backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    lomo = Lomo(model.parameters(), lr=0.1)
    del lomo
    gc.collect()
    model(batches[0]).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize("name", ["tied", "twice"])
def test_under_a_plan_that_recomputes_every_block_it_is_still_sgd_and_needs_less_than_gradients_would(name):
    model, batch = family(name)
    reference = copy.deepcopy(model)
    plan = holdall.plan(holdall.trace(model, batch), planner="chen", hardware=machine(), variant="all")
    expected = train_family(reference, batch, torch.optim.SGD(reference.parameters(), lr=0.1))
    with holdall.apply(plan, model) as harness, Lomo(model.parameters(), lr=0.1) as lomo:
        got = train_family(model, batch, lomo)
    assert got == expected
    assert same(model, reference)
    assert harness.step_peaks[-1] < plan.predicted.peak["cpu"]  # which keeps every gradient


def test_it_agrees_with_the_authors_package():
    lomo_optim = pytest.importorskip("lomo_optim")
    model, batches = make(dropout=0.0)
    reference = copy.deepcopy(model)
    theirs = lomo_optim.Lomo(reference, lr=0.1)
    with Lomo(model.parameters(), lr=0.1) as lomo:
        train(model, batches, lomo)
    for batch in batches:
        theirs.fused_backward(reference(batch), 0.1)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
