"""What the user should know of a run."""

from __future__ import annotations

import logging

log = logging.getLogger("holdall")


class Notes:
    """What the user should know: said once, kept for the report. Knows no harness, so that no cycle holds the model."""

    def __init__(self, kept: list[str]) -> None:
        self._kept = kept

    def __call__(self, message: str, *, kind: str = "") -> None:
        """`kind`: how messages begin of which one is enough."""
        if message not in self._kept and not (kind and any(kept.startswith(kind) for kept in self._kept)):
            self._kept.append(message)
            log.warning("holdall: %s", message)
