"""ZeRO-Offload (Ren et al., USENIX ATC 2021, arXiv 2101.06840): what the paper says, on tiny models and in the simulator."""

import copy
import gc
from dataclasses import replace
from functools import cache

import pytest
import torch

import holdall
from holdall.actions.recompute import Recompute
from holdall.errors import InvalidInput, Unsupported
from holdall.simulator import simulate
from holdall.testing.contracts import problem_for
from holdall.testing.worlds import chain, family, machine
from holdall.tracing.step import default_loss
from holdall.types import Kind

PADDING = 256  # bytes at most, per tensor


CLIP = 1e-4  # bites in every step


def build(name="tied", precision=None, freeze=""):
    """A model, its batch, an AdamW over what it trains, and the trace of a step."""
    model, batch = family(name)
    for key, p in model.named_parameters():
        p.requires_grad_(not freeze or freeze not in key)
    return model, batch, adamw(model), traced(name, precision, freeze)


@cache
def traced(name, precision, freeze):
    model, batch = family(name)
    for key, p in model.named_parameters():
        p.requires_grad_(not freeze or freeze not in key)
    return holdall.trace(model, batch, optimizer=adamw(model), precision=precision)


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def planned(trace, hardware=None, **options):
    return holdall.plan(trace, planner="zero_offload", hardware=hardware or machine(), **options)


def train(model, batch, optimizer, steps, backwards=1):
    """Clipped, with a schedule."""
    torch.manual_seed(1)
    losses = []
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    for _ in range(steps):
        for _ in range(backwards):
            loss = default_loss(model, batch)
            loss.backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same_states(first, second):
    """Both optimizers hold the same bits."""
    mine, theirs = first.state_dict()["state"], second.state_dict()["state"]
    return mine.keys() == theirs.keys() and all(torch.equal(mine[n][k], theirs[n][k]) for n in mine for k in mine[n])


def same_weights(first, second):
    return all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"recompute": False}], ids=["paper", "overlap", "keep"])
@pytest.mark.parametrize("name", ["tied", "twice"])
def test_steps_are_those_of_plain_adamw_bit_for_bit(name, options):
    """Check (1) of the catalogue, on float32: losses, weights and states after one step and after five; the peak as said."""
    model, batch, optimizer, trace = build(name)
    reference = copy.deepcopy(model)
    theirs = adamw(reference)
    expected = [(train(reference, batch, theirs, n), *copy.deepcopy((reference, theirs))) for n in (1, 4)]
    plan = planned(trace, **options)
    gc.collect()
    with holdall.apply(plan, model, optimizer) as harness:
        for losses, plain, plain_optimizer in expected:
            assert train(model, batch, optimizer, len(losses)) == losses
            assert same_states(optimizer, plain_optimizer)  # which waits for updates under way
            assert same_weights(model, plain)
    assert same_weights(model, reference)
    assert harness.step_peaks[0] == plan.predicted.peak["cpu"]  # comparing brings the plain weights into sight
    assert harness.notes == []


def test_accumulated_gradients_are_added_as_in_plain_training():
    model, batch, optimizer, trace = build()
    reference = copy.deepcopy(model)
    expected = train(reference, batch, adamw(reference), 3, backwards=2)
    with holdall.apply(planned(trace, accumulate=2), model, optimizer):
        assert train(model, batch, optimizer, 3, backwards=2) == expected
    assert same_weights(model, reference)


class Mixed:
    """What everyone writes by hand: a bfloat16 model, float32 masters, and a float32 AdamW over the masters."""

    def __init__(self, model):
        self.model = copy.deepcopy(model)
        self.masters = [torch.nn.Parameter(p.detach().clone()) for p in self.model.parameters()]
        for p in self.model.parameters():
            p.data = p.data.bfloat16()
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-3)

    def train(self, batch, steps):
        torch.manual_seed(1)
        losses = []
        schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (1 + n))
        for _ in range(steps):
            loss = default_loss(self.model, batch)
            loss.backward()
            for master, p in zip(self.masters, self.model.parameters(), strict=True):
                master.grad, p.grad = p.grad.float(), None
            torch.nn.utils.clip_grad_norm_(self.masters, CLIP)
            self.optimizer.step()
            schedule.step()
            for master, p in zip(self.masters, self.model.parameters(), strict=True):
                p.data.copy_(master)
            losses.append(loss.item())
        return losses


def test_in_bfloat16_it_is_narrow_weights_with_wide_masters():
    """Check (1), mixed precision: losses and masters of five steps equal those of a loop written by hand."""
    model, batch, optimizer, trace = build(precision="bf16")
    reference = Mixed(model)
    expected = reference.train(batch, 5)
    plan = planned(trace)
    gc.collect()
    with holdall.apply(plan, model, optimizer) as harness:
        assert train(model, batch, optimizer, 5) == expected
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.masters, strict=True))
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]


@pytest.mark.parametrize(("precision", "width"), [("bf16", 2), (None, 4)])
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"delayed": True}], ids=["paper", "overlap", "delayed"])
def test_a_step_moves_the_gradients_down_and_the_weights_up(precision, width, options):
    """Check (2): 2P down and 2P up in mixed precision, twice that in float32; no state is on the device. The bytes that a
    real run copies are counted too."""
    model, batch, optimizer, trace = build(precision=precision)
    count, tensors = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
    plan = planned(trace, hardware=machine(overlap=True), **options)
    for way in ("cpu->far", "far->cpu"):
        assert width * count <= plan.predicted.traffic[way] <= width * count + PADDING * tensors
    assert width * count <= plan.predicted.peak_kinds[Kind.PARAM] <= width * count + PADDING * tensors
    assert Kind.STATE not in plan.predicted.peak_kinds
    gc.collect()
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:
        train(model, batch, optimizer, 3)
    assert harness.measured().traffic == plan.predicted.traffic


def test_the_device_holds_an_eighth_of_the_states():
    """Claim: 16P bytes of model states become 2P. Gradients are there one unit at a time."""
    model, _, _, trace = build(precision="bf16")
    count = sum(p.numel() for p in model.parameters())
    kinds = trace.bytes_by_kind()
    plain = sum(kinds[k] for k in (Kind.PARAM, Kind.GRAD, Kind.STATE))
    assert plain == pytest.approx(16 * count, rel=0.01)
    held = planned(trace).predicted.peak_kinds
    assert held[Kind.PARAM] == pytest.approx(plain / 8, rel=0.07)  # padding of a tiny model
    largest = max(sum(trace.tensors[g].nbytes for g in u.grads) for u in trace.units)
    assert held[Kind.GRAD] <= 2 * largest + PADDING * 8


def test_what_is_frozen_stays_where_it_is_of_use():
    """In float32 a frozen unit has nothing to put on the host; in bfloat16 its wide copy goes there."""
    for precision, expected in ((None, "device"), ("bf16", "host")):
        model, batch, optimizer, trace = build(precision=precision, freeze="layers.1")
        plan = planned(trace)
        rows = {unit: update for unit, _, update in next(a for a in plan.actions if a.name == "place").units}
        assert rows["layers.1"] == expected
        assert {rows[u] for u in rows if u != "layers.1"} == {"host"}
        before = copy.deepcopy(model)
        gc.collect()
        with holdall.apply(plan, model, optimizer) as harness:
            train(model, batch, optimizer, 2)
        assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]
        assert same_weights(model.layers[1], before.layers[1])
        assert not same_weights(model.layers[0], before.layers[0])


def test_every_block_that_holds_something_is_recomputed():
    """As in practice; and a step without an optimizer, or without units, has nothing else to do."""
    _, _, _, trace = build()
    recomputed = {b for a in planned(trace).actions if isinstance(a, Recompute) for b in a.blocks}
    assert recomputed == {"layers.0", "layers.1", "layers.2", "layers.3"}
    assert {a.name for a in planned(trace, recompute=False).actions} == {"place"}
    assert {a.name for a in planned(chain([50] * 5)).actions} == {"recompute"}
    model, batch = family("tied")
    assert {a.name for a in planned(holdall.trace(model, batch)).actions} == {"recompute"}


def test_the_update_is_waited_for_unless_it_may_go_on_beside_the_next_step():
    """A host that is slow against the device: a step is compute + update in the paper; with overlap part of it, and with the
    delay nearly all of it, is hidden."""
    _, _, _, trace = build()
    hardware = replace(machine(overlap=True, read=1e11, write=1e11), updates=3e6)
    update = sum(u.numel for u in trace.units) / hardware.updates
    seconds = {n: planned(trace, hardware, **o).predicted.seconds for n, o in OPTIONS.items()}
    compute = seconds["paper"] - update
    assert 0 < update < compute
    assert seconds["overlap"] < seconds["paper"] - 0.2 * update
    assert compute < seconds["delayed"] < seconds["paper"] - 0.5 * update


OPTIONS = {"paper": {}, "overlap": {"overlap": True}, "delayed": {"delayed": True}}


# the delayed parameter update


def delayed_by_hand(model, batch, steps, warmup):
    """Parameters used at step i + 1 contain the gradients up to i - 1; those held back last are applied at the end."""
    optimizer = adamw(model)
    torch.manual_seed(1)
    kept, losses = None, []
    for i in range(steps):
        loss = default_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        fresh = [p.grad for p in model.parameters()]
        if i >= warmup:
            for p, g in zip(model.parameters(), kept or [None] * len(fresh), strict=True):
                p.grad = g
            kept = fresh
        optimizer.step()  # which leaves parameters without a gradient alone
        optimizer.zero_grad()
        losses.append(loss.item())
    for p, g in zip(model.parameters(), kept or fresh, strict=True):
        p.grad = g if kept else None
    optimizer.step()
    return losses


def steady(model, batch, optimizer, steps):
    losses = []
    for _ in range(steps):
        loss = default_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("warmup", "steps"), [(0, 4), (2, 6), (9, 4)])
def test_a_delayed_gradient_takes_effect_exactly_one_step_late(warmup, steps):
    """Check (3): losses and weights equal those of a loop that holds every gradient back by hand."""
    model, batch, optimizer, trace = build()
    reference = copy.deepcopy(model)
    expected = delayed_by_hand(reference, batch, steps, warmup)
    plan = planned(trace, delayed=True, warmup=warmup)
    assert not all(a.exact for a in plan.actions)
    gc.collect()
    with holdall.apply(plan, model, optimizer) as harness:
        torch.manual_seed(1)
        assert steady(model, batch, optimizer, steps) == expected
    assert same_weights(model, reference)
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]
    if warmup < steps:
        assert harness.measured().peak["far"] == pytest.approx(plan.predicted.peak["far"], rel=0.01)
    assert harness.notes == []


def test_a_checkpoint_in_between_has_every_gradient_and_changes_nothing():
    model, batch, _, trace = build()
    runs = {}
    for looks in (False, True):
        trained = copy.deepcopy(model)
        mine = adamw(trained)
        with holdall.apply(planned(trace, delayed=True, warmup=1), trained, mine):
            torch.manual_seed(1)
            losses = steady(trained, batch, mine, 3)
            if looks:
                saved = copy.deepcopy(trained.state_dict())
                assert all(s["step"] == 3 for s in mine.state_dict()["state"].values())
            losses += steady(trained, batch, mine, 2)
        runs[looks] = losses, trained
    assert runs[True][0] == runs[False][0]
    assert same_weights(runs[True][1], runs[False][1])
    reference = copy.deepcopy(model)
    delayed_by_hand(reference, batch, 3, 1)
    assert all(torch.equal(saved[k], v) for k, v in reference.state_dict().items())


def test_what_is_held_back_lies_on_the_host():
    """Another 4P bytes there, none here."""
    model, _, _, trace = build(precision="bf16")
    count = sum(p.numel() for p in model.parameters())
    ordinary, late = planned(trace).predicted, planned(trace, delayed=True).predicted
    assert late.peak["far"] - ordinary.peak["far"] == 4 * count
    assert late.peak["cpu"] == ordinary.peak["cpu"]


def test_wrong_options_are_refused():
    _, _, _, trace = build()
    for options, what in (({"delayed": True, "overlap": True}, "overlap"), ({"warmup": -1}, "warmup")):
        with pytest.raises(InvalidInput, match=what):
            planned(trace, **options)
    with pytest.raises(Unsupported, match="place"):
        planned(trace, allow=["recompute"])
    plain = simulate(problem_for(trace), []).peak["cpu"]
    with pytest.raises(holdall.Infeasible):
        planned(trace, budget=plain // 8)
