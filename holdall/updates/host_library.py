"""C++ sources as shared libraries: compiled on first use by the system's compiler, and cached for the user."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("host_adam.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-pthread")
COMPILERS = ("c++", "g++", "clang++")
_private: list[tempfile.TemporaryDirectory[str]] = []  # libraries outside the cache; deleted with the process


def find_compiler() -> str | None:
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def build(compiler: str, fusion: int) -> Path:
    """Path of the compiled `host_adam.cpp`."""
    return compile_source(SOURCE, compiler, (*FLAGS, f"-DFUSE={fusion}"), depends_on=_cpu())


def compile_source(
    source: Path, compiler: str, flags: Sequence[str], *, depends_on: str, libraries: Sequence[str] = ()
) -> Path:
    """Path of the library, from the user's cache if possible. Its name is a hash of its source, compiler, flags and
    `depends_on`."""
    key = "\0".join((source.read_text(), compiler, *flags, *libraries, depends_on))
    name = f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdall"
    if (folder / name).exists():
        return folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        scratch = tempfile.TemporaryDirectory(dir=folder)
    except OSError:  # the home is not writable: compile for this process alone
        scratch = tempfile.TemporaryDirectory(prefix="holdall-")
        folder = Path(scratch.name)
        _private.append(scratch)
    fresh = Path(scratch.name) / "fresh.so"
    command = [compiler, *flags, "-shared", "-fPIC", str(source), "-o", str(fresh), *libraries]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode != 0:
            complaint = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
            raise RuntimeError(f"{compiler} says: {complaint[0]}")
        os.replace(fresh, folder / name)  # atomic, since other processes may be reading
    finally:
        if scratch not in _private:
            scratch.cleanup()
    return folder / name


def _cpu() -> str:
    """The CPU model and its instruction sets, which `-march=native` depends on."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    telling = ("vendor_id", "model", "flags", "Features", "CPU ")
    return platform.machine() + "".join(line for line in first.splitlines() if line.startswith(telling))
