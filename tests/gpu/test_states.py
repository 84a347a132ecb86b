"""Model states on a real GPU: wherever they live, the same training, the predicted bytes, and a budget that is kept."""

import copy
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from transformers import LlamaConfig, LlamaForCausalLM

import holdall
from holdall.actions.offload import Offload
from holdall.actions.place import Place, streamable
from holdall.actions.recompute import Recompute
from holdall.actions.reschedule import Reschedule, region
from holdall.cost.roofline import cost_trace
from holdall.optim.adam8bit import Adam8bit
from holdall.optim.galore import GaLore
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.problem import resolve_hardware
from holdall.types import Problem

STEPS = 6


@pytest.fixture(scope="module")
def probed():
    return holdall.probe("cuda", quick=True)


@pytest.fixture
def hardware(probed):
    return resolve_hardware(probed, "cuda")  # with the kernels that tests before have loaded


@pytest.fixture(scope="module")
def world():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=8,
        vocab_size=2048,
        tie_word_embeddings=True,
        attn_implementation="eager",  # its backward is the same every time
    )
    model = LlamaForCausalLM(config).train()
    ids = torch.randint(0, 2048, (4, 256), device="cuda")
    return model, {"input_ids": ids, "labels": ids}


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def loop(model, batch, optimizer, max_norm):
    losses = []
    for _ in range(STEPS):
        loss = model(**batch).loss
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(x) for x in losses]


def reference(model, batch, max_norm):
    """bf16 weights with fp32 masters, everything on the GPU, written out."""
    master = copy.deepcopy(model).cuda()
    work = copy.deepcopy(master)
    for p in work.parameters():
        p.data = p.data.bfloat16()
    optimizer, losses = optimizer_of(master), []
    for _ in range(STEPS):
        loss = work(**batch).loss
        loss.backward()
        for p, w in zip(master.parameters(), work.parameters(), strict=True):
            p.grad, w.grad = w.grad.float(), None
        torch.nn.utils.clip_grad_norm_(master.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, w in zip(master.parameters(), work.parameters(), strict=True):
                w.copy_(p)
        losses.append(loss.detach())
    return [float(x) for x in losses]


PLACED = {
    "device": ("resident", "device", {}),
    "host": ("resident", "host", {}),
    "ahead": ("resident", "host", {"ahead": True}),
    "via_device": ("resident", "via_device", {}),
    "streamed": ("streamed", "host", {}),
    "streamed via_device": ("streamed", "via_device", {}),
}


@pytest.mark.parametrize("max_norm", [0.5, 1e9], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("kind", PLACED)
def test_wherever_states_live_the_training_is_the_same(kind, max_norm, world, hardware):
    model, batch = copy.deepcopy(world[0]), world[1]
    expected = reference(world[0], batch, max_norm)
    optimizer = optimizer_of(model)
    trace = holdall.trace(model, batch, optimizer=optimizer, device="cuda", precision="bf16", head="whole")
    weights, update, more = PLACED[kind]
    can = streamable(trace)
    rows = {u.name: (weights if u.name in can else "resident", update) for u in trace.units}
    problem = Problem(trace=cost_trace(trace, hardware), hardware=hardware, budget={t.name: t.capacity for t in hardware.tiers})
    recompute = [Recompute.of(problem.trace, [b]) for b in problem.trace.blocks if ".layers." in b.name]
    plan = finish(Nop(), problem, [Place.of(problem.trace, rows, when="overlap_forward", **more), *recompute])
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:
        got = loop(model, batch, optimizer, max_norm)
        assert all(torch.isfinite(p).all() for p in model.parameters())
    if update == "device":
        assert got == expected
    else:  # the host's Adam rounds otherwise than the GPU's, by an ulp
        assert got == pytest.approx(expected, rel=2e-2)
    assert harness.step_peaks[-1] == pytest.approx(plan.predicted.peak["gpu"], rel=0.03)
    assert harness.notes == []
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_programs_leave_while_weights_come_and_go(world, hardware):
    """What `auto` does in small budgets: op by op, what is kept in RAM meanwhile, weights streamed, updates on the host."""
    model, batch = copy.deepcopy(world[0]), world[1]
    expected = reference(world[0], batch, 0.5)
    optimizer = optimizer_of(model)
    trace = holdall.trace(model, batch, optimizer=optimizer, device="cuda", precision="bf16", head="whole")
    can = streamable(trace)
    rows = {u.name: ("streamed" if u.name in can else "resident", "host") for u in trace.units}
    problem = Problem(trace=cost_trace(trace, hardware), hardware=hardware, budget={t.name: t.capacity for t in hardware.tiers})
    actions = [Place.of(problem.trace, rows, when="overlap_forward")]
    for block in [b for b in problem.trace.blocks if ".layers." in b.name]:
        ops, count = region(problem.trace, block)
        program = Reschedule.of(problem.trace, block, [*range(count - 4, count), *range(count, len(ops))])
        actions += [program, Offload.of(problem.trace, block, overlap=True)]
    plan = finish(Nop(), problem, actions)
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:
        got = loop(model, batch, optimizer, 0.5)
    assert got == pytest.approx(expected, rel=2e-2)
    assert harness.step_peaks[-1] == pytest.approx(plan.predicted.peak["gpu"], rel=0.03)
    assert harness.notes == []


@pytest.mark.parametrize("kind", ["host", "via_device", "streamed", "streamed via_device"])
def test_updates_in_backward_wherever_states_live(kind, world, hardware):
    """Nothing is clipped then, and every unit is updated as soon as its gradient is there."""
    model, batch = copy.deepcopy(world[0]), world[1]
    expected = reference(world[0], batch, 1e9)
    optimizer = optimizer_of(model)
    trace = holdall.trace(model, batch, optimizer=optimizer, device="cuda", precision="bf16", head="whole")
    weights, update, _ = PLACED[kind]
    can = streamable(trace)
    rows = {u.name: (weights if u.name in can else "resident", update) for u in trace.units}
    problem = Problem(trace=cost_trace(trace, hardware), hardware=hardware, budget={t.name: t.capacity for t in hardware.tiers})
    plan = finish(Nop(), replace(problem, reads_gradients=False), [Place.of(problem.trace, rows, when="backward")])
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:
        got = loop(model, batch, optimizer, None)
    assert got == pytest.approx(expected, rel=2e-2)
    assert harness.step_peaks[-1] == pytest.approx(plan.predicted.peak["gpu"], rel=0.03)
    assert harness.notes == []


SHRUNK = {
    "galore": lambda m: GaLore(GaLore.groups(m, rank=64, update_proj_gap=2), lr=1e-3),
    "adam8bit": lambda m: Adam8bit(Adam8bit.groups(m), lr=1e-3),
}


@pytest.mark.parametrize("when", ["backward", "overlap_forward"])
@pytest.mark.parametrize("weights", ["resident", "streamed"])
@pytest.mark.parametrize("kind", SHRUNK)
def test_states_that_a_step_adds_or_replaces_pass_through_the_device(kind, weights, when, world, probed):
    """Of the model's own width, as those optimizers are used. A state is made in the first step, a projector again later."""
    plain, batch = copy.deepcopy(world[0]).bfloat16().cuda(), world[1]
    model = copy.deepcopy(plain)
    expected = loop(plain, batch, SHRUNK[kind](plain), None)
    optimizer = SHRUNK[kind](model)
    trace = holdall.trace(model, batch, optimizer=optimizer, head="whole")
    hardware = resolve_hardware(probed, "cuda")
    problem = Problem(trace=cost_trace(trace, hardware), hardware=hardware, budget={t.name: t.capacity for t in hardware.tiers})
    can = streamable(trace)
    rows = {u.name: (weights if u.name in can else "resident", "via_device") for u in trace.units}
    plan = finish(Nop(), replace(problem, reads_gradients=False), [Place.of(problem.trace, rows, when=when)])
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:
        got = loop(model, batch, optimizer, None)
    assert got == pytest.approx(expected, rel=2e-2)
    assert harness.step_peaks[-1] <= plan.predicted.peak["gpu"]  # libraries that the update loads, and their room, are in it
    assert harness.step_peaks[-1] == pytest.approx(plan.predicted.peak["gpu"], rel=0.03)
    assert harness.notes == []


def test_adam_need_not_be_fused_for_the_fast_kernel_of_the_host(world, hardware):
    model, batch = copy.deepcopy(world[0]), world[1]
    expected = reference(world[0], batch, 0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trace = holdall.trace(model, batch, optimizer=optimizer, device="cuda", precision="bf16", head="whole")
    problem = Problem(trace=cost_trace(trace, hardware), hardware=hardware, budget={t.name: t.capacity for t in hardware.tiers})
    plan = finish(Nop(), problem, [Place.all(problem.trace, update="host", when="overlap_forward")])
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:
        got = loop(model, batch, optimizer, 0.5)
        assert harness.engine.updater.rate is not None
        assert all(float(s["step"]) == STEPS for s in optimizer.state.values())
    assert got == pytest.approx(expected, rel=2e-2)


def test_a_budget_is_kept_as_the_device_sees_it(world, hardware):
    model = copy.deepcopy(world[0])
    ids = torch.randint(0, 2048, (16, 512), device="cuda")  # in some hundred MiB, single pages of the allocator decide
    batch = {"input_ids": ids, "labels": ids}
    optimizer = optimizer_of(model)
    trace = holdall.trace(model, batch, optimizer=optimizer, device="cuda", precision="bf16", head="whole")
    whole = holdall.plan(trace, planner="nop", hardware=hardware).predicted.peak["gpu"]
    budget = int((whole - hardware.context) * 0.5) + hardware.context
    plan = holdall.plan(trace, budget=budget, hardware=hardware)
    torch.cuda.empty_cache()
    with holdall.apply(plan, model, optimizer) as harness:
        loop(model, batch, optimizer, 1.0)
        assert harness.measured().reserved <= budget
    assert plan.predicted.peak["gpu"] <= budget
