"""`holdall doctor`: checks of this machine. Each line is a finding, and a warning says what to change."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Group
from rich.padding import Padding

from holdall.cli import _options as given
from holdall.cli._console import add_row, cell, grid, say, show, show_json


def doctor(*, json: given.Json = False) -> None:
    """Check versions, devices, memory and pinning limits, link speed, allocator settings, disk and extras; say what to change.

    Example: holdall doctor
    """
    from holdall.machine.findings import examine
    from holdall.machine.limits import limits

    found = [*examine(), *limits()]
    if json:
        show_json([asdict(finding) for finding in found])
        return
    table = grid("", "", "", left=3)
    advice = []
    for finding in found:
        mark = cell("ok", "green") if finding.ok else cell("warn", "yellow")
        add_row(table, mark, finding.what, finding.found)
        if not finding.ok:
            advice.append(Padding(cell(f"{finding.what}: {finding.advice}"), (0, 0, 0, 2)))
    show(table)
    if advice:
        say("\nto change:")
        show(Group(*advice))
