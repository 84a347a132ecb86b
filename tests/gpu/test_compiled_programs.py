"""Compiled programs on a real GPU: eager kernels to the bit, fused ones close, both in about the predicted memory."""

import copy
import gc
import os

import pytest
import torch

import holdall
from holdall.testing.contracts import train

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def hardware():
    return holdall.probe("cuda", quick=True)


def llama(attention, dtype):
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4, vocab_size=2048, use_cache=False
    )
    config._attn_implementation = attention
    ids = torch.randint(0, 2048, (8, 512), device="cuda")
    return transformers.LlamaForCausalLM(config).to("cuda", dtype).train(), {"input_ids": ids, "labels": ids}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def run(hardware, backend, *, attention="eager", dtype=torch.float32):
    """Losses under a compiled plan and without one, whether the weights are the same, the plan and the harness."""
    gc.collect()
    torch.manual_seed(0)
    model, batch = llama(attention, dtype)
    reference = copy.deepcopy(model)
    expected = train(reference, batch, sgd(reference), 3)
    weights = {k: v.cpu() for k, v in reference.state_dict().items()}
    del reference
    gc.collect()
    torch.cuda.empty_cache()
    optimizer = sgd(model)
    trace = holdall.trace(model, batch, optimizer=optimizer)
    plain = holdall.plan(trace, planner="nop", hardware=hardware).predicted
    held = sum(v for k, v in plain.peak_kinds.items() if k.value == "activation")
    budget = plain.peak["gpu"] - int(0.3 * held)
    plan = holdall.plan(trace, planner="rockmate", menus="cut", budget=budget, hardware=hardware)
    assert any(a.name == "reschedule" for a in plan.actions)
    with holdall.apply(plan, model, optimizer, enforce=False, compile=backend) as harness:
        losses = train(model, batch, optimizer, 3)
    same = all(torch.equal(v.cpu(), weights[k]) for k, v in model.state_dict().items())
    return losses, expected, same, plan, harness


def test_eager_kernels_give_the_same_bits(hardware):
    losses, expected, same, plan, harness = run(hardware, "aot_eager")
    assert losses == expected and same and harness.compiler.count
    said, seen = plan.predicted.peak["gpu"], max(harness.step_peaks[1:])
    assert abs(said - seen) <= 0.03 * seen


@pytest.mark.parametrize(("attention", "dtype"), [("eager", torch.float32), ("sdpa", torch.bfloat16)])
def test_fused_kernels_are_close(attention, dtype, hardware):
    before = dict(os.environ)
    losses, expected, _, plan, harness = run(hardware, True, attention=attention, dtype=dtype)
    assert harness.compiler.count and len(harness.notes) == 1
    assert losses == pytest.approx(expected, rel=1e-4 if dtype is torch.float32 else 2e-2)
    assert max(harness.step_peaks[1:]) <= 1.1 * plan.predicted.peak["gpu"]
    assert dict(os.environ) == before
