"""Folders of checkpoints that are whole or not there.

    OUT/latest -> checkpoints/step-000300      a link, replaced in one go
    OUT/checkpoints/step-000200/               complete: `complete.json` names every file and its size
    OUT/checkpoints/step-000300/
    OUT/checkpoints/step-000400.tmp/           being written, or left by a run that was killed; never read

A checkpoint is written under a name ending in `.tmp`, brought to the disk, and renamed. Where a complete one of that step is
there already, it is first renamed to `.old`, which still counts until the new one is in its place: there is no moment at which
a kill loses what was saved.
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
MARKER = "complete.json"
_UNFINISHED, _REPLACED, _REMOVED = ".tmp", ".old", ".gone"

log = logging.getLogger("holdall")


@contextmanager
def new_folder(out: Path, step: int) -> Iterator[Path]:
    """An empty folder to write the checkpoint of a step into; it takes its place when the block is left without an error."""
    final = folder_of(out, step)
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
        _point_to(out, final)
    except (OSError, SafetensorError, InvalidInput) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise _cannot_save(out, step, error) from error
    except HoldallError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def folder_of(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:06d}"


def latest(out: Path) -> tuple[Path, int] | None:
    """(folder, step) of the complete checkpoint that was saved last; where the link says nothing, that of the latest step."""
    complete = complete_folders(out)
    with suppress(OSError):
        pointed = (out / "checkpoints" / Path(os.readlink(out / "latest")).name).resolve()
        for folder, step in complete:
            if folder.resolve() == pointed:
                return folder, step
    return max(complete, key=lambda found: (found[1], found[0].name), default=None)


def incomplete_folders(out: Path) -> list[Path]:
    """What looks like a checkpoint and is none; what was being removed is not worth telling."""
    complete = {folder for folder, _ in complete_folders(out)}
    every = [path for path in (out / "checkpoints").glob("step-*") if path.is_dir() and _REMOVED not in path.name]
    return sorted(path for path in every if path not in complete)


def complete_folders(out: Path) -> list[tuple[Path, int]]:
    """(folder, step) of those that are whole. One that was set aside counts only while nothing has taken its place."""
    found = {}
    for marker in (out / "checkpoints").glob(f"step-*/{MARKER}"):
        folder = marker.parent
        step = step_of(folder)
        if step is not None and not folder.name.endswith(_UNFINISHED):
            found[folder] = step
    plain = {folder.name for folder in found}
    return [(f, s) for f, s in found.items() if not (f.name.endswith(_REPLACED) and f.name.removesuffix(_REPLACED) in plain)]


def step_of(folder: Path) -> int | None:
    """The step of a folder that is whole; None: it is not."""
    try:
        said = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        is_whole = said["format"] == FORMAT and all((folder / n).stat().st_size == s for n, s in said["files"].items())
        return int(said["step"]) if is_whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep_last(out: Path, keep: int, newest: Path) -> None:
    """Old checkpoints go, and what interrupted runs left; that they could not be removed is no reason to stop."""
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
    """Renamed first, so that a removal that is interrupted does not leave a checkpoint that looks complete."""
    doomed = folder.with_name(f"{folder.name}{_REMOVED}{_UNFINISHED}")
    shutil.rmtree(doomed, ignore_errors=True)
    with suppress(OSError):
        os.rename(folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def to_disk(path: Path) -> None:
    """Return when a file's or a folder's content has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_marker(folder: Path, step: int) -> None:
    """Bring every file to the disk, then say that they are all there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        to_disk(path)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    _json.write(folder / MARKER, {"format": FORMAT, "step": step, "files": sizes})
    to_disk(folder)


def _set_aside(final: Path) -> None:
    """Make way for a new checkpoint of the same step. Only a whole one is worth keeping until then."""
    aside = final.with_name(final.name + _REPLACED)
    if step_of(final) is None:
        remove(final)
        return
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(final, aside)


def _point_to(out: Path, folder: Path) -> None:
    """For people, and for whoever goes back to an earlier step: a link to what was saved last. Nothing depends on it."""
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
    hint = "free some space or mend the folder, then run the same command again: it goes on from the last checkpoint"
    return HoldallError(f"cannot save the checkpoint of step {step}: {reason.splitlines()[0]}; {kept}", hint=hint)
