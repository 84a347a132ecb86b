"""Notes to the user about a run."""

from __future__ import annotations

import logging

log = logging.getLogger("holdall")


class Notes:
    """Shows each note once and keeps it for the report. Does not refer to the harness, so no cycle keeps the model alive."""

    def __init__(self, kept: list[str]) -> None:
        self._kept = kept

    def __call__(self, message: str, *, kind: str = "") -> None:
        """Show a note. `kind`: show only one message that begins like this."""
        if message not in self._kept and not (kind and any(kept.startswith(kind) for kept in self._kept)):
            self._kept.append(message)
            log.warning("holdall: %s", message)
