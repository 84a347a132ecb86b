"""A disk and pageable memory as tiers: the bits of plain training, every byte counted, one clear line where a disk fails."""

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import thread
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

import holdall
from holdall import compatibility
from holdall.actions.offload import Offload
from holdall.actions.place import Place, streamable
from holdall.cost.link import copy_seconds
from holdall.errors import DiskError, Infeasible, InvalidInput, OverBudget
from holdall.machine.more_tiers import with_tiers
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.testing.chaos import chaos
from holdall.testing.stand_ins import planned_for
from holdall.testing.worlds import DeepNet, machine
from holdall.tiers.nvme import PAGE, PIECE, Extents, Nvme
from holdall.tiers.pageable import Pageable
from holdall.types import Link, Problem, Tier
from holdall.units import MiB

pytestmark = [
    pytest.mark.usefixtures("disk"),
    pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="about systems with `posix_fallocate`"),
]


@pytest.fixture
def store():
    store = Nvme()
    yield store
    store.close()


def filled(nbytes, seed=0):
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def read(storage):
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def fetch(store, ticket):
    fetched = store.get(ticket, "cpu")
    store.wait_in(ticket)
    return read(fetched)


def there_and_back(store, source):
    ticket = store.put(source.untyped_storage())
    store.wait(ticket)
    found = fetch(store, ticket)
    store.free(ticket)
    return found


def refuse_direct(monkeypatch):
    """A file system without O_DIRECT."""

    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(path, flags, *rest)

    plain = os.open
    monkeypatch.setattr(os, "open", refuse)


# bytes


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PIECE, 3 * PIECE + 5])
@pytest.mark.parametrize("cls", [Nvme, Pageable])
def test_bytes_come_back_whatever_their_number(cls, nbytes):
    store = cls()
    assert torch.equal(there_and_back(store, filled(nbytes)), filled(nbytes))
    assert store.sent == store.fetched == nbytes and store.used == 0
    store.close()


@pytest.mark.parametrize("direct", [True, False])
def test_several_folders_hold_the_bytes_by_turns(tmp_path, monkeypatch, direct):
    names = [tmp_path / name for name in "abc"]
    for name in names:
        name.mkdir()
    monkeypatch.setenv("HOLDALL_NVME", ",".join(map(str, names)))
    if not direct:
        refuse_direct(monkeypatch)
    store, source = Nvme(), filled(5 * PIECE + 77)
    assert torch.equal(there_and_back(store, source), source)
    sizes = [sum(p.stat().st_size for p in name.iterdir()) for name in names]
    assert sizes == [2 * PIECE, 2 * PIECE, PIECE + PAGE]
    ticket = store.reserve(4 * PIECE + 9)
    store.memory(ticket).copy_(filled(4 * PIECE + 9, 1))  # as memory, the stripes follow each other
    target = torch.empty(4 * PIECE + 9, dtype=torch.uint8)
    store.pull(ticket, target).wait()
    assert torch.equal(target, filled(4 * PIECE + 9, 1))
    del target
    store.close()


@pytest.mark.parametrize("cls", [Nvme, Pageable])
def test_states_are_memory_to_the_host_and_copies_to_the_device(cls):
    store = cls()
    lane, ticket = store.lane(), store.reserve(3 * PAGE + 8)
    source, target = filled(3 * PAGE + 8), torch.empty(3 * PAGE + 8, dtype=torch.uint8)
    lane.push(ticket, source)
    lane.arrived(ticket)
    assert torch.equal(store.memory(ticket), source)
    store.memory(ticket)[5:] = 7
    store.pull(ticket, target).wait()
    assert target[5:].unique().tolist() == [7] and torch.equal(target[:5], source[:5])
    store.push(ticket, source)
    part = torch.empty(11, dtype=torch.uint8)
    store.pull(ticket, part).wait()  # after the push, whose bytes are on their way
    assert torch.equal(part, source[:11])
    store.free(ticket)
    store.close()


def test_a_file_system_without_direct_io_is_used_through_the_page_cache(monkeypatch, caplog):
    refuse_direct(monkeypatch)
    for _ in range(2):
        store = Nvme()
        assert torch.equal(there_and_back(store, filled(PAGE + 3)), filled(PAGE + 3))
        assert "O_DIRECT" in store.notes[0]
        store.close()
    assert sum("does not take O_DIRECT" in line for line in caplog.messages) == 1


def test_reads_and_writes_are_in_flight_side_by_side(store, monkeypatch):
    """Every write waits until a read runs; were there one queue, nothing would go on."""
    reading, plain_write, plain_read = threading.Event(), os.pwritev, os.preadv
    ticket = store.put(filled(PAGE).untyped_storage())
    store.wait(ticket)

    def write(*given):
        assert reading.wait(20)
        return plain_write(*given)

    def look(*given):
        reading.set()
        return plain_read(*given)

    monkeypatch.setattr(os, "pwritev", write)
    monkeypatch.setattr(os, "preadv", look)
    writes = [store.put(filled(PAGE, n).untyped_storage()) for n in range(20)]
    assert torch.equal(fetch(store, ticket), filled(PAGE))
    for n, other in enumerate(writes):
        store.wait(other)
        assert torch.equal(fetch(store, other), filled(PAGE, n))


def test_a_slow_disk_is_waited_for(store, monkeypatch):
    plain = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *given: time.sleep(0.05) or plain(*given))
    source = filled(PAGE)
    ticket = store.put(source.untyped_storage())
    assert not store.landed(ticket)
    assert torch.equal(fetch(store, ticket), source)  # of bytes that were still on their way
    assert store.landed(ticket)


@pytest.mark.parametrize("cls", [Nvme, Pageable])
def test_memory_is_let_go_of_when_its_copy_was_waited_for(cls, monkeypatch):
    plain = thread._WorkItem.run
    monkeypatch.setattr(thread._WorkItem, "run", lambda job, *rest: plain(job, *rest) or time.sleep(0.05))  # has it for longer
    store, source = cls(), filled(64)
    ticket, gone = store.put(source.untyped_storage()), StorageWeakRef(source.untyped_storage())
    del source
    store.wait(ticket)
    assert gone.expired()
    store.free(ticket)
    store.close()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.lists(st.tuples(st.booleans(), st.integers(1, 7 * PAGE), st.integers(0, 99)), max_size=40))
def test_no_two_extents_share_a_byte(count, events):
    class File:
        length = PAGE

        def grow(self, length):
            self.length = max(self.length, length)

    files = [File() for _ in range(count)]
    extents, live = Extents("nvme", None, files, 2 * PAGE), []
    for is_take, size, pick in events:
        if is_take or not live:
            live += extents.take_all([size])
        else:
            extents.give(live.pop(pick % len(live)))
        seen = {}
        for extent in live:
            for begin in range(0, extent.nbytes, PAGE):
                place = extent.at(begin)
                assert place not in seen and place[1] + PAGE <= place[0].length
                seen[place] = extent
        assert extents.used == sum(e.nbytes for e in live)
    for extent in live:
        extents.give(extent)
    before = [file.length for file in files]
    assert all(space._holes == [(0, space.file.length)] for space in extents._spaces)
    extents.give(extents.take_all([PAGE])[0])
    assert [file.length for file in files] == before


# failures


def test_a_full_disk_is_refused_before_anything_is_written(store, disk, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store.prepare(2 * PAGE)
    kept = store.put(filled(PAGE).untyped_storage())
    store.wait(kept)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        patched.setattr(os, "pwritev", None)  # nobody may call it
        with pytest.raises(DiskError, match=rf"the disk of `{disk}` cannot take 8\.0 KiB more: No space") as refused:
            store.put_all([filled(PAGE, 1).untyped_storage(), filled(2 * PAGE).untyped_storage()])
        assert "HOLDALL_NVME" in refused.value.hint and store.used == PAGE
        with pytest.raises(DiskError, match="cannot take"):
            store.prepare(10 * MiB)
    assert torch.equal(fetch(store, kept), filled(PAGE))
    assert torch.equal(there_and_back(store, filled(9 * PAGE)), filled(9 * PAGE))


LIMITED = """
import resource, torch
from holdall.errors import DiskError
from holdall.tiers.nvme import Nvme
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
store = Nvme()
ticket = store.put(torch.ones(1 << 18, dtype=torch.uint8).untyped_storage())
store.wait(ticket)
try:
    store.put(torch.ones(1 << 21, dtype=torch.uint8).untyped_storage())
except DiskError as error:
    print(error)
back = store.get(ticket, "cpu")
store.wait_in(ticket)
print("kept", torch.empty(0, dtype=torch.uint8).set_(back).sum().item() == 1 << 18)
"""


def child(code, **more):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True, **more)


def test_a_limit_that_the_system_sets_is_one_clear_line_and_what_was_written_stays():
    said, _ = child(LIMITED).communicate(timeout=60)
    assert "cannot take 2.0 MiB more: File too large" in said and "hint: " in said and "kept True" in said


@pytest.mark.parametrize("fails", ["EIO", "short"])
def test_a_read_error_reaches_whoever_waits_for_the_bytes(store, monkeypatch, fails):
    def broken(*_):
        if fails == "short":
            return 0
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    ticket = store.put(filled(2 * PIECE).untyped_storage())
    store.wait(ticket)
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", broken)
        store.get(ticket, "cpu")
        why = "the file ends after 0" if fails == "short" else "Input/output error"
        with pytest.raises(DiskError, match=rf"`.*\.tier`: reading 4.0 MiB at \d+ failed: {why}") as raised:
            store.wait_in(ticket)
    assert isinstance(raised.value, OSError) and raised.value.hint
    store.free(ticket)
    assert store.used == 0


def test_a_write_error_reaches_whoever_waits_and_whoever_fetches(store, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", broken)
    ticket = store.put(filled(PAGE).untyped_storage())
    for _ in range(2):
        with pytest.raises(DiskError, match=r"writing 4\.0 KiB at 0 failed: Input/output error"):
            store.wait(ticket)
    store.get(ticket, "cpu")
    with pytest.raises(DiskError, match="writing"):
        store.wait_in(ticket)
    store.free(ticket)


@pytest.mark.parametrize("how", ["checksums", "chaos", ""])
def test_corrupt_bytes_are_found_where_checksums_are_on(disk, monkeypatch, how):
    monkeypatch.setenv("HOLDALL_DEBUG", how)
    with chaos() if how == "chaos" else monkeypatch.context():
        store = Nvme()
        ticket = store.put(filled(3 * PAGE).untyped_storage())
        store.wait(ticket)
        (path,) = disk.iterdir()
        with path.open("r+b") as file:
            file.seek(PAGE + 10)
            file.write(b"not what was written")
        store.get(ticket, "cpu")
        if how:
            with pytest.raises(DiskError, match=r"`.*\.tier`: the 12.0 KiB at 0 are not those that were written"):
                store.wait_in(ticket)
        else:
            store.wait_in(ticket)
        store.free(ticket)
        store.close()


KILLED = """
import os, sys, time, torch
from holdall.tiers.nvme import Nvme
store = Nvme()
plain = os.pwritev
def slow(*given):
    print("writing", flush=True)
    time.sleep(60)
os.pwritev = slow
store.put(torch.ones(1 << 20, dtype=torch.uint8).untyped_storage())
time.sleep(60)
"""


def test_the_file_of_a_process_that_was_killed_while_writing_is_removed_and_no_other(disk, caplog):
    process = child(KILLED)
    try:
        assert process.stdout.readline() == "writing\n"
        (left,) = disk.iterdir()
        living = Nvme()  # of this process, beside the other's, which is alive
        assert left in set(disk.iterdir())
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert left.stat().st_size >= MiB
    with caplog.at_level("INFO", logger="holdall"):
        after = Nvme()
    assert not left.exists() and "killed process" in caplog.text
    assert len(list(disk.iterdir())) == 2  # the two that live
    assert torch.equal(there_and_back(living, filled(PAGE)), filled(PAGE))
    living.close()
    after.close()


def test_files_go_with_a_process_that_ends_without_closing(disk):
    code = "import torch; from holdall.tiers.nvme import Nvme; s = Nvme(); s.put(torch.ones(9).untyped_storage()); print('ok')"
    said, _ = child(code).communicate(timeout=60)
    assert said == "ok\n" and not list(disk.iterdir())


def test_a_store_that_nobody_has_any_more_removes_its_file(disk):
    store = Nvme()
    assert list(disk.iterdir())
    del store
    gc.collect()
    assert not list(disk.iterdir())


def test_a_folder_must_be_named_and_be_there(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDALL_NVME", str(tmp_path / "nowhere"))
    with pytest.raises(InvalidInput, match="not a folder") as refused:
        Nvme()
    assert "mkdir" in refused.value.hint
    monkeypatch.setenv("HOLDALL_NVME_DEPTH", "many")
    with pytest.raises(InvalidInput, match="HOLDALL_NVME_DEPTH is 'many'"):
        Nvme()
    monkeypatch.delenv("HOLDALL_NVME_DEPTH")
    monkeypatch.delenv("HOLDALL_NVME")
    with pytest.raises(InvalidInput, match="needs a folder") as refused:
        with_tiers(machine(), ["nvme"])
    assert "export HOLDALL_NVME=" in refused.value.hint


def test_a_folder_that_cannot_be_written_is_one_clear_line(disk, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DiskError, match=f"no file can be made in `{disk}`: Read-only file system"):
        Nvme()


# the machine


def test_the_probe_measures_reads_writes_both_and_queue_depths():
    found = with_tiers(machine(), ["nvme", "pageable"])
    assert [tier.name for tier in found.tiers] == ["cpu", "far", "nvme", "pageable"]
    for name in ("nvme", "pageable"):
        there, back = found.direct("cpu", name), found.direct(name, "cpu")
        assert there.rate > 0 and back.rate > 0 and 0 < there.duplex == back.duplex <= 1 and there.latency > 0
    assert found.about.queue[0].depth == 1 and {rates.tier for rates in found.about.queue} == {"nvme"}
    assert all(rates.read > 0 and rates.write > 0 and 0 < rates.duplex <= 1 for rates in found.about.queue)
    assert 0 < found.tier("nvme").capacity <= os.statvfs(os.environ["HOLDALL_NVME"]).f_blocks * 2**20


def test_from_a_gpu_a_disk_is_two_hops_away():
    """Measured from the host, priced through it: the slower rate, both latencies."""
    home = Tier(name="gpu", capacity=2**36, read=1e12, write=1e12)
    link = Tier(name="cpu", capacity=2**40, read=1e3, write=1e15, latency=1e-5)  # slower than any disk, and faster
    found = with_tiers(replace(machine(), device="cuda", tiers=(home, link)), ["nvme"])
    there, back = found.path("gpu", "nvme"), found.path("nvme", "gpu")
    assert [(hop.source, hop.destination) for hop in there] == [("gpu", "cpu"), ("cpu", "nvme")]
    latency = 1e-5 + there[1].latency
    assert copy_seconds(10**9, found, "gpu", "nvme") == pytest.approx(latency + 1e9 / there[1].rate)
    assert copy_seconds(10**9, found, "nvme", "gpu") == pytest.approx(latency + 1e9 / 1e3)
    assert back[0].rate > 1e3 == found.tier("nvme").read and found.tier("nvme").write == there[1].rate


def test_both_tiers_take_activations_and_states():
    assert (
        compatibility.tiers()["nvme"] == compatibility.tiers()["pageable"] == "activations and model states, from cpu or cuda"
    )


# training


BATCH = (torch.randn(64, 32, generator=torch.Generator().manual_seed(1)),)


def fresh():
    torch.manual_seed(0)
    model = DeepNet()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@cache
def traced(precision=None):
    model, optimizer = fresh()
    return holdall.trace(model, BATCH, optimizer=optimizer, precision=precision)


def with_tier(name):
    """A machine with this tier behind the device's memory, at rates of no machine in particular."""
    there = machine()
    links = (Link(source="cpu", destination=name, rate=1e8), Link(source=name, destination="cpu", rate=1e8))
    return replace(there, tiers=(*there.tiers, Tier(name=name, capacity=2**50, read=1e8, write=1e8)), links=links)


def trained(plan, steps=3):
    model, optimizer = fresh()
    harness = holdall.apply(plan, model, optimizer) if plan is not None else None
    losses = []
    torch.manual_seed(3)
    for _ in range(steps):
        loss = model(*BATCH)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    measured = harness.measured() if harness is not None else None
    if harness is not None:
        harness.close()
    return losses, [p.detach().clone() for p in model.parameters()], measured


def check_bits(plan, *, exact_to_plain=None):
    losses, weights, measured = trained(plan)
    other_losses, others, _ = trained(exact_to_plain)
    assert losses == other_losses and all(map(torch.equal, weights, others))
    return measured


@pytest.mark.parametrize("on", [False, True], ids=["calm", "chaos"])
@pytest.mark.parametrize("name", ["nvme", "pageable"])
def test_activations_that_leave_for_the_tier_train_as_ever(name, on, monkeypatch):
    trace = traced()
    actions = [
        Offload.of(trace, block, overlap=n % 2 == 0, tier=name if n != 1 else "") for n, block in enumerate(trace.blocks)
    ]
    plan = finish(Nop(), Problem(trace=trace, hardware=with_tier(name), budget={}), actions)
    assert plan.predicted.traffic[f"cpu->{name}"] == plan.predicted.traffic[f"{name}->cpu"] > 0
    with chaos(5) if on else monkeypatch.context():
        measured = check_bits(plan)
    assert dict(measured.traffic) == dict(plan.predicted.traffic)
    assert dict(measured.peak) == dict(plan.predicted.peak)


@pytest.mark.parametrize("on", [False, True], ids=["calm", "chaos"])
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("weights", ["streamed", "resident"])
@pytest.mark.parametrize("name", ["nvme", "pageable"])
def test_units_that_live_in_the_tier_train_as_ever(name, weights, precision, on, monkeypatch):
    trace = traced(precision)
    can = streamable(trace)
    rows = {u.name: (weights if u.name in can else "resident", "host") for u in trace.units}
    near = Place.of(trace, rows)
    some = tuple((u.name, name) for u in trace.units[1::2])
    problem = Problem(trace=trace, hardware=with_tier(name), budget={})
    before, plan = (finish(Nop(), problem, [place]) for place in (near, replace(near, elsewhere=some)))
    assert plan.predicted.traffic[f"cpu->{name}"] > 0
    with chaos(7) if on else monkeypatch.context():
        measured = check_bits(plan, exact_to_plain=before if precision else None)
    assert dict(measured.traffic) == dict(plan.predicted.traffic)
    assert (measured.peak["cpu"], measured.peak[name]) == (plan.predicted.peak["cpu"], plan.predicted.peak[name])


@pytest.mark.parametrize("what", ["activations", "states"])
@planned_for(machine())
def test_fit_uses_the_disk_where_the_host_is_full(what, disk):
    trace = traced()
    plain = holdall.plan(trace, planner="nop", hardware=machine()).predicted.peak["cpu"]
    fixed = sum(t.nbytes for t in trace.tensors.values() if t.born < 0)
    home = fixed + (plain - fixed) // 2 if what == "activations" else fixed // 2
    allow = ["offload"] if what == "activations" else None
    alone = holdall.plan(trace, budget=home, hardware=machine(), allow=allow)
    budget = {"cpu": alone.predicted.peak["cpu"], "far": int(0.8 * alone.predicted.peak["far"])}
    with pytest.raises(Infeasible):
        holdall.plan(trace, budget=budget, hardware=machine(), allow=allow)
    model, optimizer = fresh()
    losses = []
    with holdall.fit(model, optimizer, BATCH, budget={**budget, "nvme": "1GiB"}, allow=allow) as harness:
        plan = harness.plan
        (file,) = disk.iterdir()
        assert file.stat().st_size >= plan.predicted.peak["nvme"] > 0  # reserved before the first step
        torch.manual_seed(3)
        for _ in range(3):
            loss = model(*BATCH)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        measured = harness.measured()
    assert losses == trained(None)[0]
    assert dict(measured.traffic) == dict(plan.predicted.traffic) and any("nvme" in link for link in measured.traffic)
    assert dict(measured.peak) == dict(plan.predicted.peak)
    assert all(size <= plan.budget[tier] for tier, size in measured.peak.items())


def test_a_full_disk_is_refused_when_the_plan_is_applied_and_the_model_is_as_before(monkeypatch):
    trace = traced()
    actions = [Offload.of(trace, block, overlap=False, tier="nvme") for block in trace.blocks]
    plan = finish(Nop(), Problem(trace=trace, hardware=with_tier("nvme"), budget={}), actions)
    model, optimizer = fresh()
    plain = os.posix_fallocate

    def nearly_full(descriptor, offset, size):
        if offset + size > PAGE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(descriptor, offset, size)

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", nearly_full)
        with pytest.raises(DiskError, match="cannot take"):
            holdall.apply(plan, model, optimizer)
    assert trained(plan)[0] == trained(None)[0]


def test_a_read_error_in_a_step_is_raised_in_the_loop(monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    trace = traced()
    actions = [Offload.of(trace, trace.blocks[1], overlap=False, tier="nvme")]
    plan = finish(Nop(), Problem(trace=trace, hardware=with_tier("nvme"), budget={}), actions)
    model, optimizer = fresh()
    with holdall.apply(plan, model, optimizer):
        loss = model(*BATCH)
        with monkeypatch.context() as patched:
            patched.setattr(os, "preadv", broken)
            with pytest.raises(DiskError, match="reading"):
                loss.backward()
        del loss


def test_the_budget_of_the_disk_is_kept():
    store = Nvme(capacity=10_000)
    with pytest.raises(OverBudget, match=r"the memory `nvme` holds 0 B and cannot take 11\.7 KiB more"):
        store.put(filled(12_000).untyped_storage())
    store.close()
