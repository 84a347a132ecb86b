"""A plan with states on a disk is taken down on a host that has no room for them: they stay a mapping of the file."""

import gc
import os

import pytest
import torch

import holdall
from holdall.host_memory import free_memory, host_memory
from holdall.runtime.states import host_room
from holdall.testing.worlds import DeepNet, machine
from holdall.tiers._extents import Extents
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
def test_states_stay_in_files_and_training_goes_on(monkeypatch):
    plain = built()
    steps(*plain, 5)
    model, optimizer = built()
    harness = fitted(model, optimizer)
    steps(model, optimizer, 2)
    before = mapped_files()
    monkeypatch.setattr(host_room, "free_memory", lambda: 0)
    harness.close()
    del harness
    gc.collect()
    assert mapped_files() > before  # the file is gone, its bytes are not
    steps(model, optimizer, 1)  # the user's own loop, without a plan
    harness = fitted(model, optimizer)  # and a second plan on them
    steps(model, optimizer, 2)
    monkeypatch.undo()
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


def test_memory_kept_for_reuse_goes_before_anything_stays_in_files(monkeypatch):
    model, optimizer = built()
    harness = fitted(model, optimizer)
    steps(model, optimizer, 2)
    free = [0]
    monkeypatch.setattr(host_room, "free_memory", lambda: free[0])
    trimmed = []
    monkeypatch.setattr(host_room.Keepers, "trim", lambda self: (trimmed.append(self), free.__setitem__(0, 2**50)))
    harness.close()
    assert trimmed
    assert not os.path.exists("/proc/self/maps") or not mapped_files()


class File:
    """As much of a file as its room asks for."""

    length, is_direct, is_coherent = 0, False, True

    def grow(self, length):
        self.length = max(self.length, length)

    def map(self, address, nbytes, offset):
        pass

    def close(self):
        pass


def test_room_that_is_left_is_given_out_again_when_the_last_tensor_goes():
    extents = Extents("nvme", 3 * PAGE, [File()], PAGE)
    (first,) = extents.take_all([2 * PAGE])
    held = first.memory()[:8]
    extents.leave(first)
    del first
    extents.begin_anew()  # what is left is not void
    assert extents.used == 2 * PAGE
    with pytest.raises(holdall.OverBudget):
        extents.take_all([2 * PAGE])
    del held
    gc.collect()
    assert extents.used == 0
    assert extents.take_all([3 * PAGE])


def test_free_memory_is_at_most_all_of_it():
    assert 0 < free_memory() < host_memory()
