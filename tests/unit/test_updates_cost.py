"""What an update on the host is said to take."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import holdall
from holdall import models
from holdall.actions.offload import Offload
from holdall.actions.place import Place
from holdall.cost.roofline import cost_trace
from holdall.cost.updates import host_seconds
from holdall.machine.presets import gpu
from holdall.optim.adam8bit import Adam8bit
from holdall.optim.galore import GaLore
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.simulator import simulate
from holdall.testing.contracts import problem_for, train
from holdall.testing.worlds import family, machine
from holdall.tracing.units import Updating, _measure

H100 = replace(gpu("h100-sxm"), updates=4e9)


def traced(make, dtype=torch.float32):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to(dtype)
    return holdall.trace(
        model, torch.randn(4, 64, dtype=dtype), optimizer=make(model.parameters()), loss=lambda model, x: model(x).sum()
    )


def rate(trace):
    """Parameters a second."""
    return sum(u.numel for u in trace.units) / sum(host_seconds(u, trace, H100) for u in trace.units)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_of_float32_has_the_rate_that_was_measured(kind, fused):
    assert rate(traced(lambda params: kind(params, fused=fused))) == pytest.approx(4e9)


def test_others_take_the_longer_the_more_they_move():
    momentum = rate(traced(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)))
    adafactor = rate(traced(torch.optim.Adafactor))
    assert adafactor < momentum < 4e9


def test_a_gpus_kernel_is_not_the_hosts():
    """8-bit Adam is one kernel on a GPU; a CPU makes it op by op, and moves many times as much."""
    trace = traced(Adam8bit)
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(1024, 1024, device="cuda", dtype=torch.bfloat16))
        there = Updating(optimizer=Adam8bit([weight]), values={"weight": weight}, narrow={}, sliced=True)
        here = there.on_host()
        moved = _measure(["weight"], here).moved
    assert there.is_on_gpu and not here.is_on_gpu
    assert moved > 100 * weight.numel()
    unit = trace.units[0]
    slow = replace(unit, host_moved=3 * unit.moved)
    assert host_seconds(slow, trace, H100) == pytest.approx(3 * host_seconds(unit, trace, H100))


def test_adam_in_sixteen_bits_goes_by_torchs_own_ops():
    trace = traced(lambda params: torch.optim.AdamW(params, fused=True), torch.bfloat16)
    moved = sum(u.moved for u in trace.units) / sum(u.numel for u in trace.units)
    assert rate(trace) == pytest.approx(4e9 * 28 / moved / 2.1)
    assert 2e9 < rate(trace) < 4e9  # 3.2e9 were seen


def test_where_a_cpu_computes_its_memory_says_what_an_update_takes():
    cpu = replace(H100, device="cpu")
    trace = traced(torch.optim.Adafactor)
    assert all(host_seconds(u, trace, cpu) == u.numel / 4e9 for u in trace.units)


def test_the_host_is_slower_while_others_pass_through_the_device():
    """Their states come from the memory that limits it."""
    trace = traced(lambda params: torch.optim.AdamW(params, fused=True))
    slower = replace(H100, updates_beside=1e9)
    both, alone = (host_seconds(trace.units[0], trace, slower, beside=beside) for beside in (True, False))
    assert both == pytest.approx(4 * alone)
    assert host_seconds(trace.units[0], trace, H100, beside=True) == alone  # not measured


@pytest.mark.parametrize(("rate", "passes"), [(5e8, True), (2e10, False)])
def test_units_pass_through_the_device_where_the_host_is_slow_enough_for_it_to_show(rate, passes):
    pytest.importorskip("transformers")
    source = models.override(models.describe("llama-3.2-1b"), {"num_hidden_layers": 4})
    model = models.build(source)
    batch = models.sample_batch(source, batch=1, seq=1024)
    trace = holdall.trace(model, batch, optimizer=torch.optim.AdamW(model.parameters(), fused=True), precision="bf16")
    machine = replace(H100, updates=rate, updates_beside=0.75 * rate)
    whole = holdall.plan(trace, planner="nop", hardware=machine).predicted.peak["gpu"]
    plan = holdall.plan(trace, budget=int(0.6 * whole), hardware=machine)
    ways = {update for a in plan.actions if isinstance(a, Place) for _, _, update in a.units}
    assert ("via_device" in ways) == passes
    assert "host" in ways
    if passes:  # in backward the device would wait for every unit that passes; beside the next forward it need not
        free = holdall.plan(trace, budget=int(0.6 * whole), hardware=machine, reads_gradients=False)
        (place,) = (a for a in free.actions if isinstance(a, Place))
        assert "via_device" in {update for _, _, update in place.units}
        assert place.when == "overlap_forward"


def test_equal_shapes_in_other_groups_are_updated_otherwise():
    """An 8-bit output layer has the shape of the embedding, whose moments have 32 bits; the peak knows it."""
    model, batch = family("tiny-llama")
    optimizer = Adam8bit(Adam8bit.groups(model), lr=1e-3)
    trace = cost_trace(holdall.trace(model, batch, optimizer=optimizer), machine())
    units = {u.name: u for u in trace.units}
    assert units["lm_head"].weights != units["model.embed_tokens"].weights
    assert units["lm_head"].workspace > 2 * units["model.embed_tokens"].workspace
    plan = finish(Nop(), problem_for(trace), [Place.all(trace, update="via_device", when="step")])
    with holdall.apply(plan, model, optimizer) as harness:
        train(model, batch, optimizer, 2)
    assert harness.step_peaks[-1] == pytest.approx(plan.predicted.peak["cpu"], rel=2e-3)


def test_a_step_that_waits_for_the_host_takes_longer_where_activations_leave():
    """Copies go over the memory that the host works on."""
    model, batch = family("tiny-llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fast = replace(machine(overlap=True), updates=1e6)
    trace = cost_trace(holdall.trace(model, batch, optimizer=optimizer), fast)
    place = Place.all(trace, update="host", when="overlap_forward")
    leaving = [Offload.of(trace, b, overlap=True) for b in trace.blocks if b.saves and b.backward is not None]

    def seconds(actions, beside):
        problem = replace(problem_for(trace), hardware=replace(fast, updates_beside=beside))
        return simulate(problem, [place, *actions]).seconds

    alone, with_copies = ((seconds(actions, 1e6), seconds(actions, 2.5e5)) for actions in ([], leaving))
    assert alone[0] < alone[1]  # gradients and new weights are copied too
    assert alone[1] - alone[0] < with_copies[1] - with_copies[0]


@pytest.mark.parametrize(
    ("build", "dtype", "is_sampled"),
    [
        (torch.optim.AdamW, torch.bfloat16, True),
        (partial(torch.optim.AdamW, fused=True), torch.bfloat16, True),
        (torch.optim.AdamW, torch.float32, False),  # the probe has it
        (torch.optim.SGD, torch.float32, True),
        (torch.optim.Adafactor, torch.float32, False),
        (Adam8bit, torch.bfloat16, True),
        (GaLore, torch.bfloat16, True),
        (lambda params: GaLore([{"params": params, "rank": 4}]), torch.bfloat16, False),
    ],
    ids=["adamw", "fused", "adamw32", "sgd", "adafactor", "adam8bit", "galore", "rank"],
)
def test_rules_that_treat_elements_alone_are_timed_on_a_sample(build, dtype, is_sampled):
    """Within a trace, where tensors are fake; nothing of the optimizer's changes."""
    before = torch.random.get_rng_state()
    with FakeTensorMode():
        weights = [torch.nn.Parameter(torch.empty(n, 128, device="cuda", dtype=dtype)) for n in (96, 32)]
        optimizer = build(weights)
        updating = Updating(optimizer=optimizer, values=dict(zip("ab", weights, strict=True)), narrow={}, sliced=True)
        states = {id(p): dict(s) for p, s in optimizer.state.items()}
        found = updating.seconds_on_host()
    assert torch.equal(before, torch.random.get_rng_state())
    assert {id(p): dict(s) for p, s in optimizer.state.items()} == states
    assert all(p is q for group in optimizer.param_groups for p, q in zip(group["params"], weights, strict=True))
    assert found.keys() == (set("ab") if is_sampled else set())
    if is_sampled:
        assert 0 < found["b"] == pytest.approx(found["a"] / 3)


def test_what_was_measured_on_the_host_is_what_is_charged():
    trace = traced(Adam8bit)
    unit = replace(trace.units[0], host_seconds=0.25)
    slower = replace(H100, updates_beside=H100.updates / 2)
    assert host_seconds(unit, trace, slower) == 0.25
    assert host_seconds(unit, trace, slower, beside=True) == 0.5
