"""Updates in backward, as an action: the bits of the plain step, the bytes that were said, and nothing left behind."""

import copy
import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

import holdall
from holdall.actions.compress import Compress
from holdall.actions.in_backward import InBackward
from holdall.actions.offload import Offload
from holdall.actions.place import Place
from holdall.actions.recompute import Recompute
from holdall.actions.reschedule import Reschedule
from holdall.cost.roofline import cost_trace
from holdall.errors import InvalidInput, Unsupported
from holdall.optim.adafactor import Adafactor
from holdall.optim.adam_mini import AdamMini
from holdall.optim.apollo import Apollo
from holdall.optim.came import CAME
from holdall.optim.galore import GaLore
from holdall.optim.lomo import Lomo
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.testing.contracts import fingerprint, problem_for, train
from holdall.testing.worlds import DropoutBlock, Tied, family, machine
from holdall.tracing import trace_step
from holdall.tracing.step import default_loss
from holdall.types import Plan, Problem


class Small(nn.Module):
    """Two layers with dropout between an embedding and the head that shares its weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList([DropoutBlock(32, 0.2) for _ in range(2)])
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight

    forward = Tied.forward


def world(name):
    if name != "small":
        return family(name)
    torch.manual_seed(0)
    return Small(), (torch.randint(0, 64, (2, 16)),)


OPTIMIZERS = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9),
    "galore": lambda m: GaLore(GaLore.groups(m, rank=4), lr=1e-2),
    "came": lambda m: CAME(m.parameters(), lr=1e-3),
    "adafactor": lambda m: Adafactor(m.parameters()),
    "adam_mini": lambda m: AdamMini(m.named_parameters(), lr=1e-3),
    "apollo": lambda m: Apollo(Apollo.groups(m, rank=4), lr=1e-2),
}


def problem(model, batch, optimizer, **about) -> Problem:
    trace = cost_trace(trace_step(model, batch, optimizer=optimizer), machine())
    return replace(problem_for(trace), reads_gradients=False, **about)


def decide(posed: Problem, others=(), **options) -> Plan:
    return finish(Nop(), posed, [*others, InBackward.of(posed.trace, others, **options)])


def both(name, make, choose=lambda trace: [], *, reference=None):
    """(same losses and weights, plan, harness, model, optimizer, plain peak) of three steps of a family."""
    model, batch = world(name)
    twin = copy.deepcopy(model)
    optimizer = make(model)
    posed = problem(model, batch, optimizer)
    others = choose(posed.trace)
    plan, plain = decide(posed, others), finish(Nop(), posed, others)
    expected = train(twin, batch, (reference or make)(twin))
    gc.collect()
    with holdall.apply(plan, model, optimizer) as harness:
        got = train(model, batch, optimizer)
    mine, theirs = model.state_dict(), twin.state_dict()
    same = got == expected and all(torch.equal(mine[k], theirs[k]) for k in theirs)
    return same, plan, harness, model, optimizer, plain.predicted.peak["cpu"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_are_those_of_the_plain_step_and_the_peak_is_the_predicted_one(name):
    same, plan, harness, model, optimizer, _ = both("small", OPTIMIZERS[name])
    assert same
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]
    assert harness.notes == []
    assert all(p.grad is None for p in model.parameters())
    assert len(optimizer.state) == len(list(model.parameters())) or name in ("galore", "apollo")


@pytest.mark.parametrize("name", ["twice", "recurrent"])
def test_other_families_too(name):
    """A module that is used twice, and an LSTM."""
    same, plan, harness, *_ = both(name, OPTIMIZERS["adamw"])
    assert same
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]


def test_gradients_take_less_of_a_models_memory():
    _, plan, *_, plain = both("twice", OPTIMIZERS["momentum"])
    assert plan.predicted.peak["cpu"] < plain


@pytest.mark.parametrize("kind", [Recompute, Offload, Reschedule, Compress])
def test_it_stands_beside_what_is_done_about_activations(kind):
    """Blocks that are run op by op are both so: the second's gradients must go before the first is run again."""
    which = slice(0, 2) if kind is Reschedule else slice(1, 2)
    same, plan, harness, *_ = both("small", OPTIMIZERS["adamw"], lambda trace: kind.samples(trace)[which])
    assert same or not kind.exact
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]


LIMIT = 1e-4  # below every norm


def clipped(model, batch, optimizer, *, accumulate=1, limit=LIMIT):
    """Three steps of a loop that clips by itself, if at all: (losses, norms)."""
    torch.manual_seed(1)
    losses, norms = [], []
    for _ in range(3):
        for _ in range(accumulate):
            loss = default_loss(model, batch)
            loss.backward()
            losses.append(loss.item())
        if limit is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


HELD = [
    *[("small", name, None) for name in ("adamw", "momentum", "adafactor")],
    *[(family, "adamw", None) for family in ("twice", "recurrent")],
    *[("small", "adamw", kind) for kind in (Recompute, Offload, Reschedule)],
]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("name", "optimizer", "kind"), HELD)
def test_held_gradients_are_clipped_as_the_loop_would_and_counted_to_the_byte(name, optimizer, kind, accumulate):
    model, batch = world(name)
    twin = copy.deepcopy(model)
    make = OPTIMIZERS[optimizer]
    mine = make(model)
    posed = replace(problem(model, batch, mine), reads_gradients=True, accumulate=accumulate)
    others = [] if kind is None else kind.samples(posed.trace)[slice(0, 2) if kind is Reschedule else slice(1, 2)]
    plan = decide(posed, others, max_norm=LIMIT, accumulate=accumulate)
    expected, norms = clipped(twin, batch, make(twin), accumulate=accumulate)
    gc.collect()
    found = []
    with holdall.apply(plan, model, mine) as harness:
        mine.register_step_post_hook(lambda *_: found.append(harness.updates.norm.item()))
        losses, _ = clipped(model, batch, mine, accumulate=accumulate, limit=None)
    assert losses == expected
    assert found == norms and min(norms) > LIMIT
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]
    assert harness.notes == []
    assert torch.Tensor.backward.__module__ == "torch._tensor"
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


class Thin(nn.Module):
    """Hardly any activations, so that the most memory is taken after backward."""

    def __init__(self, layers, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.pow(2).mean()


@pytest.mark.parametrize(
    ("layers", "width", "name", "where"),
    [(3, 64, "adamw", "div"), (2, 64, "came", "mul"), (8, 2, "momentum", "their norm")],
)
def test_the_norm_and_updates_after_backward_are_counted_to_the_byte(layers, width, name, where):
    torch.manual_seed(0)
    model, batch = Thin(layers, width), (torch.randn(1, width),)
    optimizer = OPTIMIZERS[name](model)
    plan = decide(replace(problem(model, batch, optimizer), reads_gradients=True), max_norm=LIMIT)
    assert where in plan.predicted.peak_where
    with holdall.apply(plan, model, optimizer) as harness:
        train(model, batch, optimizer)
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]


def test_a_plan_with_a_norm_takes_lomo_if_it_holds_gradients_for_the_same():
    model, batch = world("small")
    twin = copy.deepcopy(model)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    plan = decide(replace(problem(model, batch, sgd), reads_gradients=True), max_norm=LIMIT)
    expected, _ = clipped(twin, batch, torch.optim.SGD(twin.parameters(), lr=1e-2))
    for options in ({}, {"clip_grad_norm": 1.0, "clip": "hold"}, {"clip_grad_norm": LIMIT, "clip": "hold", "accumulate": 2}):
        with (
            Lomo(model.parameters(), lr=1e-2, **options) as optimizer,
            pytest.raises(InvalidInput, match="holds gradients otherwise"),
        ):
            holdall.apply(plan, model, optimizer)
    with (
        Lomo(model.parameters(), lr=1e-2, clip_grad_norm=LIMIT, clip="hold") as optimizer,
        holdall.apply(plan, model, optimizer) as harness,
    ):
        assert train(model, batch, optimizer) == expected
    assert abs(harness.step_peaks[-1] - plan.predicted.peak["cpu"]) <= 8  # numbers of its own


def test_sgd_in_backward_is_lomo():
    same, *_ = both(
        "small", lambda m: torch.optim.SGD(m.parameters(), lr=1e-2), reference=lambda m: Lomo(m.parameters(), lr=1e-2)
    )
    assert same


def test_a_plan_for_sgd_takes_lomo_as_it_is():
    """It updates in backward by itself; the plan only says what that means for the memory."""
    model, batch = world("small")
    twin = copy.deepcopy(model)
    plan = decide(problem(model, batch, torch.optim.SGD(model.parameters(), lr=1e-2)))
    expected = train(twin, batch, torch.optim.SGD(twin.parameters(), lr=1e-2))
    with Lomo(model.parameters(), lr=1e-2) as optimizer, holdall.apply(plan, model, optimizer) as harness:
        assert train(model, batch, optimizer) == expected
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]


def test_leaving_restores_everything():
    model, batch = world("small")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    plan = decide(problem(model, batch, optimizer))
    before = fingerprint(model, optimizer)
    with holdall.apply(plan, model, optimizer):
        assert fingerprint(model, optimizer) != before
    assert fingerprint(model, optimizer) == before
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    model(*batch).backward()
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())


def test_a_loop_that_clips_is_refused_with_what_each_way_out_costs():
    model, batch = world("small")
    posed = problem(model, batch, torch.optim.AdamW(model.parameters()))
    with pytest.raises(Unsupported, match="global norm") as refused:
        decide(replace(posed, reads_gradients=True))
    assert "second backward" in refused.value.hint and "hold the gradients" in refused.value.hint
    with pytest.raises(Unsupported, match="gradients of 4 backwards"):
        decide(replace(posed, accumulate=4), accumulate=4)
    with pytest.raises(Unsupported, match="gradients of 4 backwards") as refused:
        decide(replace(posed, accumulate=4))
    assert "Flora" in refused.value.hint


def test_a_loop_that_clips_all_the_same_is_told_so():
    model, batch = world("small")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with holdall.apply(decide(problem(model, batch, optimizer)), model, optimizer):
        model(*batch).backward()
        with pytest.raises(Unsupported, match="this gradient is gone"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(Unsupported, match="were already applied and freed"):
            model(*batch).backward()


def test_what_cannot_be_combined_is_refused():
    model, batch = world("small")
    optimizer = torch.optim.AdamW(model.parameters())
    posed = problem(model, batch, optimizer)
    with pytest.raises(Unsupported, match="`in_backward` and `place`"):
        finish(Nop(), posed, [Place.all(posed.trace), InBackward()])
    with pytest.raises(Unsupported, match="no update"):
        decide(problem(model, batch, None))
    with pytest.raises(Unsupported, match="needs an optimizer"):
        holdall.apply(decide(posed), model, None)
    rescheduled = [Reschedule.samples(posed.trace)[0]]
    with pytest.raises(InvalidInput, match="run op by op"):
        holdall.apply(finish(Nop(), posed, [*rescheduled, InBackward()]), model, optimizer)


def test_where_copies_are_computed_with_it_is_place():
    model, batch = world("small")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trace = cost_trace(trace_step(model, batch, optimizer=optimizer, precision=torch.bfloat16), machine())
    posed = replace(problem_for(trace), reads_gradients=False)
    action = InBackward.of(trace)
    assert isinstance(action, Place) and action.when == "backward"
    with pytest.raises(Unsupported, match="working copies"):
        InBackward.of(trace, max_norm=1.0)
    with pytest.raises(Unsupported, match="cannot update"):
        finish(Nop(), posed, [InBackward()])
    plan = decide(posed)
    with holdall.apply(plan, model, optimizer) as harness:
        train(model, batch, optimizer)
    said, seen = plan.predicted.peak["cpu"], harness.step_peaks[-1]
    assert 0 <= said - seen < 0.01 * said  # `place` counts norms that updates in backward do not take


def test_a_plan_with_it_survives_saving(tmp_path):
    model, batch = world("small")
    posed = problem(model, batch, torch.optim.AdamW(model.parameters()))
    plan = decide(posed, [Reschedule.samples(posed.trace)[0]], max_norm=0.5)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").actions == plan.actions


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}])
def test_steps_of_many_parameters_in_one_op_are_predicted_by_their_share(options):
    """As on a GPU, where one op of the trace updates many parameters; in backward each takes its part of that."""
    same, plan, harness, *_ = both("small", lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, **options))
    said, seen = plan.predicted.peak["cpu"], harness.step_peaks[-1]
    assert abs(said - seen) < 0.02 * seen
    assert same or options == {"fused": True}


def test_swapped_codes_get_a_tier_and_fp16_is_refused_in_one_line():
    model, batch = world("small")
    trace = holdall.trace(model, batch)
    plan = finish(Nop(), problem_for(trace), [Compress.of(trace, trace.blocks[1], swap=True)])
    with holdall.apply(plan, model) as harness:
        assert harness.store is not None
    for word in ("fp16", "float16"):
        with pytest.raises(Unsupported, match="needs its loss scaled") as refused:
            holdall.trace(model, batch, precision=word)
        assert "bf16" in refused.value.hint and "\n" not in refused.value.fact


def test_auto_uses_it_up_where_that_was_allowed_and_pays():
    """A wide model on a short batch: gradients are most of what can go."""
    model, batch = family("tiny-llama")
    batch = {k: v[:1, :8] for k, v in batch.items()}
    reference = copy.deepcopy(model)
    expected = train(reference, batch, torch.optim.SGD(reference.parameters(), lr=1e-2, foreach=False), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
    trace = holdall.trace(model, batch, optimizer=optimizer)
    plain = holdall.plan(trace, planner="nop", hardware=machine()).predicted
    grads = sum(t.nbytes for t in trace.tensors.values() if t.kind.value == "grad")
    given = {"budget": plain.peak["cpu"] - grads // 2, "hardware": machine(), "reads_gradients": False}
    without = ["recompute", "offload"]
    with pytest.raises(holdall.Infeasible):
        holdall.plan(trace, **given, allow=without)
    plan = holdall.plan(trace, **given, allow=[*without, "in_backward"])
    assert plan.planner == "auto" and any(a.name == "in_backward" for a in plan.actions)
    with holdall.apply(plan, model, optimizer) as harness:
        assert train(model, batch, optimizer, 2) == expected
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    clipping = holdall.plan(
        trace, **{**given, "reads_gradients": True, "budget": plain.peak["cpu"]}, allow=[*without, "in_backward"]
    )
    assert not any(a.name == "in_backward" for a in clipping.actions)
