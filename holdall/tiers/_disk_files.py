"""Files that a store keeps bytes in: reserved before they are written, locked while their process lives, removed with it.

Every file is opened twice where the file system allows: with O_DIRECT, past the system's page cache, and without. The lock is
`flock`'s, which the system gives up when the process ends, however it ends. So a file that can be locked was left behind by a
process that was killed, and the next store in that folder removes it.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from holdall.errors import DiskError, Unsupported
from holdall.types.layout import PAGE
from holdall.units import format_bytes

logger = logging.getLogger("holdall")
_NAME = "holdall-{process}-{token}.tier"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAP_FIXED = 0x10
_said: set[str] = set()  # folders without O_DIRECT, each named once


class DiskFile:
    """A file in a folder. `hint`: what to do about an error."""

    def __init__(self, folder: Path, hint: str) -> None:
        if not all(hasattr(os, name) for name in ("preadv", "pwritev", "posix_fallocate")):
            raise Unsupported("this system has no `preadv` and `posix_fallocate`", hint="use another tier")
        self.folder = folder
        self.length = 0
        self._hint = hint
        try:
            remove_dead(folder)
            self.path, self._plain = _create(folder)
        except OSError as error:
            raise DiskError(f"no file can be made in `{folder}`: {error.strerror}", hint=hint) from error
        self._direct = -1
        try:
            self.grow(PAGE)
            self._direct = _open_directly(self.path)
        except BaseException:
            self.close()
            raise
        self.is_direct = self._direct >= 0
        self.is_coherent = not self.is_direct or _sees_both(self._plain, self._direct)  # what is mapped may be copied directly
        if not self.is_direct and str(folder) not in _said:
            _said.add(str(folder))
            logger.warning("`%s` does not take O_DIRECT: bytes pass through the system's page cache", folder)

    @property
    def descriptor(self) -> int:
        """Of the file as it is seen through the page cache."""
        return self._plain

    def grow(self, length: int) -> None:
        """Reserve so much; a disk without the room refuses here, before anything is written there."""
        more = length - self.length
        if more <= 0:
            return
        try:
            os.posix_fallocate(self._plain, self.length, more)
        except OSError as error:
            if error.errno not in _FULL:
                raise self._failed(f"reserving {format_bytes(more)}", error) from error
            free = format_bytes(shutil.disk_usage(self.folder).free)
            raise DiskError(
                f"the disk of `{self.folder}` cannot take {format_bytes(more)} more: {error.strerror}; {free} are free there",
                hint=self._hint,
            ) from error
        self.length = length

    def write(self, offset: int, view: memoryview, *, direct: bool) -> None:
        what, done = f"writing {format_bytes(len(view))} at {offset}", 0
        try:
            while done < len(view):
                done += os.pwritev(self._direct if direct else self._plain, [view[done:]], offset + done)
        except OSError as error:
            raise self._failed(what, error) from error

    def read(self, offset: int, view: memoryview, *, direct: bool) -> None:
        what, done = f"reading {format_bytes(len(view))} at {offset}", 0
        try:
            while done < len(view):
                found = os.preadv(self._direct if direct else self._plain, [view[done:]], offset + done)
                if not found:
                    raise OSError(errno.EIO, f"the file ends after {format_bytes(done)}")
                done += found
        except OSError as error:
            raise self._failed(what, error) from error

    def corrupt(self, offset: int, nbytes: int) -> DiskError:
        return DiskError(
            f"`{self.path}`: the {format_bytes(nbytes)} at {offset} are not those that were written: their checksum differs",
            hint=self._hint,
        )

    def _failed(self, what: str, error: OSError) -> DiskError:
        return DiskError(f"`{self.path}`: {what} failed: {error.strerror or error}", hint=self._hint)

    def map(self, address: int, nbytes: int, offset: int) -> None:
        """Put a part of the file in the place of memory at this address."""
        ways = mmap.PROT_READ | mmap.PROT_WRITE
        found = _mmap()(address, nbytes, ways, mmap.MAP_SHARED | _MAP_FIXED, self._plain, offset)
        if found != address:
            code = ctypes.get_errno()
            raise self._failed(f"mapping {format_bytes(nbytes)} at {offset}", OSError(code, os.strerror(code)))

    def close(self) -> None:
        """Remove it."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
        for descriptor in (self._direct, self._plain):
            if descriptor >= 0:
                os.close(descriptor)
        self._direct = self._plain = -1
        self.length = 0


@cache
def _mmap() -> Callable[..., int | None]:
    """The C library's, since Python's cannot choose the address."""
    found = ctypes.CDLL(None, use_errno=True).mmap
    found.restype = ctypes.c_void_p
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    return found


def _create(folder: Path) -> tuple[Path, int]:
    """A new file that this process has locked, and its descriptor."""
    while True:
        path = folder / _NAME.format(process=os.getpid(), token=secrets.token_hex(4))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if _lock(descriptor) is not False and os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)  # somebody took it for a dead one's before it was locked


def _lock(descriptor: int) -> bool | None:
    """Whether it could be locked; None: this file system has no locks."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def remove_dead(folder: Path) -> list[Path]:
    """Remove the files of processes that were killed; those of living ones are locked."""
    removed = []
    for path in sorted(folder.glob(_NAME.format(process="*", token="*"))):
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError:  # another user's, or gone
            continue
        try:
            size = os.fstat(descriptor).st_size
            if _lock(descriptor):
                path.unlink(missing_ok=True)
                removed.append(path)
                logger.info("removed `%s`, which a killed process left behind (%s)", path, format_bytes(size))
        finally:
            os.close(descriptor)
    return removed


def _open_directly(path: Path) -> int:
    """A descriptor past the page cache; -1: the file system refuses it, at once or with the first bytes."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return -1
    try:
        descriptor = os.open(path, os.O_RDWR | flag)
    except OSError:
        return -1
    try:
        with mmap.mmap(-1, PAGE) as page:
            os.pwritev(descriptor, [page], 0)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


def _sees_both(plain: int, direct: int) -> bool:
    """Does a mapping see what is written past the page cache, and the other way round? Some file systems do not promise it."""
    try:
        with mmap.mmap(-1, PAGE) as page, mmap.mmap(plain, PAGE) as mapped:
            for value in (1, 2):
                page[:] = bytes([value]) * PAGE
                os.pwritev(direct, [page], 0)
                if mapped[:] != page[:]:
                    return False
                mapped[:] = bytes([value + 2]) * PAGE
                os.preadv(direct, [page], 0)
                if page[:] != mapped[:]:
                    return False
    except OSError:
        return False
    return True


def free_bytes(folders: list[Path]) -> int:
    """What files in these folders, filled alike, could hold."""
    here = [os.stat(folder).st_dev for folder in folders]
    each = [shutil.disk_usage(folder).free // here.count(device) for folder, device in zip(folders, here, strict=True)]
    return min(each) * len(folders)
