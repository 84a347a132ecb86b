"""`holdall cache`: list or clear the measurements, traces and plans that earlier processes stored on disk."""

from __future__ import annotations

from typing import Annotated

import typer

from holdall.caching import KINDS, age, open_cache
from holdall.cli import _options as given
from holdall.cli._console import add_row, grid, say, show, show_json
from holdall.errors import unknown_name
from holdall.units import format_bytes, format_seconds

_WHAT = {"probe": "machines measured", "ops": "ops timed", "trace": "steps traced", "plan": "plans"}


def cache(
    action: Annotated[str, typer.Argument(metavar="[clear]", help="Remove all of it.", show_default=False)] = "",
    *,
    json: given.Json = False,
) -> None:
    """List or clear the measurements, traces and plans that `fit` caches; HOLDALL_CACHE names the folder, or is `off`.

    Example: holdall cache clear
    """
    if action not in ("", "clear"):
        raise unknown_name("action", action, ("clear",))
    kept = open_cache()
    entries = kept.entries()
    removed = kept.clear() if action == "clear" else 0
    if json:
        files = [{"kind": e.kind, "file": str(e.path), "bytes": e.nbytes, "unused_seconds": age(e)} for e in entries]
        folder = str(kept.folder) if kept.folder is not None else None
        show_json({"folder": folder, "most": kept.most, "removed": removed, "entries": [] if action else files})
        return
    if kept.folder is None:
        say("the cache is switched off: HOLDALL_CACHE=off")
        return
    if action == "clear":
        say(f"removed {removed} files, {format_bytes(sum(e.nbytes for e in entries))}, from {kept.folder}")
        return
    table = grid("kept", "files", "size", "last used")
    for kind in KINDS:
        mine = [e for e in entries if e.kind == kind]
        used = f"{format_seconds(min(age(e) for e in mine))} ago" if mine else "--"
        add_row(table, _WHAT[kind], len(mine), format_bytes(sum(e.nbytes for e in mine)), used)
    show(table)
    say(f"\nin {kept.folder}, at most {format_bytes(kept.most)}")
