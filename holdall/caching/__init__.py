"""A disk cache of measurements, traces and plans: a second `fit` of the same model reuses them.

One folder (`HOLDALL_CACHE`, else `holdall` in the user's cache folder), in it one folder per kind, in that one file per entry,
named by a digest of everything that the entry depends on. An entry has two lines: its description, with a digest of the second;
and the value as JSON, so that only data is ever read. Files are written whole or not at all. An entry that cannot be read or
written counts as missing: the cache never raises.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from holdall.errors import HoldallError
from holdall.types import _json
from holdall.units import MiB

FORMAT = "holdall-cache-1"
MOST = 512 * MiB  # limit on the bytes of all entries; the least recently used are removed first
KINDS = ("probe", "ops", "trace", "plan")
_OFF = ("off", "0", "no", "false")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file of the cache."""

    kind: str
    path: Path
    nbytes: int
    used: float  # when it was last read or written, in seconds since the epoch


@dataclass(frozen=True, slots=True)
class Cache:
    """`folder`: None for a cache that stores nothing."""

    folder: Path | None
    most: int = MOST

    def get(self, kind: str, key: str) -> Any:
        """The value of an entry; None: there is none, or it cannot be read."""
        if self.folder is None:
            return None
        path = self._path(kind, key)
        try:
            head, _, body = path.read_bytes().partition(b"\n")
            said = json.loads(head)
            if said["format"] != FORMAT or said["key"] != key or said["digest"] != _digest(body):
                raise ValueError("the entry differs from what was written")
            value = json.loads(body)
        except OSError:
            return None
        except (ValueError, KeyError, TypeError):  # truncated, changed, or of another version
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)
        return value

    def put(self, kind: str, key: str, value: Any) -> None:
        if self.folder is None:
            return
        body = json.dumps(value, separators=(",", ":"))
        head = json.dumps({"format": FORMAT, "key": key, "digest": _digest(body.encode())})
        path = self._path(kind, key)
        with suppress(OSError, HoldallError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _json.write_text(path, f"{head}\n{body}")
            self._make_room(path)

    def entries(self) -> list[Entry]:
        """All entries, the most recently used first."""
        return sorted(self._files(), key=lambda e: -e.used)

    def clear(self) -> int:
        """Remove every entry; returns their number."""
        removed = 0
        for entry in self._files():
            with suppress(OSError):
                entry.path.unlink()
                removed += 1
        return removed

    def _path(self, kind: str, key: str) -> Path:
        assert self.folder is not None and kind in KINDS
        return self.folder / kind / f"{key}.json"

    def _files(self) -> Iterator[Entry]:
        for kind in KINDS if self.folder is not None else ():
            assert self.folder is not None
            with suppress(OSError):
                for file in os.scandir(self.folder / kind):
                    with suppress(OSError):  # another process has removed it
                        there = file.stat()
                        if file.is_file() and file.name.endswith(".json"):
                            yield Entry(kind=kind, path=Path(file.path), nbytes=there.st_size, used=there.st_mtime)

    def _make_room(self, new: Path) -> None:
        entries = self.entries()
        total = sum(e.nbytes for e in entries)
        for entry in reversed(entries):
            if total <= self.most:
                break
            if entry.path != new:
                with suppress(OSError):
                    entry.path.unlink()
                    total -= entry.nbytes


def cache_folder() -> Path | None:
    """The folder of the entries; None: `HOLDALL_CACHE=off`."""
    given = os.environ.get("HOLDALL_CACHE", "")
    if given.lower() in _OFF:
        return None
    if given:
        return Path(given).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(shared) if shared else Path.home() / ".cache") / "holdall"
    except RuntimeError:  # a user without a home
        return None


def open_cache() -> Cache:
    """The cache that the environment variable names now."""
    return Cache(cache_folder())


def key_of(*parts: Any) -> str:
    """A digest of plain data, of this package's version and of its current code."""
    text = json.dumps([own_code(), *parts], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@cache
def own_code() -> str:
    """A digest of this package's code: results of another version may be wrong in this one."""
    digest = hashlib.blake2b(digest_size=16)
    root = Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        with suppress(OSError):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def age(entry: Entry) -> float:
    """Seconds since an entry was last used."""
    return max(0.0, time.time() - entry.used)


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()
