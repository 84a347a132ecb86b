"""The rates of a GPU's host, which plans with updates there are made by."""

import threading

import psutil
import pytest
import torch

from holdall.machine.host_rates import host_rates
from holdall.units import GiB

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


def test_updates_and_copies_take_from_each_other_and_nothing_stays():
    host_rates(torch.device("cuda"))  # compiles and loads
    on_device, on_host = torch.cuda.memory_allocated(), psutil.Process().memory_info().rss
    rates = host_rates(torch.device("cuda"))
    assert 0 < rates.updates_beside < 1.05 * rates.updates
    assert 0.1 < rates.read_beside <= 1
    assert torch.cuda.memory_allocated() == on_device
    assert psutil.Process().memory_info().rss < on_host + GiB / 4
    assert not any(t.name == "holdall-probe" for t in threading.enumerate())
