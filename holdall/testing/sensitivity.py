"""How much a gradient suffers when one tensor is coded: GACT's measurement (Liu et al., ICML 2022, arXiv 2206.11357).

For each tensor the step is run with it alone at 1 bit, twice with other draws, and once at 8 bits; the squared distance of the
gradients is its sensitivity. The model is left as it was: weights, gradients, buffers and random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from holdall.actions.compress import Compress, codable, key_of
from holdall.runtime.activations.compress import Compression, compress_saved
from holdall.runtime.activations.resident import CallSaves
from holdall.types import Trace

_MOST = 1e10  # a sensitivity beyond this says nothing more


def measure_sensitivity(
    model: torch.nn.Module, step: Callable[[], torch.Tensor], trace: Trace, *, bits: int = 1, seed: int = 0
) -> dict[str, float]:
    """The sensitivity of every tensor that may be coded, by `key_of`. `step` runs the forward and returns the loss.

    `bits`: those at which it is measured; GACT's is 1. Where backward is not linear in a tensor (GELU, attention) a figure
    taken at one width says little about others.
    """
    found = {}
    for block in trace.blocks:
        if block.backward is None:
            continue
        for n, x in enumerate(codable(trace, block)):
            once, again, fine = (
                _gradient(model, step, Compress.of(trace, block, bits={x: width}), seed=s, draws=seed)
                for width, s in ((bits, seed), (bits, seed + 1), (8, seed))
            )
            far = 2 * max(_distance(once, fine), _distance(again, fine))
            found[key_of(block.name, n)] = min(max(_distance(once, again), far) * (2**bits - 1) ** 2, _MOST)
    return found


@contextmanager
def coded(model: torch.nn.Module, action: Compress, *, seed: int) -> Iterator[None]:
    """The block under its codec, with nothing else of a harness; for measuring."""
    path, _, nth = action.block.partition("#")
    module = model.get_submodule(path)
    had_own = "forward" in module.__dict__
    forward = module.forward
    how = Compression(codecs=action._codecs(), seed=seed)
    calls = 0

    def under_codec(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != int(nth or 0) + 1:
            return forward(*args, **kwargs)
        return compress_saved(how, None, CallSaves(()), forward, args, kwargs)

    module.forward = under_codec  # type: ignore[method-assign]
    try:
        yield
    finally:
        if had_own:
            module.forward = forward  # type: ignore[method-assign]
        else:
            del module.forward


def _gradient(
    model: torch.nn.Module, step: Callable[[], torch.Tensor], action: Compress, *, seed: int, draws: int
) -> list[torch.Tensor]:
    """The gradient of one step. Dropout draws the same each time, and buffers are put back."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    buffers = [(b, b.clone()) for b in model.buffers()]
    devices = {p.device for p in parameters if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)), coded(model, action, seed=seed):
        torch.manual_seed(draws)
        gradients = torch.autograd.grad(step(), parameters, allow_unused=True)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return [g for g in gradients if g is not None]


def _distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return sum(float((x.double() - y.double()).square().sum()) for x, y in zip(a, b, strict=True))
