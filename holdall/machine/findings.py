"""The checks of `holdall doctor`. A finding states a fact; one that is not ok also says what to do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import torch

from holdall.host_memory import host_memory
from holdall.machine.more_tiers import tier_names
from holdall.units import GiB, MiB, format_bytes, format_rate

OLDEST_TORCH = (2, 11)
EXTRAS = {"hf": ("transformers", "accelerate"), "solvers": ("scipy", "ortools"), "viz": ("matplotlib",)}
_NEEDED_FOR = {"hf": "models by name", "solvers": "planners that solve an integer program", "viz": "`compare --plot`"}
_SLOW_LINK = 8e9  # bytes/s: eight lanes of PCIe 3; a card in a full slot is faster


@dataclass(frozen=True, kw_only=True)
class Finding:
    what: str
    found: str
    ok: bool = True
    advice: str = ""


def examine() -> list[Finding]:
    """Every finding about this machine, in the order in which they matter."""
    found = [_torch(), _threads(), _host(), *_devices(), _tiers(), *_environment()]
    return [*found, *(_extra(name, packages) for name, packages in EXTRAS.items())]


def _torch() -> Finding:
    version = torch.__version__
    old = tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < OLDEST_TORCH
    advice = f"install torch {'.'.join(map(str, OLDEST_TORCH))} or newer" if old else ""
    return Finding(what="torch", found=f"{version} on Python {platform.python_version()}", ok=not old, advice=advice)


def _threads() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    found = f"{threads} threads on {usable} usable cores"
    crowded = threads > usable
    return Finding(what="processor", found=found, ok=not crowded, advice=f"export OMP_NUM_THREADS={usable}" if crowded else "")


def _host() -> Finding:
    limit, memory = host_memory(), psutil.virtual_memory()
    free = min(limit, memory.available)
    found = f"{format_bytes(limit)} of RAM, {format_bytes(free)} free"
    if limit < memory.total:
        found += f"; a control group allows no more, the machine has {format_bytes(memory.total)}"
    short = free < 2 * GiB
    return Finding(
        what="host memory",
        found=found,
        ok=not short,
        advice="stop other programs, or raise the container's memory limit, before offloading" if short else "",
    )


def _tiers() -> Finding:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = tier_names(device)
    return Finding(what="tiers", found=f"{', '.join(names)}: where bytes can leave to, up to `--budget {names[-1]}=SIZE`")


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        what = "runs use the CPU; a plan for any GPU needs none: `holdall plan MODEL --gpu rtx-4090`"
        yield Finding(what="GPU", found=f"none that torch sees; {what}")
        return
    name, (free, total) = torch.cuda.get_device_name(), torch.cuda.mem_get_info()
    taken = total - free > total // 10
    yield Finding(
        what="GPU",
        found=f"{name}, {format_bytes(free)} free of {format_bytes(total)}",
        ok=not taken,
        advice="another process holds part of it: stop it, or plan for what is free" if taken else "",
    )
    yield _link()


def _link() -> Finding:
    """The rate of pinned copies to the GPU, on which offloading depends."""
    size = 256 * MiB
    try:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        return Finding(what="pinned memory", found=f"refused: {reason}", ok=False, advice="raise the host memory limit")
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    best = 0.0
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, size / (time.perf_counter() - began))
    slow = best < _SLOW_LINK
    return Finding(
        what="link to the GPU",
        found=f"{format_rate(best, 'B')} from pinned memory",
        ok=not slow,
        advice='offloading will be slow: move the card to a slot with more lanes, or use allow={"recompute"}' if slow else "",
    )


def _environment() -> Iterator[Finding]:
    """Settings of torch that affect predictions."""
    name = next((n for n in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if os.environ.get(n)), "")
    value = os.environ.get(name, "")
    found = f"{name}={value}" if value else "default settings; a plan turns expandable segments on while it is applied"
    yield Finding(what="allocator", found=found, ok=not value, advice=_about_allocator(name, value) if value else "")
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        what = "PYTORCH_NO_CUDA_MEMORY_CACHING"
        yield Finding(what="caching", found=f"{what} is set", ok=False, advice=f"unset {what}: every step becomes slow")
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        advice = "unset it: it keeps copies from overlapping computation"
        yield Finding(what="launches", found="CUDA_LAUNCH_BLOCKING is set", ok=False, advice=advice)


def _about_allocator(name: str, value: str) -> str:
    """Advice on the allocator's settings: plans for a GPU assume expandable segments, and user settings are not changed."""
    settings = dict(part.strip().partition(":")[::2] for part in value.split(","))
    expandable = settings.get("expandable_segments", "").lower()
    if expandable == "true" and len(settings) == 1:
        return f"not needed: a plan turns them on while it is applied; unset {name} unless plain runs need it"
    if expandable == "false":
        return f"unset {name}: plans assume expandable segments; without them more is reserved than predicted"
    return f"unset {name}, or keep only expandable_segments:True: reserved memory is predicted for that setting alone"


def _extra(name: str, packages: tuple[str, ...]) -> Finding:
    versions, missing = [], []
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if not missing:
        return Finding(what=f"extra {name}", found=", ".join(versions))
    advice = f'for {_NEEDED_FOR[name]}: pip install "holdall[{name}]"'
    return Finding(what=f"extra {name}", found=f"{', '.join(missing)} not installed", ok=False, advice=advice)
