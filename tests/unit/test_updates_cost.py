"""What an update on the host is said to take."""

from dataclasses import replace

import pytest
import torch

import holdall
from holdall.cost.presets import gpu
from holdall.cost.updates import host_seconds

H100 = replace(gpu("h100-sxm"), updates=4e9)


def traced(make, dtype=torch.float32):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to(dtype)
    return holdall.trace(
        model, torch.randn(4, 64, dtype=dtype), optimizer=make(model.parameters()), loss=lambda model, x: model(x).sum()
    )


def rate(trace):
    """Parameters a second."""
    return sum(u.numel for u in trace.units) / sum(host_seconds(u, trace, H100) for u in trace.units)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_of_float32_has_the_rate_that_was_measured(kind, fused):
    assert rate(traced(lambda params: kind(params, fused=fused))) == pytest.approx(4e9)


def test_others_take_the_longer_the_more_they_move():
    momentum = rate(traced(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)))
    adafactor = rate(traced(torch.optim.Adafactor))
    assert adafactor < momentum < 4e9


def test_adam_in_sixteen_bits_goes_by_torchs_own_ops():
    trace = traced(lambda params: torch.optim.AdamW(params, fused=True), torch.bfloat16)
    moved = sum(u.moved for u in trace.units) / sum(u.numel for u in trace.units)
    assert rate(trace) == pytest.approx(4e9 * 28 / moved / 2.6)
    assert 2e9 < rate(trace) < 4e9  # 3.2e9 were seen


def test_where_a_cpu_computes_its_memory_says_what_an_update_takes():
    machine = replace(H100, device="cpu")
    trace = traced(torch.optim.Adafactor)
    assert all(host_seconds(u, trace, machine) == u.numel / 4e9 for u in trace.units)
