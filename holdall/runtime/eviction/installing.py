"""Installs an eviction policy on a model and removes it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdall.errors import Unsupported
from holdall.runtime.arena.directed import DirectedArena
from holdall.runtime.budget.meter import device_context
from holdall.runtime.eviction.evictor import Evictor
from holdall.runtime.eviction.handle import Handle
from holdall.runtime.eviction.outlook import Outlook
from holdall.runtime.eviction.pool import EvictionPool
from holdall.runtime.eviction.storages import Rates
from holdall.tiers import Store
from holdall.units import format_seconds

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness

log = logging.getLogger("holdall")

MakePool = Callable[[Evictor, int, Callable[[], int]], EvictionPool]  # (driver, bytes in use before the step, live bytes)


def install(
    harness: Harness,
    make_pool: MakePool,
    rates: Rates,
    *,
    align: int = 1,
    memory: int = 0,
    store: Store | None = None,
) -> Evictor:
    """Install the hooks that mark the beginning and end of a step, and the mode that handles its ops. `memory`: bytes of an
    arena in which results lie as the policy says; 0: the device's allocator places them. `store`: of the tier that storages are
    swapped to."""
    model = harness.model
    live = _live_bytes(harness)

    def see(storage: torch.UntypedStorage, label: str) -> None:
        if harness.ledger is not None:
            harness.ledger.see(storage, label)

    def tick() -> None:
        if harness.ledger is not None:
            harness.ledger.curve.append((time.perf_counter(), harness.ledger.live))

    evictor = Evictor(
        lambda driver, before: make_pool(driver, before, live),
        Outlook(rates, align=align),
        live=live,
        see=see,
        tick=tick,
        quiet=lambda: harness.ledger.paused() if harness.ledger is not None else nullcontext(),
        waits=harness.optimizer is not None,
        memory=_directed(harness, memory) if memory else None,
        store=store,
    )
    undo = [
        model.register_forward_pre_hook(lambda *_: evictor.begin_forward(), prepend=True).remove,
        model.register_forward_hook(lambda *_: evictor.end_forward(), always_call=True).remove,
        register_optimizer_step_pre_hook(lambda *_: evictor.settle()).remove,
    ]
    harness.around(evictor)
    if evictor.memory is not None:
        harness.around(evictor.memory)
        undo.append(evictor.memory.close)

    def close() -> None:
        for each in undo:
            each()
        evictor.close()
        _unwrap_buffers(model)
        if evictor.ops:
            per_op = format_seconds(evictor.seconds / evictor.ops)
            log.info("holdall: evict added %s of overhead per op (%d ops)", per_op, evictor.ops)

    harness.on_close(close)
    return evictor


def _directed(harness: Harness, size: int) -> DirectedArena:
    if harness.device.type != "cpu":
        raise Unsupported("storages lie at the addresses of the policy's arena on a CPU only", hint="leave `real` out")
    return DirectedArena(size)


def _live_bytes(harness: Harness) -> Callable[[], int]:
    """Bytes in use on the model's device, as the harness's meter counts them."""
    device = next((p.device for p in harness.model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        context = device_context(device)
        return lambda: torch.cuda.memory_allocated(device) + context
    return lambda: harness.ledger.live if harness.ledger is not None else 0


def _unwrap_buffers(model: torch.nn.Module) -> None:
    """Turn buffers that a forward replaced by handles into ordinary tensors."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, Handle):
                module._buffers[name] = buffer.plain()
