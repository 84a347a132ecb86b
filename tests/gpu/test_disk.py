"""A disk as a tier of the device that computes: activations and model states there, losses as plain, every byte counted.

The same cases run on a CPU, so that they are known to be right where there is no GPU.
"""

import os
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import holdall
from holdall.actions.offload import Offload
from holdall.actions.place import Place, streamable
from holdall.cost.roofline import cost_trace
from holdall.machine.more_tiers import with_tiers
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.problem import resolve_hardware
from holdall.testing.chaos import chaos
from holdall.testing.worlds import DeepNet, machine
from holdall.tiers.nvme import PIECE, Nvme
from holdall.types import Problem
from holdall.types.layout import PAGE
from holdall.units import MiB

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="about systems with `posix_fallocate`")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
WIDTH = {"cpu": 32, "cuda": 512}  # on a GPU a unit's bytes are more than a piece
STEPS = 4


@pytest.fixture(autouse=True)
def checked(disk, monkeypatch):
    """What is read from the disk is what was written there."""
    monkeypatch.setenv("HOLDALL_DEBUG", "checksums")


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """Device -> machine with a disk, whose rates are measured."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HOLDALL_NVME", str(tmp_path_factory.mktemp("probed")))
        near = {device: holdall.probe(device, quick=True) if device == "cuda" else machine() for device in DEVICES}
        return {device: with_tiers(hardware, ["nvme"]) for device, hardware in near.items()}


def fresh(device):
    torch.manual_seed(0)
    model = DeepNet(WIDTH[device], 5)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def batch_of(device):
    return (torch.randn(256, WIDTH[device], generator=torch.Generator().manual_seed(1)).to(device),)


def traced(device, probed, precision=None):
    """(costed trace, machine with a disk)"""
    hardware = resolve_hardware(probed[device], device)  # with the kernels that tests before have loaded
    trace = (trace_on if device == "cuda" else cached_trace)(device, precision)
    return cost_trace(trace, hardware), hardware


def trace_on(device, precision):
    model, optimizer = fresh(device)
    return holdall.trace(model, batch_of(device), optimizer=optimizer, device=device, precision=precision)


cached_trace = cache(trace_on)  # where nothing is timed


def planned(trace, hardware, actions):
    budget = {tier.name: tier.capacity for tier in hardware.tiers}
    return finish(Nop(), Problem(trace=trace, hardware=hardware, budget=budget), actions)


def trained(device, plan=None, *, clip=None, backwards=1):
    """Losses, parameters at the end, and what was measured."""
    model, optimizer = fresh(device)
    is_placed = plan is not None and any(a.places_states for a in plan.actions)
    if not is_placed:
        model.to(device)
    harness = holdall.apply(plan, model, optimizer, enforce=False) if plan is not None else None
    losses = []
    torch.manual_seed(3)
    for _ in range(STEPS):
        for _ in range(backwards):
            loss = model(*batch_of(device))
            loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.state_dict()  # finishes the updates of the last step
    measured = harness.measured() if harness is not None else None
    if harness is not None:
        assert harness.notes == []
        harness.close()
    return losses, [p.detach().cpu().clone() for p in model.parameters()], measured


@cache
def plain_losses(device, clip):
    return trained(device, clip=clip)[0]


def check_bytes(measured, plan):
    assert dict(measured.traffic) == dict(plan.predicted.traffic)
    assert measured.peak["nvme"] == plan.predicted.peak["nvme"] > 0


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_of_the_device_come_back_from_the_disk(device):
    store = Nvme(device=device)
    for nbytes in (4, 4096, PIECE, 3 * PIECE + 20):
        source = torch.arange(nbytes // 4, dtype=torch.int32, device=device)
        ticket = store.put(source.untyped_storage())
        store.wait(ticket)
        expected = source.clone()
        source.fill_(-1)  # allowed from here on
        fetched = store.get(ticket, device)
        store.wait_in(ticket)
        assert torch.equal(torch.empty(0, dtype=torch.int32, device=device).set_(fetched), expected)
        store.free(ticket)
        del fetched
    assert store.used == 0 and not [note for note in store.notes if "pinned" in note]
    store.close()


@pytest.mark.parametrize("on", [False, True], ids=["calm", "chaos"])
@pytest.mark.parametrize("device", DEVICES)
def test_activations_on_disk_give_the_losses_of_plain_training(device, on, probed, monkeypatch):
    trace, hardware = traced(device, probed)
    actions = [Offload.of(trace, block, overlap=n % 2 == 0, tier="nvme") for n, block in enumerate(trace.blocks)]
    plan = planned(trace, hardware, actions)
    expected = trained(device)
    with chaos(5) if on else monkeypatch.context():
        losses, weights, measured = trained(device, plan)
    assert losses == expected[0] and all(map(torch.equal, weights, expected[1]))
    check_bytes(measured, plan)


WHAT = {  # what lies on the disk
    "weights and gradients": {"elsewhere": True},
    "states": {"states": True},
    "everything": {"elsewhere": True, "states": True},
}
PLACED = [  # device, precision, weights, when
    *(("cpu", precision, weights, "overlap_forward") for precision in (None, "bf16") for weights in ("streamed", "resident")),
    *(
        ("cuda", precision, weights, when)
        for precision in (None, "bf16")
        for weights in ("streamed", "resident")
        for when in ("step", "overlap_forward", "backward")
        if torch.cuda.is_available()
    ),
]


@pytest.mark.parametrize("on", [False, True], ids=["calm", "chaos"])
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize(("device", "precision", "weights", "when"), PLACED)
def test_states_on_disk_train_as_those_in_host_memory(device, precision, weights, when, what, on, probed, monkeypatch):
    trace, hardware = traced(device, probed, precision)
    can = streamable(trace)
    rows = {u.name: (weights if u.name in can else "resident", "host") for u in trace.units}
    there = tuple((u.name, "nvme") for u in trace.units)
    near = Place.of(trace, rows, when=when, stretch=3 * PAGE if device == "cpu" else MiB)
    far = replace(near, **dict.fromkeys(WHAT[what], there))
    before, plan = (planned(trace, hardware, [place]) for place in (near, far))
    clip = None if when == "backward" else 0.05
    with chaos(7) if on else monkeypatch.context():
        losses, values, measured = trained(device, plan, clip=clip)
    others, expected, _ = trained(device, before, clip=clip)
    assert losses == others and all(map(torch.equal, values, expected))
    if precision is None:  # the host's Adam rounds otherwise than a GPU's, by an ulp
        plain = plain_losses(device, clip)
        assert losses == plain if device == "cpu" else losses == pytest.approx(plain, rel=1e-3)
    check_bytes(measured, plan)


@pytest.mark.parametrize("device", DEVICES)
def test_buffers_for_stretches_are_pinned_and_in_the_budget_of_the_host(device, probed):
    """What a plan predicts of the host's memory is what its store gives, besides what is outside of it."""
    trace, hardware = traced(device, probed, "bf16")
    rows = {u.name: ("resident", "host") for u in trace.units}
    place = Place.of(trace, rows, stretch=MiB, buffers=2, states={u.name: "nvme" for u in trace.units})
    plan = planned(trace, hardware, [place])
    model, optimizer = fresh(device)
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:
        rooms = harness.engine._stretched._rooms
        assert len(rooms) == 2 and all(room.ticket.buffer.is_pinned == (device == "cuda") for room in rooms)
        assert harness.stores.nearest.used >= sum(room.ticket.nbytes for room in rooms)
    near = planned(trace, hardware, [replace(place, states=())])
    shaped = sum(trace.tensors[x].nbytes for u in trace.units for x in u.states if trace.tensors[x].shape)
    saved = near.predicted.peak[hardware.tiers[1].name] - plan.predicted.peak[hardware.tiers[1].name]
    assert saved == shaped - sum(room.ticket.nbytes for room in rooms)
