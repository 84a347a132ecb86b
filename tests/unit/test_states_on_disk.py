"""Masters and optimizer states on a disk, updated in stretches: the bits of plain training, every byte counted."""

import copy
import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import holdall
from holdall.actions.place import Place, streamable
from holdall.errors import DiskError, HoldallError, OverBudget, Unsupported
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.simulator import simulate
from holdall.testing.chaos import chaos
from holdall.testing.stand_ins import disk_pieces_of, kept_jobs, watched_updates
from holdall.testing.worlds import DeepNet, machine
from holdall.types import Link, Problem, Tier
from holdall.types.layout import PAGE, stretch_bytes, stretches

pytestmark = [
    pytest.mark.usefixtures("disk"),
    pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="about systems with `posix_fallocate`"),
]
RULES = {
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "plain": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "bare": lambda params: torch.optim.SGD(params, lr=1e-2),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.5),
}


def batch(width=40):
    return (torch.randn(16, width, generator=torch.Generator().manual_seed(1)),)


def fresh(rule="fused", width=40):
    torch.manual_seed(0)
    model = DeepNet(width, 3)
    return model, RULES[rule](model.parameters())


def with_disk(*, overlap=False, rate=1e8):
    there = machine(overlap=overlap)
    tier = Tier(name="nvme", capacity=2**50, read=rate, write=rate)
    links = (Link(source="far", destination="nvme", rate=rate), Link(source="nvme", destination="far", rate=rate))
    return replace(there, tiers=(*there.tiers, tier), links=links)


def placed(trace, *, weights="streamed", when="step", stretch=PAGE, buffers=3, elsewhere=False, **more):
    can = streamable(trace)
    rows = {u.name: (weights if u.name in can else "resident", "host") for u in trace.units}
    states = {u.name: "nvme" for u in trace.units}
    place = Place.of(trace, rows, when=when, states=states, stretch=stretch, buffers=buffers, **more)
    return replace(place, elsewhere=tuple(states.items())) if elsewhere else place


@cache
def traced(rule, precision, width):
    model, optimizer = fresh(rule, width)
    return holdall.trace(model, batch(width), optimizer=optimizer, precision=precision)


def planned(rule="fused", precision=None, *, width=40, accumulate=1, hardware=None, **how):
    trace = traced(rule, precision, width)
    problem = Problem(trace=trace, hardware=hardware or with_disk(), budget={}, accumulate=accumulate)
    place = placed(trace, **how)
    near = replace(place, states=(), elsewhere=())
    return finish(Nop(), problem, [near]), finish(Nop(), problem, [place])


def steps(model, optimizer, count=3, *, clip=None, backwards=1, width=40):
    losses = []
    for n in range(count):
        torch.manual_seed(100 + n)
        for _ in range(backwards):
            loss = model(*batch(width))
            loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(plan, rule="fused", *, width=40, **loop):
    """Losses, parameters and states at the end, and what was measured."""
    model, optimizer = fresh(rule, width)
    harness = holdall.apply(plan, model, optimizer) if plan is not None else None
    losses = steps(model, optimizer, width=width, **loop)
    state = copy.deepcopy(optimizer.state_dict()["state"])
    measured = harness.measured() if harness is not None else None
    if harness is not None:
        harness.close()
    values = [p.detach().clone() for p in model.parameters()]
    moments = [v for n in sorted(state) for _, v in sorted(state[n].items()) if isinstance(v, torch.Tensor)]
    return losses, [*values, *moments], measured


def check_equal(found, expected):
    assert found[0] == expected[0]
    assert len(found[1]) == len(expected[1]) and all(map(torch.equal, found[1], expected[1]))


# the same bits, the predicted bytes


@pytest.mark.parametrize("on", [False, True], ids=["calm", "chaos"])
@pytest.mark.parametrize("weights", ["streamed", "resident"])
@pytest.mark.parametrize("when", ["step", "overlap_forward", "backward"])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_the_bits_and_bytes_of_states_on_disk(precision, when, weights, on, monkeypatch):
    near, plan = planned(precision=precision, when=when, weights=weights)
    with chaos(3) if on else monkeypatch.context():
        found = trained(plan)
    check_equal(found, trained(near if precision else None))
    assert dict(found[2].traffic) == dict(plan.predicted.traffic)
    assert found[2].peak["nvme"] == plan.predicted.peak["nvme"]
    assert plan.predicted.traffic["nvme->far"] == plan.predicted.traffic["far->nvme"] == plan.predicted.peak["nvme"]
    if precision is None:  # else wide parameters lie on a boundary each, where a CPU computes
        assert dict(found[2].peak) == dict(plan.predicted.peak)


def test_a_job_that_is_over_holds_nothing_on_the_device():
    """A thread lets go of its job some time after the update is done: that time is not in the peak."""
    _, plan = planned(when="overlap_forward", weights="resident")
    with kept_jobs() as jobs:
        found = trained(plan)
    assert jobs
    check_equal(found, trained(None))
    assert dict(found[2].peak) == dict(plan.predicted.peak)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("buffers", [1, 2])
def test_any_elementwise_rule_and_number_of_buffers(rule, buffers):
    _, plan = planned(rule, buffers=buffers)
    found = trained(plan, rule)
    check_equal(found, trained(None, rule))
    assert dict(found[2].traffic) == dict(plan.predicted.traffic)
    assert found[2].peak["nvme"] == plan.predicted.peak["nvme"]
    if rule != "adagrad":  # whose counters were made before the plan was applied
        assert dict(found[2].peak) == dict(plan.predicted.peak)


@pytest.mark.parametrize("how", [{"clip": 1e-2}, {"clip": 1e6}, {"backwards": 2, "clip": 0.1}], ids=["clip", "vain", "twice"])
@pytest.mark.parametrize("when", ["step", "overlap_forward"])
def test_loops_that_clip_and_accumulate(how, when):
    _, plan = planned(when=when, share=False, accumulate=how.get("backwards", 1))
    check_equal(trained(plan, **how), trained(None, **how))


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_everything_on_disk(precision):
    near, plan = planned(precision=precision, elsewhere=True, when="overlap_forward")
    found = trained(plan)
    check_equal(found, trained(near if precision else None))
    assert dict(found[2].traffic) == dict(plan.predicted.traffic)
    assert found[2].peak["nvme"] == plan.predicted.peak["nvme"]


def test_several_pieces_of_a_stretch_and_several_folders(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOLDALL_NVME", f"{tmp_path / 'a'},{tmp_path / 'b'}")
    _, plan = planned(stretch=5 * PAGE)
    with disk_pieces_of(2 * PAGE):
        found = trained(plan)
    check_equal(found, trained(None))


def test_a_plan_on_disk_is_saved_and_loaded(tmp_path):
    _, plan = planned()
    plan.save(tmp_path / "plan.json")
    assert holdall.Plan.load(tmp_path / "plan.json").actions == plan.actions


def test_stretches_cover_all_bytes_once():
    found = list(stretches(10 * PAGE + 256, 3 * PAGE + 1))
    assert found[0] == (0, 4 * PAGE) and found[-1] == (8 * PAGE, 10 * PAGE + 256)
    assert [b for _, b in found[:-1]] == [a for a, _ in found[1:]]
    assert stretch_bytes([100, 5 * PAGE], 1 << 30) == 5 * PAGE and stretch_bytes([100], 1) == PAGE


# time


def test_more_buffers_are_never_slower_and_hide_the_disk():
    """Reads, updates and writes of many stretches: one after the other, and side by side."""
    model, optimizer = fresh()
    trace = holdall.trace(model, batch(), optimizer=optimizer)
    hardware = replace(with_disk(overlap=True, rate=1e9), updates=1e9 / 24)  # an update takes as long as its reads and writes
    seconds = []
    for buffers in (1, 2, 3):
        problem = Problem(trace=trace, hardware=hardware, budget={})
        seconds.append(simulate(problem, [placed(trace, buffers=buffers)]).seconds)
    assert seconds[0] > seconds[1] > seconds[2]
    near = simulate(Problem(trace=trace, hardware=hardware, budget={}), [replace(placed(trace), states=())]).seconds
    assert near < seconds[2] < near + (seconds[0] - near) / 2


def test_reads_updates_and_writes_overlap(monkeypatch):
    """Whoever reads, updates or writes says so for a while, and is seen beside the others."""
    _, plan = planned()
    model, optimizer = fresh()
    harness = holdall.apply(plan, model, optimizer)
    steps(model, optimizer, 1)
    seen, now, lock = set(), [], threading.Lock()
    plain = {"preadv": os.preadv, "pwritev": os.pwritev}

    def watched(kind, call):
        def inside(*given):
            with lock:
                now.append(kind)
                seen.add(frozenset(now))
            time.sleep(0.005)
            try:
                return call(*given)
            finally:
                with lock:
                    now.remove(kind)

        return inside

    for name, call in plain.items():
        monkeypatch.setattr(os, name, watched(name, call))
    with watched_updates(lambda one_pass: watched("update", one_pass)):
        steps(model, optimizer, 1)
    monkeypatch.undo()
    harness.close()
    assert any({"update", "preadv"} <= both for both in seen) and any({"update", "pwritev"} <= both for both in seen)


# refusals


def test_what_cannot_be_on_disk_is_refused_with_what_to_do():
    model, optimizer = fresh()
    trace = holdall.trace(model, batch(), optimizer=optimizer)
    problem = Problem(trace=trace, hardware=with_disk(), budget={})
    place = placed(trace)
    on_device = replace(place, units=tuple((u, "resident", "device") for u, _, _ in place.units))
    with pytest.raises(Unsupported, match="cannot be in `nvme`: they must be updated by the host"):
        simulate(problem, [on_device])
    with pytest.raises(holdall.errors.InvalidInput, match="unknown unit"):
        simulate(problem, [replace(place, states=(("roof", "nvme"),))])
    with pytest.raises(holdall.errors.InvalidInput, match="`buffers` 0"):
        simulate(problem, [replace(place, buffers=0)])
    model.layers[0][0].weight.requires_grad_(False)
    trace = holdall.trace(model, batch(), optimizer=torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))
    with pytest.raises(Unsupported, match="some of its weights are frozen"):
        simulate(Problem(trace=trace, hardware=with_disk(), budget={}), [placed(trace)])
    model = DeepNet(40, 3)
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2]) if hasattr(torch.optim, "Muon") else None
    if optimizer is not None:
        trace = holdall.trace(model, batch(), optimizer=optimizer)
        with pytest.raises(Unsupported, match="does not update each element separately"):
            simulate(Problem(trace=trace, hardware=with_disk(), budget={}), [placed(trace)])


def test_every_budget_is_kept_and_a_full_disk_refused_before_anything_is_written(monkeypatch):
    _, plan = planned()
    for tier in ("far", "nvme"):
        tight = replace(plan, budget={**plan.budget, tier: plan.predicted.peak[tier] - PAGE})
        model, optimizer = fresh()
        with pytest.raises(OverBudget, match=f"`{tier}`"), holdall.apply(tight, model, optimizer):
            steps(model, optimizer)
    before = fresh()
    plain, write, writes = os.posix_fallocate, os.pwritev, []

    def nearly_full(descriptor, offset, size):
        if offset + size > PAGE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(descriptor, offset, size)

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", nearly_full)
        patched.setattr(os, "pwritev", lambda *given: writes.append(given) or write(*given))
        with pytest.raises(DiskError, match="cannot take"):
            holdall.apply(plan, *before)
    assert len(writes) <= 3  # of the empty page by which O_DIRECT is tried
    assert all(map(torch.equal, before[0].parameters(), fresh()[0].parameters()))


# errors of the disk


@pytest.mark.parametrize("when", ["step", "overlap_forward"])
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_an_error_in_an_update_is_one_clear_line_and_what_is_torn_is_not_saved(call, when, monkeypatch, tmp_path):
    _, plan = planned(when=when, weights="resident")
    model, optimizer = fresh()
    harness = holdall.apply(plan, model, optimizer)
    steps(model, optimizer, 1)
    holdall.save_checkpoint(tmp_path / "run", model, optimizer, step=1)
    plain, count = getattr(os, call), []

    def broken(descriptor, views, offset):
        count.append(offset)
        if len(count) > 4 and threading.current_thread().name.startswith("holdall-nvme"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(descriptor, views, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, broken)
        with pytest.raises(DiskError, match="Input/output error") as raised:
            steps(model, optimizer, 1)
            optimizer.state_dict()
    assert raised.value.hint
    with pytest.raises(HoldallError, match="some states of the model are new, some are old; the one of step 1 is intact"):
        holdall.save_checkpoint(tmp_path / "run", model, optimizer, step=2)
    del raised
    gc.collect()
    harness.close()
    model, optimizer = fresh()
    with holdall.apply(plan, model, optimizer):
        found = holdall.load_checkpoint(tmp_path / "run", model, optimizer)
        assert found.step == 1
        again = steps(model, optimizer, 1)
    model, optimizer = fresh()
    steps(model, optimizer, 1)
    assert again == steps(model, optimizer, 1)


def test_a_slow_disk_is_waited_for(monkeypatch):
    _, plan = planned(when="overlap_forward")
    for call in ("preadv", "pwritev"):
        plain = getattr(os, call)
        monkeypatch.setattr(os, call, lambda *given, plain=plain: time.sleep(0.01) or plain(*given))
    check_equal(trained(plan), trained(None))


# checkpoints


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_checkpoint_of_states_on_disk_goes_on_under_any_plan(tmp_path, precision):
    near, plan = planned(precision=precision, when="overlap_forward")
    expected = trained(near)[0]
    for first, second in ((plan, near), (near, plan), (plan, plan)):
        out = tmp_path / str(id(first) + id(second))
        model, optimizer = fresh()
        with holdall.apply(first, model, optimizer):
            losses = steps(model, optimizer, 2)
            holdall.save_checkpoint(out, model, optimizer, step=2)
        model, optimizer = fresh()
        with holdall.apply(second, model, optimizer):
            holdall.load_checkpoint(out, model, optimizer)
            torch.manual_seed(102)
            loss = model(*batch())
            losses.append(loss.item())
            del loss
        assert losses == expected


def test_a_checkpoint_is_copied_from_file_to_file_and_whole_pages_lie_on_page_boundaries(tmp_path, monkeypatch):
    """So a file system that can shares the blocks, and nothing need fit into memory."""
    _, plan = planned(width=64)  # the weights fill whole pages
    model, optimizer = fresh(width=64)
    copied, plain = [], os.copy_file_range

    def copying(source, target, count, offset, at):
        copied.append((count, offset, at))
        return plain(source, target, count, offset, at)

    with holdall.apply(plan, model, optimizer):
        steps(model, optimizer, 1, width=64)
        with monkeypatch.context() as patched:
            patched.setattr(os, "copy_file_range", copying)
            holdall.save_checkpoint(tmp_path, model, optimizer, step=1)
        expected = [p.detach().clone() for p in model.parameters()]
        with monkeypatch.context() as patched:
            patched.setattr(os, "copy_file_range", lambda *_: _raise(errno.EIO))
            with pytest.raises(
                HoldallError, match=r"save the checkpoint of step 2: .*Input/output error; the one of step 1 is intact"
            ):
                holdall.save_checkpoint(tmp_path, model, optimizer, step=2)
        with monkeypatch.context() as patched:
            patched.setattr(os, "copy_file_range", lambda *_: _raise(errno.EXDEV))  # between two file systems
            holdall.save_checkpoint(tmp_path, model, optimizer, step=3)
    size = 64 * 128 * 4
    assert sum(count for count, _, _ in copied) >= 3 * sum(p.nbytes for p in expected)
    assert sum(count == size for count, _, _ in copied) == 3 * 6
    assert all(offset % PAGE == at % PAGE == 0 for count, offset, at in copied if count == size)
    for step in (1, 3):
        model, optimizer = fresh(width=64)
        found = holdall.load_checkpoint(tmp_path / "checkpoints" / f"step-{step:06d}", model, optimizer)
        assert found.step == step and all(map(torch.equal, model.parameters(), expected))


def _raise(code):
    raise OSError(code, os.strerror(code))


KILLED = """
import os, signal, sys, torch
sys.path.insert(0, {here!r})
import test_states_on_disk as t
import holdall
plan = holdall.Plan.load({plan!r})
model, optimizer = t.fresh()
with holdall.apply(plan, model, optimizer):
    found = holdall.load_checkpoint({out!r}, model, optimizer)
    step = found.step if found is not None else 0
    plain, count = os.pwritev, [0]
    def counted(*given):
        count[0] += step > 0
        if count[0] == {kill}:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*given)
    os.pwritev = counted
    while step < 4:
        torch.manual_seed(100 + step)
        loss = model(*t.batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        print(step, loss.item().hex(), flush=True)
        del loss
        holdall.save_checkpoint({out!r}, model, optimizer, step=step, keep=2)
"""


def test_killed_while_states_are_written_a_run_goes_on_from_its_last_checkpoint(tmp_path, disk):
    _, plan = planned(when="overlap_forward")
    plan.save(tmp_path / "plan.json")
    where = {"here": os.path.dirname(__file__), "plan": str(tmp_path / "plan.json"), "out": str(tmp_path / "run")}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    seen = {}
    for kill in (60, 10**9):  # in the middle of a step's writes; never
        code = KILLED.format(kill=kill, **where)
        run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
        assert run.returncode == (0 if kill == 10**9 else -signal.SIGKILL), run.stderr[-2000:]
        seen |= dict(line.split() for line in run.stdout.splitlines())
    model, optimizer = fresh()
    expected = [loss.hex() for loss in steps(model, optimizer, 4)]
    assert [seen[str(n + 1)] for n in range(4)] == expected
