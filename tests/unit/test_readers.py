"""Every reader of a weight gets it up to date and on the device, whatever module, hook, lazy tensor or walk reads it."""

import copy
import time
from dataclasses import replace

import pytest
import torch

import holdall
from holdall.actions.place import Place, streamable
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.runtime.states.weights.slots import Slots
from holdall.simulator.lower import lower
from holdall.testing import draws
from holdall.testing.chaos import chaos
from holdall.testing.contracts import problem_for
from holdall.testing.readers import READERS
from holdall.testing.stand_ins import late_updates
from holdall.testing.states import differences
from holdall.types import Wait

pytestmark = pytest.mark.usefixtures("no_modes_left")
BASE = replace(draws.draw(0, 0), rule="plain", narrow=False, rows=0, tied=False, clipped="always", accumulate=1, ahead=False)


def as_drawn(**changes):
    usual = {"kind": ("resident", "host"), "when": "overlap_forward", "overlap": True, "share": False, "activations": False}
    return draws.run(replace(BASE, **usual | changes))


@pytest.mark.parametrize("name", READERS)
@late_updates(0.02)
def test_a_late_update_is_waited_for_whoever_reads(name):
    assert as_drawn(family=name) == []


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [0, 5])
@late_updates(0.02)
def test_a_late_update_of_the_head_is_waited_for(tied, rows):
    assert as_drawn(family="tiny-llama", rows=rows, tied=tied) == []


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("kind", [("streamed", "host"), ("streamed", "via_device"), ("streamed", "device")])
@pytest.mark.parametrize("name", READERS)
def test_weights_that_come_and_go_may_be_read_by_others(name, kind, narrow):
    assert as_drawn(family=name, kind=kind, narrow=narrow and name != "choosing") == []


def test_members_of_a_unit_that_get_no_gradient_keep_their_weights_in_bfloat16():
    """An expert without tokens: its copy must not be what lay in the gradient's buffer."""
    for kind in [("resident", "host"), ("streamed", "host"), ("streamed", "via_device"), ("resident", "via_device")]:
        for share in (False, True):
            assert unused_experts(kind, share) == [], (kind, share)


class Unused(torch.nn.Module):
    """Blocks with three experts, of which one works; which, an attribute says."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16)
        self.layers = torch.nn.ModuleList(Expert() for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


class Expert(torch.nn.Module):
    chosen = 0

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return x + self.experts[self.chosen](x).relu()


def unused_experts(kind, share):
    torch.manual_seed(0)
    start, ids = Unused(), torch.randint(0, 16, (2, 6))

    def adamw(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    trace = holdall.trace(start, (ids,), optimizer=adamw(start), precision="bf16")
    can = streamable(trace)
    rows = {u.name: (kind[0] if u.name in can else "resident", kind[1]) for u in trace.units}
    plan = finish(Nop(), problem_for(trace), [Place.of(trace, rows, when="overlap_forward", share=share)])
    model, reference = copy.deepcopy(start), copy.deepcopy(start)
    mine, theirs = adamw(model), adamw(reference)

    def train(model, optimizer, work):
        seen = []
        for n in range(7):
            for layer in work.layers:
                layer.chosen = (0, 0, 1, 2, 1, 0, 2)[n]
            loss = work(ids)
            loss.backward()
            if work is not model:
                draws.hand_over(model, work)
            optimizer.step()
            optimizer.zero_grad()
            if work is not model:
                for p, w in zip(model.parameters(), work.parameters(), strict=True):
                    w.data.copy_(p.data)
            seen.append(loss.item())
        return copy.deepcopy([seen, dict(model.state_dict())])

    narrow = copy.deepcopy(reference)
    for w in narrow.parameters():
        w.data = w.data.bfloat16()
    expected = train(reference, theirs, narrow)
    with chaos(1), holdall.apply(plan, model, mine, enforce=False):
        found = train(model, mine, model)
    return differences(found, expected)


# what stands in the modules


def placed(kind=("resident", "host"), when="overlap_forward", name="top-parameters"):
    model, (ids,) = draws.start(name, False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = holdall.trace(model, (ids,), optimizer=optimizer)
    can = streamable(trace)
    rows = {u.name: (kind[0] if u.name in can else "resident", kind[1]) for u in trace.units}
    plan = finish(Nop(), problem_for(trace), [Place.of(trace, rows, when=when)])
    return model, ids, optimizer, holdall.apply(plan, model, optimizer, enforce=False)


def step(model, ids, optimizer):
    model(ids).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_modules_have_their_own_dictionaries_again():
    model, ids, optimizer, harness = placed()
    before = {path: type(m._parameters) for path, m in model.named_modules()}
    assert Slots in before.values()
    step(model, ids, optimizer)
    harness.close()
    assert {type(m._parameters) for m in model.modules()} == {dict}
    assert all(isinstance(p, torch.nn.Parameter) for m in model.modules() for p in m._parameters.values() if p is not None)


def test_a_weight_of_an_earlier_step_is_not_computed_with():
    model, ids, optimizer, harness = placed()
    with harness:
        step(model, ids, optimizer)
        harness.engine.settle()
        unit = next(u for u in harness.engine.units if u.name == "layers.1")
        unit.due += 1  # as if an update had been lost
        with pytest.raises(holdall.HoldallError, match=r"`layers.1` cannot be computed with: they are of update"):
            model(ids)
        unit.due -= 1


def test_weights_that_come_and_go_are_not_computed_with_before_they_set_out_anew():
    model, ids, optimizer, harness = placed(("streamed", "host"), when="step", name="normed")
    with harness:
        step(model, ids, optimizer)
        engine = harness.engine
        unit = next(u for u in engine.units if u.is_streamed)
        engine.streaming.fetch(unit)
        unit.due, unit.made = unit.due + 1, unit.made + 1  # as if it had been updated while its weights were on their way
        with pytest.raises(holdall.HoldallError, match="they are of update"):
            engine.streaming.arrive(unit)
        unit.due, unit.made = unit.due - 1, unit.made - 1


@pytest.mark.parametrize("kind", [("resident", "host"), ("streamed", "host")])
def test_a_graph_whose_weights_were_updated_is_not_walked(kind):
    """As in plain training, where the update is in place."""
    model, ids, optimizer, harness = placed(kind)
    with harness:
        step(model, ids, optimizer)
        loss = model(ids)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError):
            loss.backward()


def test_logits_in_rows_are_not_computed_from_weights_of_a_later_step():
    d = replace(BASE, family="tiny-llama", rows=5)
    trace = draws.traced(d.family, False, d.rule, False, d.rows, "cpu")
    rows = {u.name: ("resident", "host") for u in trace.units}
    plan = finish(Nop(), problem_for(trace), [Place.of(trace, rows, when="overlap_forward")])
    model, batch = draws.start(d.family, False)
    optimizer = draws.make_optimizer(d.rule, model)
    with holdall.apply(plan, model, optimizer, enforce=False):
        out = model(**batch)
        out.loss.backward()
        optimizer.step()
        with pytest.raises(holdall.Unsupported, match="read after the head's weight"):
            out.logits.sum()


# what the plan knows of readers


def test_units_that_others_read_do_not_come_and_go():
    def can(name):
        model, batch = draws.start(name, False)
        return streamable(holdall.trace(model, batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))

    assert "positions" not in can("read-by-parent")
    assert not can("read-twice") & {"layers.0", "layers.1", "layers.2"}
    assert can("hooked") >= {"layers.0", "layers.1", "layers.2"}
    assert "gate" not in can("hooked")
    assert can("regularised") == set()


def test_the_simulator_waits_for_updates_of_what_no_block_reads():
    model, batch = draws.start("top-parameters", False)
    trace = holdall.trace(model, batch, optimizer=torch.optim.AdamW(model.parameters()))
    problem = problem_for(trace, overlap=True)
    schedule = lower(problem, [Place.all(trace, update="host", when="overlap_forward")])
    waits = [s for s in schedule.steps() if isinstance(s, Wait)]
    names = {schedule.info(x).name for w in waits for x in w.tensors}
    assert {f"{u.name}: gradients" for u in trace.units} <= names


class Listed(torch.nn.Module):
    """Holds a parameter in a list of its own, too, and computes with that."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.scale = torch.nn.Linear(8, 8, bias=False)
        self.own = [self.scale.weight]

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return (x @ self.own[0]).square().mean()


@pytest.mark.parametrize("kind", ["host", "via_device"])
@late_updates(0.02)
def test_a_parameter_that_is_held_beside_its_module_is_updated_and_waited_for(kind):
    torch.manual_seed(0)
    x, model, reference = torch.randn(4, 8), Listed(), Listed()
    reference.load_state_dict(model.state_dict())

    def train(model, optimizer):
        seen = []
        for _ in range(5):
            loss = model(x)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return copy.deepcopy([seen, dict(model.state_dict())])

    optimizer, plain = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference))
    trace = holdall.trace(model, (x,), optimizer=optimizer)
    plan = finish(Nop(), problem_for(trace), [Place.all(trace, update=kind, when="overlap_forward")])
    with holdall.apply(plan, model, optimizer, enforce=False):
        found = train(model, optimizer)
    assert differences(found, train(reference, plain)) == []


@late_updates(0.1)
def test_the_first_blocks_compute_while_updates_of_later_ones_run():
    """Through `fit`: nothing of ours may walk over all weights at the beginning of a forward and wait for every one."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2, vocab_size=64
    )
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(0, 64, (2, 16))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    layers = model.model.layers
    batch = {"input_ids": ids, "labels": ids}
    harness = holdall.fit(model, optimizer, batch, budget="95%", planner="zero_offload", overlap=True)
    began: list[float] = []
    hooks = [layer.register_forward_pre_hook(lambda *_: began.append(time.perf_counter())) for layer in (layers[0], layers[-1])]
    with harness:
        for _ in range(3):
            began.clear()
            model(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    for hook in hooks:
        hook.remove()
    assert began[1] - began[0] > 0.15, "the first block waited for updates of blocks behind it"


def test_a_weight_whose_memory_the_model_replaces_is_refused():
    class Replacing(torch.nn.Linear):
        def forward(self, x):
            if self.training:
                self.weight.data = self.weight.data.clone()
            return super().forward(x)

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Replacing(8, 8), torch.nn.Linear(8, 8))
    x = torch.randn(4, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    trace = holdall.trace(model.eval(), x, optimizer=optimizer, loss=lambda m, b: m(b).sum())
    rows = {unit.name: ("streamed", "host") if unit.name in streamable(trace) else ("resident", "host") for unit in trace.units}
    plan = finish(Nop(), problem_for(trace), [Place.of(trace, rows, when="step")])
    model.train()
    refused = pytest.raises(holdall.Unsupported, match=r"memory of a weight of .* was replaced")
    with holdall.apply(plan, model, optimizer, enforce=False), refused:
        model(x).sum().backward()
