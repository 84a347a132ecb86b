"""What other processes do on a GPU is not charged to this one: not when they start, and not while they run."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from holdall.runtime.budget.gpu_processes import own_bytes
from holdall.units import GiB, MiB

TOTAL = 80 * GiB


@pytest.fixture
def driver(monkeypatch):
    """A driver that lists `driver.listed` (bytes by process), with `driver.used` bytes of the GPU in use."""
    driver = SimpleNamespace(listed={}, used=0)
    library = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda name: name,
        nvmlDeviceGetComputeRunningProcesses=lambda _: [
            SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in driver.listed.items()
        ],
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (TOTAL - driver.used, TOTAL))
    return driver


def test_a_process_that_just_started_is_not_ours(driver):
    device = torch.device("cuda", 0)
    own = os.getpid()
    driver.listed, driver.used = {own: 2 * GiB}, 2 * GiB + 12 * MiB
    assert own_bytes(device) == 2 * GiB + 12 * MiB  # what the list leaves out
    driver.used += 600 * MiB  # of one that is not listed yet
    assert own_bytes(device) == 2 * GiB + 12 * MiB
    driver.listed, driver.used = {own: 2 * GiB, 1: 8 * GiB}, 10 * GiB + 80 * MiB  # it is listed, with less than it has by now
    assert own_bytes(device) == 2 * GiB + 12 * MiB
    driver.listed[own], driver.used = 3 * GiB, 11 * GiB + 16 * MiB
    assert own_bytes(device) == 3 * GiB + 8 * MiB


def test_without_a_list_nothing_is_known(driver):
    driver.listed, driver.used = {1: GiB}, GiB
    assert own_bytes(torch.device("cuda", 1)) is None
