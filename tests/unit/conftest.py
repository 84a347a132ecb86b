"""Fixtures that several files about model states use."""

import pytest
import torch

from holdall.testing.stand_ins import late_updates


@pytest.fixture
def no_modes_left():
    """A mode that a failing test left on this thread must not slow or fail the others."""
    before, methods = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    yield
    while torch._C._len_torch_dispatch_stack() > before:
        torch.utils._python_dispatch._pop_mode()
    while torch._C._len_torch_function_stack() > methods:
        torch.overrides._pop_mode()


@pytest.fixture
def slow_host():
    """Updates on the host come late: who does not wait for them sees the old values."""
    with late_updates(0.01):
        yield
