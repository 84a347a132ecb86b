"""Models whose attention looks back over a window, with the sequence divided: losses and gradients of one process."""

import pytest
import torch
from torch.nn import functional as F
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

import holdall
from holdall.parallel.attention.windows import attend_in_window, is_window, look_back
from holdall.testing.ranks import on_ranks
from holdall.testing.worlds import machine

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
CASES = {  # model, window, tokens that `fit` got, and those of the steps
    "longer than the window": ("gemma3", 24, 64, (64, 96)),
    "each part within it": ("mistral", 40, 64, (64, 96, 32)),
    "longer than `fit` knew": ("mistral", 40, 32, (32, 64, 96)),
    "longer, by a ring": ("mistral", 40, 32, (32, 64)),
}


@pytest.mark.parametrize("size", [1, 7, 128, 200])
@pytest.mark.parametrize("length", [5, 128, 300])
def test_queries_in_portions_see_what_one_mask_shows(size, length):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 8, generator=draw, dtype=torch.float64) for heads in (4, 2, 2))
    given = [t.requires_grad_() for t in (q, k, v)]
    mask = look_back(0, length, 0, length, size, q.device)
    assert int(mask.sum()) == sum(min(n + 1, size) for n in range(length))
    found = []
    for out in (
        attend_in_window(*given, size, 0.3),
        F.scaled_dot_product_attention(*given, attn_mask=mask, scale=0.3, enable_gqa=True),
    ):
        found.append([out, *torch.autograd.grad(out.square().sum(), given)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_a_mask_is_the_windows_or_it_is_not():
    mask = look_back(0, 300, 0, 300, 40, torch.device("cpu")).expand(2, 1, 300, 300)
    assert is_window(mask, 40)
    assert not is_window(mask, 41)
    packed = mask.clone()
    packed[1, 0, 290, 260] = False  # as where a document begins
    assert not is_window(packed, 40)
    assert not is_window(mask.float(), 40)


def build(name, window):
    torch.manual_seed(0)
    if name == "mistral":
        return MistralForCausalLM(MistralConfig(**SIZES, num_hidden_layers=2, sliding_window=window)).train()
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, num_hidden_layers=2, sliding_window=window, layer_types=kinds)).train()


def batch(tokens):
    ids = torch.randint(0, 64, (2, tokens), generator=torch.Generator().manual_seed(tokens))
    return {"input_ids": ids, "labels": ids.clone()}


def train(model, optimizer, lengths):
    losses = []
    for tokens in lengths:
        loss = model(**batch(tokens)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def divided(case):
    name, window, first, lengths = CASES[case]
    model = build(name, window)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    given = {"mesh": {"cp": 2}, "shard": "zigzag" if "ring" in case else "ulysses", "budget": "1GiB", "hardware": machine()}
    with holdall.fit(model, optimizer, batch(first), **given) as harness:
        try:
            return train(model, optimizer, lengths), harness.step_peaks[0], harness.plan.predicted.peak["cpu"]
        except holdall.HoldallError as error:
            return str(error)


def divided_all():
    return {case: divided(case) for case in CASES}


@pytest.fixture(scope="module")
def ran():
    return on_ranks(2, divided_all)


@pytest.mark.parametrize("case", [case for case in CASES if "ring" not in case])
def test_losses_are_those_of_one_process(ran, case):
    name, window, _, lengths = CASES[case]
    model = build(name, window)
    expected = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), lengths)
    for rank in ran:
        losses, peak, predicted = rank[case]
        assert losses == pytest.approx(expected, rel=2e-6)
        assert peak <= predicted * 1.06  # a thread of gloo may hold a buffer


def test_what_a_ring_would_get_wrong_is_refused(ran):
    for rank in ran:
        assert "looks back over a window" in rank["longer, by a ring"]
