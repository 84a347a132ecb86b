"""The model of the caching allocator against the allocator itself, in a fresh process so that nothing was allocated before."""

import json
import os
import random
import subprocess
import sys
from contextlib import suppress

import pytest
import torch

from holdall.simulator.allocators import Caching
from holdall.simulator.pages import Exhausted, Pages
from holdall.units import PAGE, MiB

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

REAL = """
import json, sys, torch
torch.cuda.init()
if len(sys.argv) > 1:
    torch.cuda.set_per_process_memory_fraction(int(sys.argv[1]) / torch.cuda.get_device_properties(0).total_memory)
live, seen = {}, []
for event, key, nbytes in json.load(sys.stdin):
    if event == "alloc":
        try:
            live[key] = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            pass
    elif event == "free":
        del live[key]
    else:
        torch.cuda.empty_cache()
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), retries))
print(json.dumps(seen))
"""


def on_the_device(events, settings="", limit=None):
    """(allocated, reserved, times that it ran out and tried again) of PyTorch after each event."""
    plain = {k: v for k, v in os.environ.items() if k not in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
    if settings:
        plain["PYTORCH_CUDA_ALLOC_CONF"] = settings
    command = [sys.executable, "-c", REAL, *([str(limit)] if limit else [])]
    run = subprocess.run(command, input=json.dumps(events), capture_output=True, text=True, env=plain, timeout=300)
    assert run.returncode == 0, run.stderr
    return [tuple(found) for found in json.loads(run.stdout.strip().splitlines()[-1])]


def in_the_model(events):
    caching, seen = Caching(), []
    for event, key, nbytes in events:
        if event == "alloc":
            caching.alloc(key, nbytes)
        elif event == "free":
            caching.free(key)
        else:
            caching.empty_cache()
        seen.append((caching.allocated, caching.reserved))
    return seen


def compare(events, tolerance=0.0):
    for at, (real, model) in enumerate(zip(on_the_device(events), in_the_model(events), strict=True)):
        said = f"event {at} {events[at]}: the device has {real}, the model {model}"
        assert abs(real[0] - model[0]) <= tolerance * real[0], said
        assert abs(real[1] - model[1]) <= tolerance * real[1], said


def test_the_malloc_sequence_gives_the_same_bytes_on_the_device():
    sizes = [600, MiB + 1, 10 * MiB, 11 * MiB, 9 * MiB, 2 * MiB, 10 * MiB + 512, 10 * MiB]
    order = ["+0", "+1", "+2", "+3", "+4", "-1", "+5", "-2", "+6", "-3", "+7"]
    events = [("alloc" if o[0] == "+" else "free", int(o[1]), sizes[int(o[1])]) for o in order]
    compare([*events, ("empty", 0, 0)])


def test_a_growing_batch_takes_the_same_segments_on_the_device():
    events = []
    for n in range(100, 105):
        events += [("alloc", key, n * share * MiB // 40) for key, share in enumerate((40, 10, 40, 10, 20))]
        events += [("free", key, 0) for key in range(5)]
    compare([*events, ("empty", 0, 0)])


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_gives_nearly_the_same_bytes_on_the_device(seed):
    # equal blocks of two segments are told apart by address, which the driver chooses: a segment more or less
    rng, live, events = random.Random(seed), [], []
    for key in range(2000):
        if live and rng.random() < 0.48:
            events.append(("free", live.pop(rng.randrange(len(live))), 0))
        else:
            live.append(key)
            events.append(("alloc", key, int(2 ** rng.uniform(4, 26))))
        if key % 500 == 499:
            events.append(("empty", 0, 0))
    compare(events, tolerance=0.02)


@pytest.mark.parametrize("seed", range(3))
def test_pages_are_taken_and_given_back_as_on_the_device(seed):
    limit = 513 * MiB  # no multiple of what is asked for: rounding must not decide
    rng, pages, live, events, expected = random.Random(seed), Pages(limit), {}, [], []
    for key in range(1500):
        size = int(2 ** rng.uniform(21, 26))
        if live and sum(live.values()) + size > 0.9 * limit:
            gone = rng.choice(list(live))
            del live[gone]
            pages.free(gone)
            events.append(("free", gone, 0))
        else:
            with suppress(Exhausted):  # of the device too; both have given pages back by then
                pages.alloc(key, size)
                live[key] = size
            events.append(("alloc", key, size))
        expected.append((pages.reserved, pages.halts))
    assert pages.halts > 10
    seen = on_the_device(events, f"expandable_segments:True,large_segment_size_mb:{PAGE // MiB}", limit)
    for at, (real, model) in enumerate(zip(seen, expected, strict=True)):
        assert real[1:] == model, f"event {at} {events[at]}: the device has {real}, the model {model}"
