"""The budget holds for whole pages, which the allocator takes of the device, and for what comes beside it later."""

import itertools

import pytest
import torch

from holdall.runtime.budget.meter import CudaMeter, device_context
from holdall.units import MiB

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


LATER = 24 * MiB  # kernels that are loaded when the allocator has all that it may have


@pytest.mark.parametrize("more", range(0, 12, 3))
def test_a_device_that_is_full_has_room_for_what_comes_later(more):
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    budget = device_context(device) + torch.cuda.memory_reserved(device) + (264 + more) * MiB
    meter, held = CudaMeter(device), []
    meter.start(budget)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            for size in itertools.cycle((11, 13, 17)):
                held.append(torch.empty(size * MiB, dtype=torch.uint8, device=device))
        assert sum(t.nbytes for t in held) > 200 * MiB
        assert device_context(device) + torch.cuda.memory_reserved(device) <= budget - LATER
    finally:
        meter.stop()
        del held
        torch.cuda.empty_cache()
