"""Checkpoint folders that are either complete or absent.

    OUT/latest -> checkpoints/step-000300      a link, replaced atomically
    OUT/checkpoints/step-000200/               complete: `complete.json` names every file and its size
    OUT/checkpoints/step-000300/
    OUT/checkpoints/step-000400.tmp/           being written, or left by a run that was killed; never read

A checkpoint is written under a name ending in `.tmp`, synced to disk, and renamed. If a complete one of that step exists
already, it is first renamed to `.old`, which still counts until the new one is in its place: at no moment does
a kill lose a checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from holdall.errors import HoldallError, InvalidInput
from holdall.types import _json

FORMAT = "holdall-checkpoint-1"
ABOUT, MARKER = "training.json", "complete.json"
_UNFINISHED, _REPLACED, _REMOVED = ".tmp", ".old", ".gone"

log = logging.getLogger("holdall")


@contextmanager
def new_folder(out: Path, step: int) -> Iterator[Path]:
    """An empty folder to write a checkpoint into; it becomes the checkpoint when the block ends without an error."""
    final = folder_of(out, step)
    try:
        with whole_folder(final, step) as partial:
            yield partial
        _point_to(out, final)
    except (OSError, SafetensorError, InvalidInput) as error:
        raise _cannot_save(out, step, error) from error


@contextmanager
def whole_folder(final: Path, step: int) -> Iterator[Path]:
    """An empty folder to write into; it becomes `final` when the block ends without an error."""
    partial = final.with_name(final.name + _UNFINISHED)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        _write_marker(partial, step)
        if final.exists():
            _set_aside(final)
        os.rename(partial, final)
        to_disk(final.parent)
    except (OSError, SafetensorError, HoldallError):
        shutil.rmtree(partial, ignore_errors=True)
        raise


def folder_of(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:06d}"


def latest(out: Path) -> tuple[Path, int] | None:
    """(folder, step) of the complete checkpoint saved last; without a valid link, that of the latest step."""
    complete = complete_folders(out)
    with suppress(OSError):
        pointed = (out / "checkpoints" / Path(os.readlink(out / "latest")).name).resolve()
        for folder, step in complete:
            if folder.resolve() == pointed:
                return folder, step
    return max(complete, key=lambda found: (found[1], found[0].name), default=None)


def incomplete_folders(out: Path) -> list[Path]:
    """Incomplete checkpoint folders, except those that were being removed."""
    complete = {folder for folder, _ in complete_folders(out)}
    every = [path for path in (out / "checkpoints").glob("step-*") if path.is_dir() and _REMOVED not in path.name]
    return sorted(path for path in every if path not in complete)


def complete_folders(out: Path) -> list[tuple[Path, int]]:
    """(folder, step) of the complete checkpoints. One set aside counts only until it is replaced."""
    found = {}
    for marker in (out / "checkpoints").glob(f"step-*/{MARKER}"):
        folder = marker.parent
        step = step_of(folder)
        if step is not None and not folder.name.endswith(_UNFINISHED):
            found[folder] = step
    plain = {folder.name for folder in found}
    return [(f, s) for f, s in found.items() if not (f.name.endswith(_REPLACED) and f.name.removesuffix(_REPLACED) in plain)]


def step_of(folder: Path) -> int | None:
    """The step of a complete folder; None: it is incomplete."""
    try:
        said = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        is_whole = said["format"] == FORMAT and all((folder / n).stat().st_size == s for n, s in said["files"].items())
        return int(said["step"]) if is_whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep_last(out: Path, keep: int, newest: Path) -> None:
    """Remove old checkpoints and leftovers of interrupted runs; failing to remove one is no error."""
    others = sorted((step, folder) for folder, step in complete_folders(out) if folder != newest)
    for _, folder in others[: len(others) - keep + 1] if keep <= len(others) else ():
        remove(folder)
    clear_left_over(out)


def clear_left_over(out: Path) -> None:
    complete = {folder for folder, _ in complete_folders(out)}
    for left in (out / "checkpoints").glob("step-*"):
        if left not in complete and left.name.endswith((_UNFINISHED, _REPLACED)):
            shutil.rmtree(left, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that an interrupted removal leaves none that looks complete."""
    doomed = folder.with_name(f"{folder.name}{_REMOVED}{_UNFINISHED}")
    shutil.rmtree(doomed, ignore_errors=True)
    with suppress(OSError):
        os.rename(folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def to_disk(path: Path) -> None:
    """Wait until a file's or a folder's content is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_marker(folder: Path, step: int) -> None:
    """Sync every file to disk, then write the marker that completes the checkpoint."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        to_disk(path)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    _json.write(folder / MARKER, {"format": FORMAT, "step": step, "files": sizes})
    to_disk(folder)


def _set_aside(final: Path) -> None:
    """Rename the existing checkpoint of the same step, if it is complete."""
    aside = final.with_name(final.name + _REPLACED)
    if step_of(final) is None:
        remove(final)
        return
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(final, aside)


def _point_to(out: Path, folder: Path) -> None:
    """Update the link to the last checkpoint, for users and for runs that return to an earlier step. Nothing depends on it."""
    new = out / f".latest{_UNFINISHED}"
    try:
        new.unlink(missing_ok=True)
        new.symlink_to(folder.relative_to(out), target_is_directory=True)
        os.replace(new, out / "latest")
        to_disk(out)
    except (OSError, NotImplementedError) as error:
        log.debug("holdall: no link to the latest checkpoint: %s", error)


def _cannot_save(out: Path, step: int, error: Exception) -> HoldallError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(getattr(error, "fact", error))
    before = latest(out)
    kept = f"the one of step {before[1]} is intact" if before else "there is none before it"
    hint = "free some space or repair the folder, then run the same command again: it continues from the last checkpoint"
    return HoldallError(f"cannot save the checkpoint of step {step}: {reason.splitlines()[0]}; {kept}", hint=hint)
