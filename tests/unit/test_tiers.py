"""The stores that need no GPU: the bytes come back, the counts are exact, the buffers are reused."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from holdall.errors import OverBudget, Unsupported
from holdall.registry import member_class, member_names
from holdall.tiers.far import Far
from holdall.tiers.null import Null
from holdall.units import KiB, MiB


def filled(nbytes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)


def read(storage):
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class Watch(TorchDispatchMode):
    """Every op that passes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 3 * MiB + 5])
def test_far_returns_the_same_bytes_in_a_new_storage(nbytes):
    store, source = Far(), filled(nbytes)
    ticket = store.put(source.untyped_storage())
    store.wait(ticket)
    expected = source.clone()
    source.fill_(0)  # the copy was made when `put` returned
    fetched = store.get(ticket, "cpu")
    store.wait_in(ticket)
    assert fetched.nbytes() == nbytes and torch.equal(read(fetched), expected)
    assert nbytes == 0 or fetched.data_ptr() != source.untyped_storage().data_ptr()
    store.free(ticket)
    assert torch.equal(read(fetched), expected)  # it does not share memory with the store


def test_far_moves_the_whole_storage_of_a_view_of_any_dtype():
    store, base = Far(), torch.arange(12, dtype=torch.float64)
    view = base[2:8].view(2, 3).t()
    fetched = store.get(store.put(view.untyped_storage()), view.device)
    again = torch.empty(0, dtype=view.dtype).set_(fetched, view.storage_offset(), view.shape, view.stride())
    assert torch.equal(again, view)


def test_far_counts_every_byte_of_live_tickets():
    store = Far()
    a, b = store.put(filled(1000).untyped_storage()), store.put(filled(2345).untyped_storage())
    assert (store.used, store.peak, store.held) == (3345, 3345, 3345)
    store.free(a)
    assert (store.used, store.peak, store.held) == (2345, 3345, 3345)
    store.free(b)
    assert (store.used, store.peak) == (0, 3345)
    store.close()
    assert store.held == 0


def test_far_reuses_a_buffer_of_exactly_the_same_size():
    store = Far()
    ticket = store.put(filled(5000).untyped_storage())
    where = ticket.buffer.storage.data_ptr()
    store.free(ticket)
    other, same = store.put(filled(5001).untyped_storage()), store.put(filled(5000, seed=1).untyped_storage())
    assert same.buffer.storage.data_ptr() == where != other.buffer.storage.data_ptr()
    assert torch.equal(read(store.get(same, "cpu")), filled(5000, seed=1))
    assert store.held == 10_001


def test_far_refuses_what_its_capacity_cannot_hold():
    store = Far(capacity=10 * KiB)
    ticket = store.put(filled(8 * KiB).untyped_storage())
    with pytest.raises(OverBudget, match=r"holds 8\.0 KiB and cannot take 4\.0 KiB more.*capacity is 10\.0 KiB"):
        store.put(filled(4 * KiB).untyped_storage())
    assert store.used == 8 * KiB
    store.free(ticket)


def test_far_lets_kept_buffers_go_before_it_refuses():
    store = Far(capacity=10 * KiB)
    store.free(store.put(filled(8 * KiB).untyped_storage()))
    ticket = store.put(filled(4 * KiB).untyped_storage())
    assert (store.used, store.held) == (4 * KiB, 4 * KiB)
    store.free(ticket)


def test_far_cannot_be_asked_for_bytes_that_were_freed():
    store = Far()
    ticket = store.put(filled(10).untyped_storage())
    store.free(ticket)
    with pytest.raises(AssertionError, match="freed"):
        store.get(ticket, "cpu")
    with pytest.raises(AssertionError, match="freed already"):
        store.free(ticket)


def test_closing_voids_the_tickets_that_are_out():
    store = Far()
    ticket = store.put(filled(10).untyped_storage())
    store.close()
    assert (store.used, store.held) == (0, 0)
    store.free(ticket)
    assert (store.used, store.held) == (0, 0)


def test_the_memory_of_far_goes_back_to_the_system():
    psutil = pytest.importorskip("psutil")
    store, nbytes = Far(), 64 * MiB
    source = torch.ones(nbytes, dtype=torch.uint8)
    resident = psutil.Process().memory_info().rss
    ticket = store.put(source.untyped_storage())
    assert psutil.Process().memory_info().rss - resident > nbytes // 2
    store.free(ticket)
    store.close()
    gc.collect()
    assert psutil.Process().memory_info().rss - resident < nbytes // 2


def test_watchers_of_the_users_ops_do_not_see_the_copies():
    store, source = Far(), filled(100).untyped_storage()
    with Watch() as watch:
        ticket = store.put(source)
        store.get(ticket, "cpu")
        store.free(ticket)
    assert watch.seen == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 10**6)), max_size=40))
def test_any_sequence_of_puts_and_frees_keeps_bytes_and_counts_right(events):
    store, live = Far(), []
    for seed, (is_put, size, pick) in enumerate(events):
        if is_put or not live:
            source = filled((0, 7, 4096, 9000)[size], seed)
            live.append((store.put(source.untyped_storage()), source))
        else:
            ticket, source = live.pop(pick % len(live))
            assert torch.equal(read(store.get(ticket, "cpu")), source)
            store.free(ticket)
        assert store.used == sum(t.nbytes for t, _ in live) <= min(store.peak, store.held)
    for ticket, source in live:
        assert torch.equal(read(store.get(ticket, "cpu")), source)
    store.close()
    assert store.held == store.used == 0


def test_null_serves_fake_tensors_of_any_size_and_counts_them():
    store = Null(capacity=2**50)
    with FakeTensorMode():
        x = torch.empty(2**40, dtype=torch.float32)
        ticket = store.put(x.untyped_storage())
        assert (store.used, store.peak) == (2**42, 2**42)
        fetched = store.get(ticket, x.untyped_storage().device)
        assert fetched.nbytes() == 2**42
        store.free(ticket)
    assert (store.used, store.peak, store.held) == (0, 2**42, 0)
    with pytest.raises(OverBudget):
        Null(capacity=9).put(filled(10).untyped_storage())


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_the_hosts_memory_is_refused_where_there_is_no_gpu():
    with pytest.raises(Unsupported, match="CUDA"):
        member_class("tiers", "cpu")()


@pytest.mark.parametrize("name", member_names("tiers"))
def test_every_file_is_a_member_of_its_own_name(name):
    assert member_class("tiers", name).name == name
    for method in ("put", "landed", "wait", "get", "wait_in", "free", "close"):
        assert callable(getattr(member_class("tiers", name), method))
