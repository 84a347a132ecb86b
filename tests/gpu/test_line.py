"""The four verbs on a real GPU: same bits, predicted peaks, a budget that holds."""

import copy
import gc

import pytest
import torch

import holdall
from holdall.actions.offload import Offload
from holdall.actions.recompute import Recompute
from holdall.cost.roofline import cost_trace
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.testing.contracts import fingerprint, train
from holdall.types import Problem
from holdall.units import MiB

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("transformers")

from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def hardware():
    return holdall.probe("cuda", quick=True)


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8, vocab_size=8192)
    # attention written out: the backward of fused kernels adds in any order, and plain training differs from itself
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).to("cuda").train()
    ids = torch.randint(0, 8192, (4, 1024), device="cuda")
    return model, {"input_ids": ids, "labels": ids}


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_embd=256, n_layer=6, n_head=4, vocab_size=4096, n_positions=512)
    model = GPT2LMHeadModel(config).to("cuda").train()
    ids = torch.randint(0, 4096, (4, 512), device="cuda")
    return model, {"input_ids": ids, "labels": ids}


def planned(build, choose, hardware):
    model, batch = build()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    train(model, batch, optimizer, 1)  # library workspaces are allocated once and stay
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model.load_state_dict(reference.state_dict())
    trace = cost_trace(holdall.trace(model, batch, optimizer=optimizer), hardware)
    problem = Problem(trace=trace, hardware=hardware, budget={"gpu": hardware.home.capacity, "cpu": 2**36})
    plan = finish(Nop(), problem, choose(trace))
    expected = train(reference, batch, torch.optim.AdamW(reference.parameters(), lr=1e-4, fused=True), 3)
    state = {k: v.clone() for k, v in reference.state_dict().items()}
    del reference  # as large as the copy of its weights, which the trace has seen in its place
    torch.cuda.empty_cache()
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:
        got = train(model, batch, optimizer, 3)
    same = got == expected and all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    return same, plan, harness, got, expected


CHOICES = {
    "nothing": lambda trace: [],
    "recompute all": lambda trace: [Recompute.of(trace, [b]) for b in trace.blocks if b.saves],
    "offload half": lambda trace: [Offload.of(trace, b, overlap=True) for b in trace.blocks[:-2] if b.saves and b.id % 2 == 0],
    "recompute and offload inputs": lambda trace: [
        a for b in trace.blocks[:-2] if b.saves for a in (Recompute.of(trace, [b]), Offload.of(trace, b, overlap=True))
    ],
    "offload at once": lambda trace: [Offload.of(trace, b, overlap=False) for b in trace.blocks[:-2] if b.saves],
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("build", [llama, gpt2])
def test_the_same_bits_and_the_predicted_peak(build, choice, hardware):
    same, plan, harness, got, expected = planned(build, CHOICES[choice], hardware)
    assert same, (got, expected)
    predicted, measured = plan.predicted.peak["gpu"], harness.step_peaks[-1]
    assert abs(predicted - measured) <= 0.03 * measured, (predicted, measured)
    assert harness.notes == []


def left_behind(model, optimizer):
    """The fingerprint but for versions and values of parameters, which training changes."""
    trained = len(list(model.parameters()))
    modules = len(list(model.modules()))
    seen = fingerprint(model, optimizer)
    return [*seen[:modules], *(x[:4] for x in seen[modules : modules + trained]), *seen[modules + trained :]]


def test_auto_honours_a_budget_and_leaves_the_model_as_found(hardware):
    model, batch = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    train(model, batch, optimizer, 1)
    before = left_behind(model, optimizer)
    trace = holdall.trace(model, batch, optimizer=optimizer)
    plain = holdall.plan(trace, planner="nop", hardware=hardware).predicted.peak["gpu"]
    fixed = sum(t.nbytes for t in trace.tensors.values() if t.born < 0)
    plan = holdall.plan(trace, budget=fixed + (plain - fixed) // 2, hardware=hardware)
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:
        train(model, batch, optimizer, 3)
    assert plan.predicted.peak["gpu"] <= plan.budget["gpu"]
    report = harness.report()
    assert report.measured is not None
    assert left_behind(model, optimizer) == before
    assert torch.cuda.get_per_process_memory_fraction() == 1.0


def test_tensors_of_the_users_own_are_in_the_budget(hardware):
    """A second model on the same GPU, as an average of the weights or a reference would be."""
    peaks = []
    for size in (0, 256 * MiB):
        model, batch = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        train(model, batch, optimizer, 1)
        other = torch.ones(size, dtype=torch.uint8, device="cuda")
        trace = holdall.trace(model, batch, optimizer=optimizer)
        plan = holdall.plan(trace, planner="nop", hardware=hardware)
        with holdall.apply(plan, model, optimizer, enforce=False) as harness:
            train(model, batch, optimizer, 2)
        predicted, measured = plan.predicted.peak["gpu"], harness.step_peaks[-1]
        assert abs(predicted - measured) <= 0.03 * measured
        peaks.append(predicted)
        del model, optimizer, harness, other
        gc.collect()
    assert 0.9 * 256 * MiB < peaks[1] - peaks[0] < 1.1 * 256 * MiB
