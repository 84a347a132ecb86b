"""A GPU that is shared: only what this process takes is its own."""

import itertools
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from holdall.runtime.budget import gpu_processes
from holdall.runtime.budget.meter import device_context
from holdall.units import GiB, MiB

TOTAL = 80 * GiB

NUMBERS = itertools.count()


@pytest.fixture
def gpu():
    """One that nobody has looked at: the least that was seen of it is kept."""
    return torch.device("cuda", next(NUMBERS))


@pytest.fixture
def driver(monkeypatch):
    """A driver whose list of processes (number -> bytes) is to be filled in."""
    taken = {}

    class NVMLError(Exception):
        pass

    def processes(handle):
        assert handle == "GPU-1234"
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in taken.items()]

    calls = []
    library = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: calls.append("in"),
        nvmlShutdown=lambda: calls.append("out"),
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses=processes,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1234"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (6000, 10000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 500)
    yield SimpleNamespace(taken=taken, library=library)
    assert calls.count("in") == calls.count("out")


def test_what_others_take_is_not_the_context_of_this_process(driver, gpu):
    driver.taken.update({os.getpid(): 700, 1: 3000})
    assert device_context(gpu) == 200 + 150  # and half of what the driver counts to neither


def test_what_came_between_two_looks_is_nobodys_share(driver, gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 4 << 30))
    driver.taken.update({os.getpid(): 700, 1: 3000})
    assert device_context(gpu) == 200


def test_alone_all_that_the_device_sees_counts(driver, gpu):
    driver.taken[os.getpid()] = 700  # the driver's own few bytes are in nobody's figure
    assert device_context(gpu) == 3500


def test_processes_that_come_and_go_change_nothing(driver, gpu, monkeypatch):
    def use(size):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (TOTAL - size, TOTAL))

    own = os.getpid()
    driver.taken[own] = 2 * GiB
    use(2 * GiB + 12 * MiB)
    assert gpu_processes.own_bytes(gpu) == 2 * GiB + 12 * MiB  # with what the list leaves out
    use(2 * GiB + 612 * MiB)  # by one that is not listed yet
    assert gpu_processes.own_bytes(gpu) == 2 * GiB + 12 * MiB
    driver.taken[1] = 8 * GiB
    use(10 * GiB + 80 * MiB)  # it is listed, with less than it has by now
    assert gpu_processes.own_bytes(gpu) == 2 * GiB + 12 * MiB
    driver.taken[own] = 3 * GiB
    use(11 * GiB + 16 * MiB)
    assert gpu_processes.own_bytes(gpu) == 3 * GiB + 8 * MiB


@pytest.mark.parametrize("taken", [{1: 3000, 2: 700}, {os.getpid(): None, 1: 3000}, {}])
def test_where_processes_cannot_be_told_apart_all_counts(driver, gpu, taken):
    driver.taken.update(taken)
    assert gpu_processes.own_bytes(gpu) is None
    assert device_context(gpu) == 3500


def test_a_driver_that_refuses_to_say_is_no_error(driver, gpu):
    def refuse(uuid):
        raise driver.library.NVMLError(uuid)

    driver.library.nvmlDeviceGetHandleByUUID = refuse
    assert gpu_processes.own_bytes(gpu) is None


def test_without_the_library_all_counts(driver, gpu, monkeypatch):
    driver.taken.update({os.getpid(): 700, 1: 3000})
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert device_context(gpu) == 3500
