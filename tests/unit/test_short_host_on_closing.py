"""A plan with states on a disk is taken down on a host that has no room for them: they stay a mapping of the file."""

import gc
import os
from contextlib import closing

import pytest
import torch

import holdall
from holdall.host_memory import free_memory, host_memory
from holdall.testing.stand_ins import host_with
from holdall.testing.worlds import DeepNet
from holdall.tiers.nvme import Nvme
from holdall.types.layout import PAGE

pytestmark = [
    pytest.mark.usefixtures("disk"),
    pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="about systems with `posix_fallocate`"),
]
DISK = {"planner": "zero_infinity", "tier": "nvme", "persistence_threshold": 0}


def built():
    torch.manual_seed(0)
    model = DeepNet(40, 3)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def steps(model, optimizer, count):
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(1))
    for _ in range(count):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model, optimizer):
    moments = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return [t.detach().clone() for t in (*model.parameters(), *moments)]


def fitted(model, optimizer):
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(1))
    return holdall.fit(model, optimizer, x, budget={"cpu": "1GiB", "far": "1GiB", "nvme": "1GiB"}, **DISK)


def mapped_files():
    with open("/proc/self/maps") as maps:
        return sum("holdall" in line and "deleted" in line for line in maps)


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="reads the mappings of a process from /proc")
def test_states_stay_in_files_and_training_goes_on():
    plain = built()
    steps(*plain, 5)
    model, optimizer = built()
    harness = fitted(model, optimizer)
    steps(model, optimizer, 2)
    before = mapped_files()
    with host_with(lambda: 0):
        harness.close()
    del harness
    gc.collect()
    assert mapped_files() > before  # the file is gone, its bytes are not
    steps(model, optimizer, 1)  # the user's own loop, without a plan
    harness = fitted(model, optimizer)  # and a second plan on them
    steps(model, optimizer, 2)
    harness.close()
    del harness
    gc.collect()
    assert mapped_files() == before
    assert all(map(torch.equal, values(model, optimizer), values(*plain)))


def test_states_become_ordinary_memory_where_there_is_room():
    model, optimizer = built()
    harness = fitted(model, optimizer)
    steps(model, optimizer, 2)
    harness.close()
    assert not os.path.exists("/proc/self/maps") or not mapped_files()


def test_memory_kept_for_reuse_goes_before_anything_stays_in_files():
    """As if the host were full but for what the near store holds."""
    model, optimizer = built()
    harness = fitted(model, optimizer)
    steps(model, optimizer, 2)
    near = harness.stores["far"]
    full = near.held
    assert full
    with host_with(lambda: 2**50 if near.held < full else 0):
        harness.close()
    assert not os.path.exists("/proc/self/maps") or not mapped_files()


def test_room_that_is_left_is_given_out_again_when_the_last_tensor_goes():
    with closing(Nvme(capacity=3 * PAGE)) as store:
        ticket = store.reserve(2 * PAGE)
        held = store.memory(ticket)[:8]
        held.fill_(7)
        store.leave(ticket)
        store.begin_anew()  # what is left is not void
        assert store.used == 2 * PAGE
        with pytest.raises(holdall.OverBudget):
            store.reserve(2 * PAGE)
        assert held.eq(7).all()
        del held
        gc.collect()
        assert store.used == 0
        assert store.memory(store.reserve(3 * PAGE)).numel() == 3 * PAGE


def test_free_memory_is_at_most_all_of_it():
    assert 0 < free_memory() < host_memory()
