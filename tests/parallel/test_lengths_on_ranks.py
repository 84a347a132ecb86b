"""Batches of other lengths than the longest, which `fit` got, and others on every rank: one process's losses, in the budget."""

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import holdall
from holdall.testing.ranks import on_ranks
from holdall.testing.worlds import machine

LONGEST = 80
LENGTHS = ((64, 48), (30, 64), (18, 34), (80, 64))  # of each step, on either rank
CASES = {"zero3": ({"dp": 2}, 0.7), "tensor": ({"tp": 2}, 0.8)}  # way -> mesh, share of the whole step's peak


def build():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))


def batch(step, row, length):
    ids = torch.randint(0, 64, (4, length), generator=torch.Generator().manual_seed(10 * step + row))
    return {"input_ids": ids, "labels": ids.clone()}


def trained(model, optimizer, rows):
    losses = []
    for step, lengths in enumerate(LENGTHS):
        found = [model(**batch(step, row, lengths[row])).loss for row in rows]
        (sum(found) / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in found])
    return losses


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def fitted(way):
    mesh, share = CASES[way]
    model, row = build(), dist.get_rank() if "dp" in mesh else 0
    optimizer, asked = adam(model), {"hardware": machine(), "head": "whole"}
    trace = holdall.trace(model, batch(0, row, LONGEST), optimizer=optimizer, mesh=mesh, shard=way, head="whole")
    most = holdall.plan(trace, planner="nop", budget="1GiB", hardware=machine()).predicted.peak["cpu"]
    budget = int(share * most)
    with holdall.fit(model, optimizer, batch(0, row, LONGEST), budget=budget, mesh=mesh, shard=way, **asked) as harness:
        losses = trained(model, optimizer, [row])
    return row, [loss for (loss,) in losses], max(harness.step_peaks), budget, harness.plan.count()


def fitted_all():
    return {way: fitted(way) for way in CASES}


@pytest.fixture(scope="module")
def ran():
    return on_ranks(2, fitted_all)


@pytest.mark.parametrize("way", CASES)
def test_losses_are_those_of_one_process_and_peaks_within_the_budget(ran, way):
    rows = [0, 1] if "dp" in CASES[way][0] else [0]
    model = build()
    expected = trained(model, adam(model), rows)
    for rank in ran:
        row, losses, peak, budget, actions = rank[way]
        assert losses == pytest.approx([step[row] for step in expected], rel=2e-6)
        assert peak <= budget and len(actions) > 1
