"""The model of the caching allocator against the allocator itself, in a fresh process so that nothing was allocated before."""

import json
import os
import random
import subprocess
import sys

import pytest
import torch

from holdall.simulator.allocators import Caching
from holdall.units import MiB

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

REAL = """
import json, sys, torch
torch.cuda.init()
live, seen = {}, []
for event, key, nbytes in json.load(sys.stdin):
    if event == "alloc":
        live[key] = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    elif event == "free":
        del live[key]
    else:
        torch.cuda.empty_cache()
    seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
print(json.dumps(seen))
"""


def on_the_device(events):
    """(allocated, reserved) of PyTorch after each event."""
    plain = {k: v for k, v in os.environ.items() if k not in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
    run = subprocess.run(
        [sys.executable, "-c", REAL], input=json.dumps(events), capture_output=True, text=True, env=plain, timeout=300
    )
    assert run.returncode == 0, run.stderr
    return [tuple(pair) for pair in json.loads(run.stdout.strip().splitlines()[-1])]


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
