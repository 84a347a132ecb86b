"""Clipping by the global norm and accumulation with updates in backward: bits of the plain loop, at the price that was said."""

import copy
import gc
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import holdall
from holdall.errors import InvalidInput, Unsupported
from holdall.optim import in_backward
from holdall.optim._in_backward.clipping import norm_of, total_norm
from holdall.optim.adafactor import Adafactor
from holdall.optim.adalomo import AdaLomo
from holdall.optim.adam8bit import Adam8bit
from holdall.optim.adam_mini import AdamMini
from holdall.optim.apollo import Apollo
from holdall.optim.came import CAME
from holdall.optim.flora import Flora
from holdall.optim.galore import GaLore
from holdall.optim.lomo import Lomo
from holdall.runtime.budget.ledger import Ledger
from holdall.testing.worlds import SharedTwice, family, machine

LIMIT = 0.3
BACKWARD = torch.Tensor.backward


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    yield
    assert torch.Tensor.backward is BACKWARD


def make(steps=4, **options):
    torch.manual_seed(0)
    return SharedTwice(**options), [torch.randint(0, 40, (3, 5)) for _ in range(steps)]


def same(model, other):
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def plain(model, batches, optimizer, *, limit=LIMIT, accumulate=1):
    """(losses, norms) of a loop that clips by itself."""
    torch.manual_seed(1)
    losses, norms = [], []
    for n, batch in enumerate(batches, 1):
        loss = model(batch)
        loss.backward()
        losses.append(loss.item())
        if n % accumulate and n < len(batches):
            continue
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit) if limit else None)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def looped(model, batches, optimizer, made, *, accumulate=1):
    """The same without `clip_grad_norm_`."""
    torch.manual_seed(1)
    losses, norms = [], []
    for n, batch in enumerate(batches, 1):
        loss = model(batch)
        loss.backward()
        losses.append(loss.item())
        if n % accumulate and n < len(batches):
            continue
        optimizer.step()
        optimizer.zero_grad()
        norms.append(made.norm)
    return losses, norms


OPTIMIZERS = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9, foreach=False),
    "torch_adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2, foreach=False),
    "adafactor": lambda m: Adafactor(m.parameters()),
    "adam8bit": lambda m: Adam8bit(m.parameters(), lr=1e-2),
    "adam_mini": lambda m: AdamMini(m.named_parameters(), lr=1e-2),
    "apollo": lambda m: Apollo([{"params": list(m.parameters())}], lr=1e-2),
    "came": lambda m: CAME(m.parameters(), lr=1e-2),
    "flora": lambda m: Flora(m.parameters(), rank=4),
    "galore": lambda m: GaLore([{"params": list(m.parameters())}], lr=1e-2),
}


@pytest.mark.parametrize("clip", ["hold", "twice"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_are_those_of_clip_grad_norm_and_step(name, clip):
    model, batches = make()
    reference = copy.deepcopy(model)
    expected, norms = plain(reference, batches, OPTIMIZERS[name](reference))
    optimizer = OPTIMIZERS[name](model)
    with in_backward(optimizer, max_norm=LIMIT, clip=clip) as made:
        losses, found = looped(model, batches, optimizer, made)
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(found, norms, strict=True))
    assert min(norms) > LIMIT
    assert same(model, reference)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("clip", ["hold", "twice"])
def test_short_gradients_are_left_as_they_are_and_precisions_may_be_mixed(clip):
    results = []
    for way in ("plain", clip):
        model, batches = make()
        model.middle.weight.data = model.middle.weight.data.bfloat16()
        model.middle.forward = lambda x, m=model.middle: F.linear(x, m.weight.float(), m.bias)
        optimizer = OPTIMIZERS["adamw"](model)
        if way == "plain":
            results.append((*plain(model, batches, optimizer, limit=1e6), model))
        else:
            with in_backward(optimizer, max_norm=1e6, clip=clip) as made:
                results.append((*looped(model, batches, optimizer, made), model))
    (losses, norms, reference), (got, found, model) = results
    assert got == losses
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, norms, strict=True))
    assert same(model, reference)


@pytest.mark.parametrize("clip", ["hold", "twice", None])
def test_lomo_clips_as_sgd_does_bit_for_bit(clip):
    """The two ways, and the norm that the loop asks for by itself."""
    model, batches = make()
    reference = copy.deepcopy(model)
    expected, norms = plain(reference, batches, torch.optim.SGD(reference.parameters(), lr=0.5, foreach=False))
    with Lomo(model.parameters(), lr=0.5, clip_grad_norm=LIMIT, clip=clip) as lomo:
        if clip is not None:
            losses, found = looped(model, batches, lomo, lomo)
        else:
            torch.manual_seed(1)
            losses, found = [], []
            for batch in batches:
                loss = model(batch)
                found.append(lomo.grad_norm(loss, retain_graph=True))
                loss.backward()
                lomo.step()
                losses.append(loss.item())
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(found, norms, strict=True))
    assert same(model, reference)


def test_adalomo_has_the_same_bits_whichever_way_the_norm_is_found():
    results = []
    for clip in ("hold", "twice", "closure"):
        model, batches = make()
        with AdaLomo(model.parameters(), lr=1e-2, clip_grad_norm=LIMIT, clip=None if clip == "closure" else clip) as optimizer:
            if clip == "closure":
                torch.manual_seed(1)
                for batch in batches:
                    optimizer.step(lambda batch=batch, model=model: model(batch).backward())
            else:
                looped(model, batches, optimizer, optimizer)
        results.append(model)
    assert same(results[0], results[1]) and same(results[0], results[2])
    assert not same(results[0], make()[0])


@pytest.mark.parametrize("clip", ["hold", "twice"])
def test_fp16_steps_that_overflow_are_skipped_without_a_closure(clip):
    p = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float16))
    with Lomo([p], lr=0.1, loss_scale=1024.0, clip=clip) as lomo:
        for factor in (1e5, 1.0):
            lomo.scale((p.float() * factor).sum()).backward()
            lomo.step()
            if factor > 1:
                assert torch.equal(p, torch.tensor([1.0, 2.0], dtype=torch.float16))
    torch.testing.assert_close(p.float(), torch.tensor([0.9, 1.9]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("clip", "walks"), [("hold", 1), ("twice", 2)])
def test_gradients_are_averaged_over_ranks_before_their_norm_and_once_a_walk(clip, walks, monkeypatch):
    """Two ranks with the same gradients, played by one."""
    reduced = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda grad, group: reduced.append(grad.mul_(2)))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    model, batches = make()
    reference = copy.deepcopy(model)
    _, norms = plain(reference, batches, torch.optim.SGD(reference.parameters(), lr=0.5, foreach=False))
    with Lomo(model.parameters(), lr=0.5, clip_grad_norm=LIMIT, clip=clip, process_group=object()) as lomo:
        _, found = looped(model, batches, lomo, lomo)
    assert found == norms and same(model, reference)
    assert len(reduced) == walks * len(batches) * len(list(model.parameters()))


@pytest.mark.parametrize("limit", [None, LIMIT])
@pytest.mark.parametrize("kind", ["adamw", "lomo"])
def test_accumulated_gradients_have_the_bits_of_plain_accumulation(kind, limit):
    """Seven backwards, three a step: the last step has one only."""
    model, batches = make(7)
    reference = copy.deepcopy(model)
    if kind == "lomo":
        optimizer = Lomo(model.parameters(), lr=0.5, clip_grad_norm=limit, clip="hold" if limit else None, accumulate=3)
        expected, norms = plain(
            reference, batches, torch.optim.SGD(reference.parameters(), lr=0.5, foreach=False), limit=limit, accumulate=3
        )
        context = optimizer
    else:
        optimizer = OPTIMIZERS["adamw"](model)
        expected, norms = plain(reference, batches, OPTIMIZERS["adamw"](reference), limit=limit, accumulate=3)
        context = in_backward(optimizer, max_norm=limit, accumulate=3)
    with context as made:
        losses, found = looped(model, batches, optimizer, made, accumulate=3)
    assert losses == expected
    assert same(model, reference)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, norms, strict=True))


class Choosing(nn.Module):
    """One of two layers is used, as a mixture of experts has it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x, which):
        return self.layers[which](x).pow(2).mean()


@pytest.mark.parametrize("limit", [None, 1e-2])
def test_what_the_last_backward_does_not_reach_is_updated_with_what_came_before(limit):
    torch.manual_seed(0)
    model, x = Choosing(), torch.randn(3, 4)
    reference = copy.deepcopy(model)
    optimizer, expected = (torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False) for m in (model, reference))

    def steps(model, optimizer, after=lambda: None):
        for pair in ((0, 1), (1, 0), (1, 1)):
            for which in pair:
                model(x, which).backward()
            after()
            optimizer.step()
            optimizer.zero_grad()

    with in_backward(optimizer, max_norm=limit, accumulate=2):
        steps(model, optimizer, lambda: [_is_spent(p) for p in model.parameters()])
    steps(reference, expected, lambda: limit and nn.utils.clip_grad_norm_(reference.parameters(), limit))
    assert same(model, reference)


def _is_spent(p):
    assert p.grad is None or type(p.grad).__name__ == "Spent"


def test_one_backward_too_many_is_refused_and_one_that_was_given_up_does_not_count():
    model, batches = make(dropout=0.0)
    reference = copy.deepcopy(model)
    plain(reference, [batches[0], batches[0]], OPTIMIZERS["adamw"](reference), limit=None, accumulate=2)
    optimizer = OPTIMIZERS["adamw"](model)
    with in_backward(optimizer, accumulate=2):
        model(batches[1]).backward()
        optimizer.zero_grad()  # and no step
        model(batches[0]).backward()
        model(batches[0]).backward()
        with pytest.raises(Unsupported, match="were already applied and freed") as refused:
            model(batches[0]).backward()
        optimizer.step()
    assert "accumulate=" in refused.value.hint
    assert same(model, reference)


@pytest.mark.parametrize(("clip", "at"), [("hold", 1), ("twice", 1), ("twice", 2)])
def test_a_step_that_broke_off_leaves_no_norm_to_the_next(clip, at):
    """In the first walk, after some gradients; where the second begins, with a norm that is known."""
    model, batches = make(dropout=0.0)
    reference = copy.deepcopy(model)
    plain(reference, batches[1:], OPTIMIZERS["adamw"](reference))
    optimizer = OPTIMIZERS["adamw"](model)
    calls = []

    def breaks(grad):
        calls.append(1)
        if len(calls) == at:
            raise KeyError

    with in_backward(optimizer, max_norm=LIMIT, clip=clip) as made:
        broken = model(batches[0]) * 100
        handle = (model.norm.weight if at == 1 else broken).register_hook(breaks)
        with pytest.raises(KeyError):
            broken.backward()
        handle.remove()
        del broken
        optimizer.zero_grad()
        looped(model, batches[1:], optimizer, made)
    assert same(model, reference)


def test_norms_are_added_up_in_torchs_order():
    torch.manual_seed(0)
    for _ in range(20):
        grads = [torch.randn(n % 7 + 1).to((torch.float32, torch.bfloat16, torch.float64)[n % 3]) for n in range(60)]
        total = total_norm(grads, [norm_of(g, wide=False) for g in grads])
        assert torch.equal(total, nn.utils.get_total_norm(grads))


def gradients(model, *, clip):
    """Most bytes beside parameters and batch in one backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    x = torch.randn(1, 64)  # activations of 256 bytes: what is counted is gradients
    context = in_backward(optimizer, max_norm=1.0, clip=clip) if clip else nullcontext()
    with context, Ledger(seed=[*model.parameters(), x]) as ledger:
        before = ledger.live
        model(x).sum().backward()
        peak = ledger.peak - before
        optimizer.step()
        optimizer.zero_grad()
        ended = ledger.live - before
    return peak, ended


def test_two_walks_need_two_gradients_and_holding_needs_all():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
    largest, small = 64 * 64 * 4, 8 * 4 * 256
    twice, after_twice = gradients(model, clip="twice")
    held, after_held = gradients(model, clip="hold")
    kept, _ = gradients(model, clip=None)
    assert twice <= 2 * largest + small
    assert 8 * largest <= held <= kept + small
    assert after_twice == after_held == 4  # the norm, for whoever logs it


@pytest.mark.parametrize("clip", ["hold", "twice"])
def test_other_leaves_and_other_optimizers_see_one_backward(clip):
    """An input that wants a gradient, and a head with an optimizer of its own, which updates in backward as well."""
    results = []
    for way in ("plain", clip):
        torch.manual_seed(0)
        body, head = nn.Linear(6, 6), nn.Linear(6, 6)
        x = torch.randn(3, 6, requires_grad=True)
        one, other = (torch.optim.SGD(m.parameters(), lr=0.1, foreach=False) for m in (body, head))
        contexts = [nullcontext(), nullcontext()]
        if way != "plain":
            contexts = [in_backward(one, max_norm=0.1, clip=clip), in_backward(other)]
        with contexts[0], contexts[1]:
            for _ in range(3):
                head(torch.tanh(body(x))).pow(2).sum().backward()
                if way == "plain":
                    nn.utils.clip_grad_norm_(body.parameters(), 0.1)
                for optimizer in (one, other):
                    optimizer.step()
                    optimizer.zero_grad()
        results.append([*body.parameters(), *head.parameters(), x.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("clip", "reentrant"), [("hold", True), ("hold", False), ("twice", False)])
def test_checkpoints_that_share_a_weight(clip, reentrant):
    """Reentrant ones bring a gradient each: held, they add up; walked twice, they are refused before anything changes."""
    model, batches = make(reentrant=reentrant)
    reference = copy.deepcopy(model)
    expected, _ = plain(reference, batches, OPTIMIZERS["adamw"](reference))
    optimizer = OPTIMIZERS["adamw"](model)
    with in_backward(optimizer, max_norm=LIMIT, clip=clip) as made:
        losses, _ = looped(model, batches, optimizer, made)
    assert losses == expected
    assert same(model, reference)


def test_reentrant_checkpoints_are_walked_twice_unless_they_share_a_weight():
    model, batches = make(reentrant=True)
    before = copy.deepcopy(model)
    optimizer = OPTIMIZERS["adamw"](model)
    with in_backward(optimizer, max_norm=LIMIT, clip="twice"), pytest.raises(Unsupported, match="reentrant"):
        model(batches[0]).backward()
    assert same(model, before)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)) for _ in range(3)])
    reference, x = copy.deepcopy(model), torch.randn(4, 8, requires_grad=True)

    def loss(model):
        y = x
        for block in model:
            y = checkpoint(block, y, use_reentrant=True)
        return y.pow(2).sum()

    optimizer, expected = (torch.optim.AdamW(m.parameters(), foreach=False) for m in (model, reference))
    torch.manual_seed(1)
    loss(reference).backward()
    nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    expected.step()
    torch.manual_seed(1)
    with in_backward(optimizer, max_norm=0.1, clip="twice"):
        loss(model).backward()
        optimizer.step()
    assert same(model, reference)


@pytest.mark.parametrize("way", ["hold", "closure"])
def test_under_a_plan_that_recomputes(way):
    """Two walks of one graph are refused there; held gradients, and a closure that is run twice, are exact."""
    model, batch = family("tied")
    reference = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-3, foreach=False)
    for _ in range(3):
        reference(*batch).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), LIMIT)
        expected.step()
        expected.zero_grad()
    plan = holdall.plan(holdall.trace(model, batch), planner="chen", hardware=machine(), variant="all")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    torch.manual_seed(1)
    with holdall.apply(plan, model), in_backward(optimizer, max_norm=LIMIT, clip="hold" if way == "hold" else "twice"):
        for _ in range(3):
            if way == "hold":
                model(*batch).backward()
                optimizer.step()
            else:
                loss = optimizer.step(lambda: model(*batch).backward() or 7)
                assert loss == 7
            optimizer.zero_grad()
        if way == "closure":
            with pytest.raises(Unsupported, match="a plan allows one") as refused:
                model(*batch).backward()
            assert "hold" in refused.value.hint
    assert same(model, reference)


def test_a_loop_that_still_clips_is_told_where_the_norm_is():
    model, batches = make()
    optimizer = OPTIMIZERS["adamw"](model)
    for options in ({}, {"max_norm": 1.0}, {"max_norm": 1.0, "clip": "twice"}):
        with in_backward(optimizer, **options):
            model(batches[0]).backward()
            with pytest.raises(Unsupported, match="gradient is gone") as refused:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert "max_norm=" in refused.value.hint
            optimizer.step()


def test_a_parameter_that_is_unfrozen_later_counts_from_then_on():
    results = []
    for way in ("plain", "hold", "twice"):
        model, batches = make(dropout=0.0)
        model.middle.weight.requires_grad_(False)
        optimizer = OPTIMIZERS["adamw"](model)
        with in_backward(optimizer, max_norm=LIMIT, clip=way) if way != "plain" else nullcontext() as made:
            for part in (batches[:2], batches[2:]):
                plain(model, part, optimizer) if way == "plain" else looped(model, part, optimizer, made)
                model.middle.weight.requires_grad_(True)
        results.append(model)
    assert same(results[0], results[1]) and same(results[0], results[2])


def test_backwards_that_do_not_go_through_the_method_are_held_until_the_step_or_refused():
    model, batches = make(dropout=0.0)
    reference = copy.deepcopy(model)
    plain(reference, batches[:1], OPTIMIZERS["adamw"](reference))
    optimizer = OPTIMIZERS["adamw"](model)
    with in_backward(optimizer, max_norm=LIMIT, clip="twice"), pytest.raises(InvalidInput, match="norm of all gradients"):
        torch.autograd.backward(model(batches[0]))
    optimizer.zero_grad()
    with in_backward(optimizer, max_norm=LIMIT):
        torch.autograd.backward(model(batches[0]))
        optimizer.step()
    assert same(model, reference)


def test_wrong_options_are_refused_in_one_line():
    model, batches = make()
    optimizer = OPTIMIZERS["adamw"](model)
    for options, words in [
        ({"max_norm": 0.0}, "not above 0"),
        ({"max_norm": 1.0, "clip": "once"}, "`clip` is 'once'"),
        ({"accumulate": 0}, "whole number"),
        ({"max_norm": 1.0, "clip": "twice", "accumulate": 2}, "holds gradients anyway"),
    ]:
        with pytest.raises(InvalidInput, match=words), in_backward(optimizer, **options):
            pass
    with pytest.raises(InvalidInput, match="all backwards of a step"):
        Lomo(model.parameters(), clip_grad_norm=1.0, accumulate=2)
    with in_backward(optimizer, max_norm=1.0), pytest.raises(Unsupported, match="closure"):
        optimizer.step(lambda: model(batches[0]).backward())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_the_method_is_torchs_own_again_when_a_forgotten_optimizer_is_gone():
    model, batches = make()
    lomo = Lomo(model.parameters(), clip_grad_norm=1.0, clip="hold")
    assert torch.Tensor.backward is not BACKWARD
    del lomo
    gc.collect()
    assert torch.Tensor.backward is BACKWARD
    model(batches[0]).backward()
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())
