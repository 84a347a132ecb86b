"""Hugging Face models keep keys and values for decoding by default; training under a plan does without."""

import copy
import logging

import pytest
import torch

import holdall
from holdall.actions.reschedule import obstacle
from holdall.cost.roofline import cost_trace
from holdall.decoding import caching_configs, train_without_cache
from holdall.testing.worlds import machine

transformers = pytest.importorskip("transformers")

SPECIAL = {"bos_token_id": 0, "eos_token_id": 1}
USUAL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, **SPECIAL
}  # fmt: skip


def gpt2():
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=32, **SPECIAL)
    return transformers.GPT2LMHeadModel(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**USUAL))


def qwen():
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**USUAL, num_key_value_heads=2))


def t5():
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


FAMILIES = {made.__name__: made for made in (gpt2, llama, qwen, t5)}


def build(name):
    torch.manual_seed(0)
    model = FAMILIES[name]().train()
    ids = torch.randint(3, 64, (8, 32))
    return model, {"input_ids": ids, "labels": ids}, torch.optim.SGD(model.parameters(), lr=1e-2)


def train(model, batch, optimizer, *, holds):
    """Two steps; `holds`: the loop holds the model's output until its next one."""
    torch.manual_seed(1)
    losses, out = [], None
    for _ in range(2):
        out = model(**batch)
        loss = out.loss
        out = out if holds else None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("planner", ["nop", "chen", "rotor", "auto"])
@pytest.mark.parametrize("name", FAMILIES)
def test_peaks_are_as_predicted_and_bits_as_in_training_with_the_cache(name, planner):
    """In loops that let go of the output; in those that hold it, what is not foreseen is at most the logits."""
    model, batch, optimizer = build(name)
    reference = copy.deepcopy(model)
    expected = train(reference, batch, torch.optim.SGD(reference.parameters(), lr=1e-2), holds=False)
    trace = cost_trace(holdall.trace(model, batch, optimizer=optimizer), machine())
    plain = holdall.plan(trace, planner="nop", hardware=machine()).predicted.peak["cpu"]
    budget = plain * (100 if planner == "nop" else 95 if planner == "chen" else 70) // 100
    plan = holdall.plan(trace, planner=planner, budget=budget, hardware=machine(), allow=["recompute"])
    logits = 8 * 32 * 64 * 4
    for holds in (False, True):
        mine = copy.deepcopy(model)
        own = torch.optim.SGD(mine.parameters(), lr=1e-2)
        with holdall.apply(plan, mine, own, enforce=False) as harness:
            assert train(mine, batch, own, holds=holds) == expected
        assert all(torch.equal(p, q) for p, q in zip(mine.parameters(), reference.parameters(), strict=True))
        more = max(harness.step_peaks) - plan.predicted.peak["cpu"]
        assert 0 <= more <= logits * holds + 64
        assert harness.notes == []


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_blocks_can_be_run_op_by_op(name):
    model, batch, _ = build(name)
    trace = holdall.trace(model, batch)
    assert obstacle(trace, trace.whole) == ""
    assert not any("cat" in op.site.op and "Attention" in op.site.module for op in trace.ops)
    assert all(obstacle(trace, b) == "" for b in trace.blocks if b.kind in ("GPT2Block", "LlamaDecoderLayer"))


def test_only_forwards_with_gradients_do_without(caplog):
    model, batch, optimizer = build("llama")
    plan = holdall.plan(holdall.trace(model, batch, optimizer=optimizer), planner="nop", hardware=machine())
    with caplog.at_level(logging.INFO, "holdall"), holdall.apply(plan, model, optimizer):
        assert model(**batch).past_key_values is None
        assert model(**batch, use_cache=True).past_key_values is not None  # who asks gets it
        with torch.no_grad():
            assert model(**batch).past_key_values is not None
        assert model.config.use_cache
    assert sum("no keys and values are kept" in line for line in caplog.messages) == 1
    assert model(**batch).past_key_values is not None


def test_the_config_is_as_before_after_an_error():
    model, batch, _ = build("gpt2")
    end = train_without_cache(model)
    with pytest.raises(IndexError):
        model(input_ids=batch["input_ids"] + 64)
    assert model.config.use_cache
    end()
    assert model(**batch).past_key_values is not None


def test_state_spaces_keep_their_cache():
    """With a cache, Bamba computes in another way: its bits would be others."""
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)
    assert caching_configs(transformers.MambaForCausalLM(config)) == []
    assert caching_configs(gpt2()) and not caching_configs(torch.nn.Linear(2, 2))
