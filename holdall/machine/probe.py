"""Measures this machine: rates of computation and copies, and memory sizes.

A datasheet gives peaks; a plan needs what this machine reaches, with this PyTorch and its threads, at the sizes of models. Each
figure comes from timing the op itself; the rates of the farther memory are those of the store that will do the copying. The
probe takes a few seconds, allocates little, does not touch the global random state, and caches its answer, also on disk:
`probed` looks there first.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import psutil
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from holdall.caching import key_of, open_cache
from holdall.errors import HoldallError, Unsupported, unknown_name
from holdall.host_memory import host_memory
from holdall.machine.host_rates import host_rates
from holdall.pace import pace_of
from holdall.registry import member_class
from holdall.runtime.budget.meter import device_context
from holdall.tiers import Keeper, Store
from holdall.types import Hardware, HardwareInfo, Progress, Rate, Tier, _json
from holdall.types.plan import silent
from holdall.units import KiB, MiB

_MATMUL = {"cpu": (64, 128, 256, 512, 1024), "cuda": (256, 512, 1024, 2048, 4096, 8192)}  # n of n x n by n x n
_ATTENTION = {"cpu": (64, 256, 512), "cuda": (256, 1024, 4096)}  # tokens
_MEMORY = {  # bytes of one operand
    "cpu": (16 * KiB, 256 * KiB, 4 * MiB, 24 * MiB, 64 * MiB),
    "cuda": (256 * KiB, 4 * MiB, 64 * MiB, 256 * MiB),
}
_NEAREST = {"cpu": "far", "cuda": "cpu"}  # the tier that every machine has beside its own memory
_COPY = {"cpu": 8 * MiB, "queue": 32 * MiB, "cuda": 256 * MiB}  # "queue": where threads make the copies
Workload = tuple[float, Callable[[], object]]  # (FLOPs or bytes, a call that performs them)
_UPDATE_BYTES = 28  # bytes that Adam reads and writes per parameter
_FRESH = 7 * 86400  # seconds for which a measurement is valid
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HAS_FP8 = (8, 9)  # the compute capability from which GPUs multiply 8-bit floats


def probe(device: str = "auto", *, quick: bool = False, progress: Progress = silent) -> Hardware:
    """This machine as a `Hardware`, measured once per process. `quick`: shorter, noisier timings."""
    return _measure(_Request(resolve_device(device), quick, torch.get_num_threads(), progress))


def probed(device: str = "auto", *, progress: Progress = silent) -> Hardware:
    """This machine as measured in the last week by any process; otherwise measured now, quickly."""
    kept = open_cache().get("probe", _place(resolve_device(device)))
    try:
        if kept is not None and 0 <= time.time() - kept["when"] < _FRESH:
            found: Hardware = _json.unpack(Hardware, kept["hardware"], "the cache")
            return found
    except (HoldallError, KeyError, TypeError):
        pass
    return probe(device, quick=True, progress=progress)


def _place(device: str) -> str:
    """The cache key of a device: the device, and the properties of the host that matter."""
    where = torch.device(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    host = _processor(), cores, torch.get_num_threads(), host_memory()
    made_of = torch.__version__, torch.version.cuda
    return key_of("probe", where.type, _name(where), _capacity(where), host, made_of, pace_of(where).since)


def _processor() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class _Request:
    """The key of a cached answer."""

    device: str
    quick: bool
    threads: int
    progress: Progress = field(compare=False)


@dataclass(frozen=True)
class ProbeClock:
    """Times calls on one device."""

    device: torch.device
    budget: float  # seconds per figure

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds of one call, the best of several batches: disturbances only add time."""
        self._batch(call, 1)  # warm-up: libraries load, kernels are chosen
        best = self._batch(call, 1)
        begun = time.perf_counter()
        while (left := begun + self.budget - time.perf_counter()) > best:
            size = round(min(left, self.budget / 12) / best)  # long enough for the clock and for a device's queue
            best = min(best, self._batch(call, max(1, size)))
        return best

    def _batch(self, call: Callable[[], object], size: int) -> float:
        self.synchronize()
        begun = time.perf_counter()
        for _ in range(size):
            call()
        self.synchronize()
        return (time.perf_counter() - begun) / size


@cache
def _measure(request: _Request) -> Hardware:
    clock = ProbeClock(torch.device(request.device), 0.04 if request.quick else 0.14)
    kind = clock.device.type
    workloads = _workloads(clock.device)
    total = len(workloads) + 2
    table: list[Rate] = []
    with torch.no_grad(), torch.autocast(kind, enabled=False):
        request.progress("measuring the start of an op", 0, total, "")
        overhead = _overhead(clock)
        for done, (family, dtype, tries) in enumerate(workloads, 1):
            request.progress(f"measuring {family} {dtype}".rstrip(), done, total, "")
            table += _climb(family, dtype, tries, clock, overhead)
        request.progress("measuring copies", total - 1, total, "")
        store: Store = member_class("tiers", _NEAREST[kind])(device=clock.device)
        try:
            far, duplex = measure_store(store, clock)
        finally:
            store.close()
    resident = context = 0
    host = host_rates(clock.device)
    if kind == "cuda":
        resident = _resident(clock.device)
        torch.cuda.empty_cache()
        context = device_context(clock.device)
    request.progress("measured", total, total, "")
    large = max(p.work for p in table if p.family == "memory")
    least = large if kind == "cuda" else min(MiB, large)  # a busy CPU may have been too slow for more than the first
    bandwidth = max(p.rate for p in table if p.family == "memory" and p.work >= least)
    home = Tier(name="gpu" if kind == "cuda" else "cpu", capacity=_capacity(clock.device), read=bandwidth, write=bandwidth)
    measured = Hardware(
        name=_name(clock.device),
        device=kind,
        tiers=(home, far),
        flops={d: max(p.rate for p in table if (p.family, p.dtype) == ("matmul", d)) for d in _dtypes_of(table)},
        bandwidth=bandwidth,
        overhead=overhead,
        duplex=duplex,
        overlap=kind == "cuda",
        efficiency=1.0,  # the figures above are measured
        table=tuple(table),
        updates=host.updates or bandwidth / _UPDATE_BYTES,
        updates_beside=host.updates_beside,
        read_beside=host.read_beside,
        context=context,
        resident=resident,
        source=f"measured, torch {torch.__version__}" + (", quick" if request.quick else ""),
        about=HardwareInfo(threads=request.threads, python=platform.python_version(), notes=tuple(store.notes)),
    )
    if not pace_of(clock.device).is_busy:
        open_cache().put("probe", _place(request.device), {"when": time.time(), "hardware": _json.pack(measured)})
    return measured


def _resident(device: torch.device) -> int:
    """Bytes that products leave allocated for good: a workspace for the forward's thread, one for the backward's."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is None:
        return 0
    clear()
    before = torch.cuda.memory_allocated(device)
    with torch.enable_grad():
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)
            torch.nn.functional.linear(x, x, x[0]).sum().backward()
            del x
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device) - before


def resolve_device(device: str) -> str:
    kind = device.split(":", maxsplit=1)[0]
    if device == "auto":
        kind = device = "cuda" if torch.cuda.is_available() else "cpu"
    if kind not in ("cpu", "cuda"):
        raise unknown_name("device", device, ("auto", "cpu", "cuda"))
    if kind == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise Unsupported(
            "`device` is cuda, but PyTorch sees no CUDA device",
            hint="use device='cpu', or name a GPU to plan for, such as hardware='rtx-4090'",
        )
    index = torch.device(device).index
    return f"cuda:{torch.cuda.current_device() if index is None else index}"


# arithmetic and bytes


def _workloads(device: torch.device) -> list[tuple[str, str, Iterator[Workload]]]:
    """(family, dtype, calls of growing work), made lazily."""
    dtypes = [d for d in _DTYPES if device.type == "cpu" or d != torch.bfloat16 or torch.cuda.is_bf16_supported()]
    found = [("matmul", _name_of(d), _products(device, d)) for d in dtypes]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _HAS_FP8:
        found.append(("matmul", "float8", _scaled_products(device)))
    attended = dtypes[:1] if device.type == "cpu" else dtypes
    found += [("attention", _name_of(d), _attentions(device, d)) for d in attended]
    found += [("conv", "float32", _convolutions(device)), ("memory", "", _additions(device))]
    return found


def _products(device: torch.device, dtype: torch.dtype) -> Iterator[Workload]:
    for n in _MATMUL[device.type]:
        if 3 * n * n * dtype.itemsize < _room(device):
            yield 2.0 * n**3, partial(torch.matmul, _random(device, dtype, n, n), _random(device, dtype, n, n))


def _scaled_products(device: torch.device) -> Iterator[Workload]:
    one = torch.ones(1, device=device)
    for n in _MATMUL[device.type]:
        if 4 * n * n < _room(device):
            left, right = (_random(device, torch.float8_e4m3fn, n, n) for _ in range(2))
            yield 2.0 * n**3, partial(torch._scaled_mm, left, right.t(), one, one, out_dtype=torch.bfloat16)


def _attentions(device: torch.device, dtype: torch.dtype) -> Iterator[Workload]:
    batch, heads, width = (1, 4, 64) if device.type == "cpu" else (4, 16, 128)
    for tokens in _ATTENTION[device.type]:
        q, k, v = (_random(device, dtype, batch, heads, tokens, width) for _ in range(3))
        yield 4.0 * batch * heads * tokens**2 * width, partial(F.scaled_dot_product_attention, q, k, v)


def _convolutions(device: torch.device) -> Iterator[Workload]:
    batch, width = (2, 64) if device.type == "cpu" else (32, 256)
    weight = _random(device, torch.float32, width, width, 3, 3)
    for side in (8, 32):
        x = _random(device, torch.float32, batch, width, side, side)
        yield 2.0 * batch * side**2 * width**2 * 9, partial(F.conv2d, x, weight, padding=1)


def _additions(device: torch.device) -> Iterator[Workload]:
    """Additions with a new result each, as in training: the cost of new pages is included."""
    for nbytes in _MEMORY[device.type]:
        if 3 * nbytes < _room(device):
            x = torch.full((nbytes // 4,), 0.5, device=device, dtype=torch.float32)
            yield 3.0 * nbytes, partial(torch.add, x, x.clone())


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random values, because a GPU is faster on constants; not from the user's generator."""
    generator = torch.Generator(device=device).manual_seed(0)
    return torch.rand(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)


def _climb(family: str, dtype: str, tries: Iterator[Workload], clock: ProbeClock, overhead: float) -> Iterator[Rate]:
    """Points of growing work, until the next would take too long."""
    for work, call in tries:
        seconds = clock.seconds(call)
        if seconds > clock.budget / 4:  # large, or disturbed by another process: the better of two
            seconds = min(seconds, clock.seconds(call))
        hidden = clock.device.type == "cuda"  # the launch hides behind the previous call
        rate = work / (seconds - (0.0 if hidden else min(overhead, seconds / 2)))  # launches are charged separately
        yield Rate(family=family, dtype=dtype, work=work, rate=rate)
        if seconds > clock.budget / 4:
            return


class _Count(TorchDispatchMode):
    """Counts ops that make or change something, without views, as in traces."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += not getattr(func, "is_view", False)
        return func(*args, **(kwargs or {}))


def _overhead(clock: ProbeClock) -> float:
    """Seconds to launch one op: a training step on almost no data, over its number of ops; includes autograd and views."""
    x, w = (torch.full((8, 8), 0.1, device=clock.device, dtype=torch.float32) for _ in range(2))
    w.requires_grad_()

    def step() -> None:
        with torch.enable_grad():
            y = x
            for _ in range(16):
                y = y + torch.relu(F.linear(y, w)) * 0.5  # ops that use one thread at this size
            torch.autograd.grad(y.sum(), w)

    with _Count() as count:
        step()
    return float(clock.seconds(step) / count.ops)


# the farther memory


def measure_store(store: Store, clock: ProbeClock) -> tuple[Tier, float]:
    """The store's rates each way, and the share left of them when both ways are busy."""
    by_threads = getattr(store, "by_threads", False)
    nbytes = min(_COPY["queue" if by_threads else clock.device.type], _room(clock.device))
    source = _noise(nbytes, clock.device).untyped_storage()
    little = torch.zeros(1 * KiB, dtype=torch.uint8, device=clock.device).untyped_storage()
    kept = store.put(source)
    target = _noise(nbytes, clock.device) if by_threads else None  # else fresh pages are waited for, not the tier

    def put(what: torch.UntypedStorage = source) -> None:
        ticket = store.put(what)
        store.wait(ticket)
        store.free(ticket)

    def fetch() -> None:
        _ = store.get(kept, clock.device) if target is None else cast("Keeper", store).pull(kept, target)

    def get() -> None:
        fetch()
        store.wait_in(kept)

    def both() -> None:
        ticket = store.put(source)
        fetch()
        store.wait(ticket)
        store.wait_in(kept)
        store.free(ticket)

    latency = clock.seconds(lambda: put(little))
    write = nbytes / (clock.seconds(put) - latency)
    read = nbytes / (clock.seconds(get) - latency)
    tier = Tier(name=store.name, capacity=host_memory(), read=read, write=write, latency=latency)
    if clock.device.type != "cuda" and not by_threads:
        return tier, 1.0  # one processor copies both ways in turn
    return tier, min(1.0, nbytes / clock.seconds(both) / min(read, write))


def _noise(nbytes: int, device: torch.device) -> torch.Tensor:
    """Bytes that a disk cannot compress."""
    tile = (_random(device, torch.float32, MiB) * 256).to(torch.uint8)
    return tile.repeat(-(-nbytes // MiB))[:nbytes].clone()


# the machine


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _capacity(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else host_memory()


def _room(device: torch.device) -> int:
    """Bytes that a measurement may use: an eighth of the free memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 8
    return min(host_memory(), int(psutil.virtual_memory().available)) // 8


def _dtypes_of(table: list[Rate]) -> list[str]:
    return sorted({p.dtype for p in table if p.family == "matmul"})


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
