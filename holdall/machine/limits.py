"""Limits of this machine: pinned and shared memory, disk, copies, a compiler. The rest of `holdall doctor`."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from holdall.host_memory import host_memory
from holdall.machine.findings import Finding
from holdall.units import GiB, MiB, format_bytes, format_rate
from holdall.updates.host_library import find_compiler

_LITTLE_DISK = 20 * GiB  # a checkpoint of 1e9 parameters with AdamW's states takes 11 GiB, and two exist at a time
_LITTLE_SHARED = GiB
_OPTIONAL = {
    "torchao": "float8 and low-bit states",
    "bitsandbytes": "paged 8-bit optimizers",
    "peft": "LoRA",
    "lightning": "its Trainer and Fabric",
    "datasets": "data",
}


def limits(folder: Path = Path()) -> Iterator[Finding]:
    """The limits; `folder`: where checkpoints would be written."""
    yield _pinning()
    yield from _shared()
    yield _disk(folder)
    if not torch.cuda.is_available():
        yield _copies()
    yield _compiler()
    yield _optional()


def _pinning() -> Finding:
    """Some systems refuse to pin memory beyond these limits, and offloading falls back to slow copies."""
    limit, memory = _locked_limit(), host_memory()
    wsl = "microsoft" in platform.release().lower()
    found = "no limit on locked memory" if limit is None else f"{format_bytes(limit)} of locked memory allowed (ulimit -l)"
    found += ", under WSL, which pins no more than about half of the memory" if wsl else ""
    matters = torch.cuda.is_available() and limit is not None and limit < memory // 2
    advice = "run `ulimit -l unlimited` before starting (docker: `--ulimit memlock=-1`), if pinning fails" if matters else ""
    return Finding(what="pinning", found=found, ok=not matters, advice=advice)


def _locked_limit() -> int | None:
    """Bytes that a process may lock; None: no limit, or unknown on this system."""
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _shared() -> Iterator[Finding]:
    """Shared memory, through which data loader workers pass batches."""
    path = Path("/dev/shm")
    if path.is_dir():
        total = shutil.disk_usage(path).total
        short = total < _LITTLE_SHARED
        advice = "data loader workers need more: docker's `--shm-size 8g`, or `num_workers=0`" if short else ""
        yield Finding(what="shared memory", found=format_bytes(total), ok=not short, advice=advice)


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    short = free < _LITTLE_DISK
    advice = "low for checkpoints, which take about 11 GiB per billion parameters with AdamW: free some, or use another --out"
    return Finding(what="disk", found=f"{format_bytes(free)} free here", ok=not short, advice=advice if short else "")


def _copies() -> Finding:
    """The copy rate of host memory, if there is no link to measure."""
    source = torch.ones(32 * MiB, dtype=torch.uint8)
    target = torch.zeros_like(source)
    best = 0.0
    for _ in range(3):
        began = time.perf_counter()
        target.copy_(source)
        best = max(best, source.nbytes / (time.perf_counter() - began))
    return Finding(what="copies", found=f"{format_rate(best, 'B')} in host memory; there is no link to a GPU to measure")


def _compiler() -> Finding:
    found = find_compiler()
    advice = "updates on the host are slower without the compiled kernel: install g++ or clang"
    return Finding(what="compiler", found=found or "none", ok=found is not None, advice="" if found else advice)


def _optional() -> Finding:
    """Optional packages that some features use."""
    have, lack = [], []
    for name, use in _OPTIONAL.items():
        try:
            have.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lack.append(f"without {name} ({use}: pip install {name})")
    return Finding(what="optional", found=", ".join([*have, *lack]))
