"""How much RAM this process may use, and how much of it is free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import psutil


def host_memory(*, root: Path = Path("/")) -> int:
    """Bytes of RAM this process may use: the machine's, or a control group's limit."""
    return min([int(psutil.virtual_memory().total), *_cgroup_limits(root)])


def free_memory() -> int:
    """Bytes of RAM that this process may still take: the machine's, or what is left of a control group's limit."""
    mine = psutil.Process().memory_info()
    left = host_memory() - (mine.rss - getattr(mine, "shared", 0))  # pages of files go when others need them
    return int(max(0, min(psutil.virtual_memory().available, left)))


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Limits of this process's control groups and their parents, in both versions of the interface."""
    mounted = root / "sys" / "fs" / "cgroup"
    try:
        lines = (root / "proc" / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = ["0::/", "1:memory:/"]  # the files at the top still apply
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            places = [(mounted, "memory.max"), (mounted / "unified", "memory.max")]
        elif "memory" in controllers.split(","):
            places = [(mounted / "memory", "memory.limit_in_bytes")]
        else:
            continue
        # Inside a container the path may be the host's, which is not visible; its parents are.
        group = PurePosixPath(os.path.normpath(path.lstrip("/") or "."))
        for folder in (group, *group.parents):
            for mount, file in places:
                with suppress(OSError, ValueError):  # missing, or "max"
                    yield int((mount / folder / file).read_text(encoding="utf-8"))
