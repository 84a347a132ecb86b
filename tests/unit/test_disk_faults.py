"""A disk that fails, fills up or slows down in the middle of a step: one clear line, nothing corrupt, and the run goes on from
its last complete checkpoint with the bits of a run that was left alone."""

import errno
import gc
import os
import time
from contextlib import closing
from dataclasses import replace
from functools import cache

import pytest
import torch

import holdall
from holdall.actions.offload import Offload
from holdall.actions.place import Place, streamable
from holdall.errors import DiskError, HoldallError
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.testing.stand_ins import failing_disk, slow_disk, unreadable
from holdall.testing.worlds import DeepNet, machine
from holdall.tiers.nvme import Nvme
from holdall.types import Link, Problem, Tier
from holdall.types.layout import PAGE

pytestmark = [
    pytest.mark.usefixtures("disk"),
    pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="about systems with `posix_fallocate`"),
]
FAULTS = {"preadv": errno.EIO, "pwritev": errno.ENOSPC}  # a read error; a disk that others have filled
BATCH = (torch.randn(8, 16, generator=torch.Generator().manual_seed(1)),)


def fresh():
    torch.manual_seed(0)
    model = DeepNet(16, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


@cache
def traced(precision):
    model, optimizer = fresh()
    return holdall.trace(model, BATCH, optimizer=optimizer, precision=precision)


@cache
def planned(what, when="step", weights="streamed", precision=None, rate=1e8):
    """What lies on the disk: activations, weights (and gradients), states (and masters)."""
    trace = traced(precision)
    there = machine()
    hardware = replace(
        there,
        tiers=(*there.tiers, Tier(name="nvme", capacity=2**50, read=rate, write=rate)),
        links=(Link(source="far", destination="nvme", rate=rate), Link(source="nvme", destination="far", rate=rate)),
    )
    actions = [Offload.of(trace, b, overlap=True, tier="nvme") for b in trace.blocks] if "activations" in what else []
    if "weights" in what or "states" in what:
        can, every = streamable(trace), {u.name: "nvme" for u in trace.units}
        rows = {u.name: (weights if u.name in can else "resident", "host") for u in trace.units}
        states = {"states": every, "stretch": PAGE, "buffers": 2} if "states" in what else {}
        place = Place.of(trace, rows, when=when, **states)
        actions.append(replace(place, elsewhere=tuple(every.items())) if "weights" in what else place)
    return finish(Nop(), Problem(trace=trace, hardware=hardware, budget={}), actions)


def step(model, optimizer, number):
    torch.manual_seed(100 + number)
    loss = model(*BATCH)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def values(model, optimizer):
    moments = optimizer.state_dict()["state"]  # which waits for updates that are under way
    found = [*model.parameters(), *(v for n in sorted(moments) for _, v in sorted(moments[n].items()))]
    return [t.detach().clone() for t in found]


@cache
def left_alone(*case):
    """Weights and states after each step, and how often the disk is called in the second."""
    plan = planned(*case)
    model, optimizer = fresh()
    found, counts = [], {}
    with holdall.apply(plan, model, optimizer), failing_disk("preadv", None) as reads, failing_disk("pwritev", None) as writes:
        for n in range(3):
            before = reads.count, writes.count
            step(model, optimizer, n)
            found.append(values(model, optimizer))
            counts[n] = {"preadv": reads.count - before[0], "pwritev": writes.count - before[1]}
    return found, counts[1]


def interrupted(plan, out, call, first):
    """The second step of a run meets a fault, and the loop then tries to save. The error."""
    model, optimizer = fresh()
    harness = holdall.apply(plan, model, optimizer)
    step(model, optimizer, 0)
    holdall.save_checkpoint(out, model, optimizer, step=1)
    error = ""
    with failing_disk(call, first, FAULTS[call]):
        try:
            step(model, optimizer, 1)
            optimizer.state_dict()
        except DiskError as raised:
            error = str(raised)
    try:
        holdall.save_checkpoint(out, model, optimizer, step=2)
    except HoldallError as refused:
        assert "some states of the model are new, some are old" in str(refused) or "the one of step 1 is intact" in str(refused)
    gc.collect()
    try:
        harness.close()
    except DiskError:
        assert error  # again: what was under way is waited for
    return error


CASES = [("activations", "step", "streamed", None)]
CASES += [
    (what, when, weights, precision)
    for what in ("weights", "states", "activations, weights, states")
    for when, weights, precision in (
        ("step", "resident", "bf16"),
        ("overlap_forward", "streamed", None),
        ("backward", "streamed", "bf16"),
        ("backward", "resident", None),
    )
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize("call", FAULTS)
def test_a_fault_at_any_moment_of_a_step(call, case, tmp_path):
    plan = planned(*case)
    alone, counts = left_alone(*case)
    count = counts[call]
    for moment in {count // 4, 3 * count // 4}:
        out = tmp_path / str(moment)
        error = interrupted(plan, out, call, moment)
        assert os.strerror(FAULTS[call]) in error.splitlines()[0] and error.count("\nhint: ") == 1
        model, optimizer = fresh()
        with holdall.apply(plan, model, optimizer):
            found = holdall.load_checkpoint(out, model, optimizer)
            whole = [n for n in (0, 1) if all(map(torch.equal, values(model, optimizer), alone[n]))]
            assert len(whole) == 1 and whole[0] <= found.step - 1  # of one step or of the other, never of a part of one
            step(model, optimizer, whole[0] + 1)
            assert all(map(torch.equal, values(model, optimizer), alone[whole[0] + 1]))


@pytest.mark.parametrize("what", ["activations", "weights", "states"])
def test_a_slow_disk_gives_the_same_bits_and_the_report_says_so(what):
    alone, _ = left_alone(what)
    for rate, seconds in ((1e3, 0.0), (1e9, 0.01)):  # 4 KiB take 4 s by the plan, which any disk reaches; 4 us, which none does
        model, optimizer = fresh()
        with slow_disk(seconds), holdall.apply(planned(what, rate=rate), model, optimizer) as harness:
            for n in range(3):
                step(model, optimizer, n)
            assert all(map(torch.equal, values(model, optimizer), alone[2]))
            said = [note for note in harness.report().notes if note.startswith("the tier `nvme`")]
        assert len(said) == (2 if seconds else 0), said
        assert all("and the plan was made for 1 GB/s: steps may take longer than predicted" in note for note in said)


def test_time_in_which_several_requests_are_under_way_counts_once():
    with closing(Nvme()) as store:
        begun = time.perf_counter()
        with store.reading.request(10), store.reading.request(20):
            time.sleep(0.01)
        took = time.perf_counter() - begun
        assert (store.reading.nbytes, store.reading.requests) == (30, 2) and 0.01 <= store.reading.seconds <= took
        assert store.writing.seconds == 0


@pytest.mark.parametrize("file", ["model", "optimizer"])
def test_a_read_error_while_a_checkpoint_is_loaded_is_one_clear_line(file, tmp_path):
    plan = planned("states")
    model, optimizer = fresh()
    with holdall.apply(plan, model, optimizer):
        step(model, optimizer, 0)
        holdall.save_checkpoint(tmp_path, model, optimizer, step=1)
        expected = values(model, optimizer)
    model, optimizer = fresh()
    with holdall.apply(plan, model, optimizer):
        with unreadable(f"{file}.safetensors", after=2), pytest.raises(DiskError) as raised:
            holdall.load_checkpoint(tmp_path, model, optimizer)
        line, hint = str(raised.value).splitlines()
        assert f"{file}.safetensors`: Input/output error" in line and "another checkpoint" in hint
        holdall.load_checkpoint(tmp_path, model, optimizer)  # the disk is well again
        assert all(map(torch.equal, values(model, optimizer), expected))
