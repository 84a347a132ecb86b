"""The host's memory as a store, on a CUDA device: bytes, order between streams, reuse, pinning, memory handed back."""

import pytest
import torch

from holdall.errors import OverBudget
from holdall.units import MiB

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from holdall.tiers.cpu import Cpu

DEVICE = torch.device("cuda", 0)
N = 16 * MiB


@pytest.fixture
def store():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # so that a test's own freed block is the only one that fits
    store = Cpu(device=DEVICE)
    yield store
    torch.cuda.synchronize()
    store.close()


def filled(value, nbytes=N):
    return torch.full((nbytes // 4,), value, dtype=torch.int32, device=DEVICE)


def read(storage):
    return torch.empty(0, dtype=torch.int32, device=DEVICE).set_(storage)


def slow(milliseconds=20):
    """Keep the current stream busy."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))


@pytest.mark.parametrize("nbytes", [0, 4, 4096, 3 * MiB + 4])
def test_the_same_bytes_come_back(store, nbytes):
    source = torch.arange(nbytes // 4, dtype=torch.int32, device=DEVICE)
    ticket = store.put(source.untyped_storage())
    store.wait(ticket)
    fetched = store.get(ticket, DEVICE)
    store.wait_in(ticket)
    assert fetched.nbytes() == nbytes and torch.equal(read(fetched), source)
    store.free(ticket)
    assert store.used == 0 and store.peak == nbytes


def test_buffers_are_pinned_at_their_exact_size(store):
    ticket = store.put(filled(1, 3 * MiB + 4).untyped_storage())
    assert ticket.buffer.is_pinned and store.held == 3 * MiB + 4 and not store.notes
    store.free(ticket)


def test_put_waits_for_what_compute_is_still_writing(store):
    source = filled(0)
    slow()
    source.fill_(7)
    ticket = store.put(source.untyped_storage())
    store.wait(ticket)
    source.fill_(9)  # after the copy, in the order of the stream
    fetched = read(store.get(ticket, DEVICE))
    store.wait_in(ticket)
    assert bool((fetched == 7).all())
    store.free(ticket)


def test_put_returns_before_the_copy_is_over_and_landed_says_when(store):
    store.free(store.put(filled(0).untyped_storage()))  # pin outside of the measurement
    torch.cuda.synchronize()
    source = filled(3)
    slow(50)
    ticket = store.put(source.untyped_storage())
    assert not store.landed(ticket) and ticket.source is not None
    torch.cuda.synchronize()
    assert store.landed(ticket) and ticket.source is None
    store.free(ticket)


def test_the_sources_memory_is_free_after_the_wait_and_its_next_owner_does_no_harm(store):
    source = filled(5)
    where = source.data_ptr()
    slow()
    ticket = store.put(source.untyped_storage())
    before = torch.cuda.memory_allocated()
    del source
    assert torch.cuda.memory_allocated() == before  # the ticket holds it
    store.wait(ticket)
    assert torch.cuda.memory_allocated() == before - N
    heir = filled(6)
    assert heir.data_ptr() == where  # the same memory, written at once
    fetched = read(store.get(ticket, DEVICE))
    store.wait_in(ticket)
    assert bool((fetched == 5).all()) and bool((heir == 6).all())
    store.free(ticket)


def test_a_fetch_into_memory_that_compute_still_reads_waits_for_it(store):
    ticket = store.put(filled(1).untyped_storage())
    store.wait(ticket)
    victim = filled(2)
    where = victim.data_ptr()
    slow()
    total = victim.to(torch.int64).sum()
    del victim
    fetched = store.get(ticket, DEVICE)
    store.wait_in(ticket)
    assert fetched.data_ptr() == where
    assert int(total) == 2 * (N // 4) and bool((read(fetched) == 1).all())
    store.free(ticket)


def test_a_fetch_right_after_the_put_sees_the_bytes_of_the_put(store):
    for value in range(8):
        source = filled(value)
        slow(2)
        ticket = store.put(source.untyped_storage())
        fetched = read(store.get(ticket, DEVICE))
        store.wait_in(ticket)
        assert bool((fetched == value).all())
        store.free(ticket)
    assert store.held == N  # one buffer served all


def test_a_reused_buffer_is_not_overwritten_before_its_fetch_has_read_it(store):
    first = store.put(filled(1).untyped_storage())
    store.wait(first)
    slow(30)  # the fetch waits for compute, so the buffer is still to be read when it is freed
    fetched = store.get(first, DEVICE)
    store.wait_in(first)
    store.free(first)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # a put whose own source is ready at once
        other = filled(2)
        second = store.put(other.untyped_storage())
    assert store.held == N
    torch.cuda.synchronize()
    assert bool((read(fetched) == 1).all())
    again = store.get(second, DEVICE)
    store.wait_in(second)
    assert bool((read(again) == 2).all())
    store.free(second)


def test_dropping_what_was_fetched_before_the_wait_corrupts_nothing(store):
    ticket = store.put(filled(1).untyped_storage())
    store.wait(ticket)
    slow()
    store.get(ticket, DEVICE)  # nobody keeps it; the ticket does
    heir = filled(4)
    store.free(ticket)
    torch.cuda.synchronize()
    assert bool((heir == 4).all())


def test_random_traffic_returns_every_byte(store):
    generator = torch.Generator().manual_seed(0)
    live = {}
    for step in range(300):
        if len(live) < 8 and torch.rand((), generator=generator) < 0.6:
            nbytes = (MiB, 2 * MiB, 8 * MiB)[int(torch.randint(3, (), generator=generator))]
            ticket = store.put((filled(step, nbytes) + 0).untyped_storage())
            live[step] = ticket
            if step % 2:
                store.wait(ticket)
        elif live:
            value = sorted(live)[int(torch.randint(len(live), (), generator=generator))]
            ticket = live.pop(value)
            fetched = read(store.get(ticket, DEVICE))
            filled(-1, MiB)  # noise in the allocator
            store.wait_in(ticket)
            wrong = (fetched != value).sum()
            store.free(ticket)
            del fetched
            assert int(wrong) == 0
    assert store.used == sum(t.nbytes for t in live.values())


def test_the_capacity_holds_and_kept_buffers_make_room():
    store = Cpu(capacity=3 * N // 2, device=DEVICE)
    ticket = store.put(filled(1).untyped_storage())
    with pytest.raises(OverBudget):
        store.put(filled(2).untyped_storage())
    store.free(ticket)
    ticket = store.put(filled(3, N + 4 * MiB).untyped_storage())
    assert store.held == N + 4 * MiB
    store.free(ticket)
    store.close()
    assert store.held == 0


def test_a_store_that_nobody_closed_can_be_followed_by_another():
    for value in range(5):  # stale registrations would make the next mapping at the same address fail
        store = Cpu(device=DEVICE)
        ticket = store.put(filled(value).untyped_storage())
        fetched = read(store.get(ticket, DEVICE))
        store.wait_in(ticket)
        assert bool((fetched == value).all()) and not store.notes
        del store, ticket


def test_where_pinning_fails_the_bytes_still_come_back_and_a_note_says_so(store, monkeypatch):
    class Refusing:
        def __getattr__(self, name):
            return lambda *args: 2

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    source = filled(8)
    ticket = store.put(source.untyped_storage())
    assert not ticket.buffer.is_pinned and "could not be pinned" in store.notes[0]
    fetched = read(store.get(ticket, DEVICE))
    store.wait_in(ticket)
    assert torch.equal(fetched, source)
    store.free(ticket)


def test_copies_reach_the_rate_of_pinned_memory(store):
    nbytes = 256 * MiB
    source = filled(1, nbytes)
    for _ in range(2):  # pin and warm
        ticket = store.put(source.untyped_storage())
        store.get(ticket, DEVICE)
        store.free(ticket)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    ticket = store.put(source.untyped_storage())
    store.wait(ticket)
    end.record()
    torch.cuda.synchronize()
    rate = nbytes / (begin.elapsed_time(end) / 1e3)
    store.free(ticket)
    print(f"out {rate / 1e9:.1f} GB/s")
    assert rate > 5e9


def test_several_that_go_together_wait_as_one_does(store):
    """Their sources are still being written when they are put, and their buffers still being read when they are put again."""
    for turn in range(3):
        sources = [torch.zeros(N // 4, dtype=torch.int32, device=DEVICE) for _ in range(3)]
        slow()
        for n, source in enumerate(sources):
            source.fill_(10 * turn + n)
        tickets = store.put_all([t.untyped_storage() for t in sources])
        for ticket in tickets:
            store.wait(ticket)
        for source in sources:
            source.fill_(-1)  # allowed from here on
        slow()
        fetched = store.get_all(tickets, DEVICE)
        for ticket in tickets:
            store.wait_in(ticket)
        seen = [read(storage).clone() for storage in fetched]
        for ticket in tickets:
            store.free(ticket)
        assert [int(t[0]) for t in seen] == [int(t[-1]) for t in seen] == [10 * turn, 10 * turn + 1, 10 * turn + 2]
    assert store.used == 0 and store.held == 3 * N
