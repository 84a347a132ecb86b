"""The kernel of 8-bit Adam does what the plain ops do. Triton's interpreter runs it where there is no GPU."""

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from holdall.optim._math import adam8bit_fused
from holdall.optim.adam8bit import Adam8bit

SCRIPT = """
import torch
from holdall.optim import _adam8bit_fused
from holdall.optim.adam8bit import Adam8bit

device = {device!r}
half = torch.float16 if device == "cpu" else torch.bfloat16  # which the interpreter cuts off instead of rounding
for numel, dtype, betas, decay in [(5000, torch.float32, (0.9, 0.999), 0.1), (256 * 40, half, (0.3, 0.9), 0.0)]:
    torch.manual_seed(0)
    start = torch.randn(numel).to(dtype)
    ways = []
    for fused in (True, False):
        p = torch.nn.Parameter(start.clone().to(device))
        _adam8bit_fused.works_on = lambda value, grad, fused=fused: fused
        optimizer = Adam8bit([p], lr=1e-2, betas=betas, weight_decay=decay)
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            p.grad = torch.randn(numel, generator=generator).to(dtype).to(device)
            optimizer.step()
        ways.append((p.detach().float(), optimizer.state[p]))
    (x, mine), (y, other) = ways
    ulp = (y.abs() + 0.04) * (2.0**-22 if dtype == torch.float32 else 2.0**-7)
    off = (x - y).abs() > ulp
    assert not off.any(), (x - y)[off]
    assert dtype == torch.float32 or (x != y).float().mean() < 0.01
    for key in ("exp_avg", "exp_avg_sq"):
        off = (mine[key].int() - other[key].int()).abs()
        assert off.max() <= 1 and (off > 0).float().mean() < 0.01, (key, off.max(), (off > 0).float().mean())
        torch.testing.assert_close(mine[key + "_scale"], other[key + "_scale"], rtol=1e-5, atol=0)
print("right")
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_gives_the_same_moments_and_values(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    environment = {**os.environ, "TRITON_INTERPRET": "1"} if device == "cpu" else dict(os.environ)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(device=device)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.stdout.strip().endswith("right"), run.stderr[-2000:]


def test_a_trace_sees_one_op(monkeypatch):
    monkeypatch.setattr(adam8bit_fused, "works_on", lambda *_: True)
    monkeypatch.setattr(adam8bit_fused, "_TABLES", {})
    with FakeTensorMode():
        p = torch.nn.Parameter(torch.empty(8192))
        p.grad = torch.empty(8192)
        optimizer = Adam8bit([p])
        optimizer.step()
        with torch.profiler.profile() as seen:
            optimizer.step()
    assert not adam8bit_fused._TABLES
    assert "aten::bucketize" not in {e.key for e in seen.key_averages()}
