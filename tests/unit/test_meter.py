"""The meter of a GPU, with a device that the test makes up: what it leaves to the allocator."""

import sys

import pytest
import torch

from holdall.runtime.budget.meter import CudaMeter

GIB = 2**30
SPARE = (12 + 24) / 1024  # GiB: the last page, and what comes later


@pytest.fixture
def device(monkeypatch):
    """What the driver has taken, and the limits that were set."""

    class Device:
        context, limits = GIB // 2, []

    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")  # the user has said
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (16 * GIB - Device.context, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: type("Event", (), {"record": lambda *_: None}))
    for name, value in {
        "empty_cache": None,
        "current_stream": None,
        "memory_reserved": 0,
        "get_per_process_memory_fraction": 1.0,
        "reset_peak_memory_stats": None,
        "max_memory_reserved": 3 * GIB,
        "max_memory_allocated": 2 * GIB,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("P", (), {"total_memory": 16 * GIB}))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: Device.limits.append(share * 16))
    return Device


def step(metered):
    metered.begin()
    metered.end()


def test_what_the_plan_counts_for_kernels_is_left_free_before_they_are_loaded(device):
    metered = CudaMeter(torch.device("cuda"), context=GIB)
    metered.start(8 * GIB)
    assert device.limits == [7.0 - SPARE]
    step(metered)
    assert metered.peaks() == [3 * GIB]


def test_kernels_that_come_in_the_first_steps_lower_the_limit(device):
    metered = CudaMeter(torch.device("cuda"))
    metered.start(8 * GIB)
    device.context = 2 * GIB
    step(metered)
    step(metered)
    assert device.limits == [7.5 - SPARE, 6.0 - SPARE]
    assert metered.peaks() == [4 * GIB, 4 * GIB]
    metered.stop()
    assert device.limits[-1] == 16.0


@pytest.mark.parametrize(
    ("own", "known", "expected"),
    [
        ("", "expandable_segments large_segment_size_mb", "expandable_segments:True,large_segment_size_mb:12"),
        ("", "expandable_segments", "expandable_segments:True"),
        ("large_segment_size_mb:40", "expandable_segments large_segment_size_mb", "expandable_segments:True"),
        ("expandable_segments:False", "expandable_segments large_segment_size_mb", None),
        ("", "", None),
    ],
)
def test_pages_are_small_where_they_can_be_and_the_user_has_not_said(own, known, expected, device, monkeypatch):
    changed = []

    def change(settings):
        if any(part.split(":")[0] not in known.split() for part in settings.split(",")):
            raise ValueError(settings)
        changed.append(settings)

    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", own)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", change, raising=False)
    metered = CudaMeter(torch.device("cuda"))
    metered.start(8 * GIB)
    assert changed == ([] if expected is None else [expected])
    metered.stop()
    assert changed[1:] == ([] if expected is None else [expected.replace("True", "False").replace("mb:12", "mb:20")])
