"""What a rank says when another is lost inside a step: one line, at once if the other is dead, else after the group's timeout.

A rank that dies closes its connections, which those that wait for it see; they end, and so do those that wait for them. A rank
that hangs is given up after the timeout of the process group.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from holdall.parallel.agree import lost_ranks

_TALK = re.compile(r"gloo|Connection (closed|reset)|Timed out|Broken pipe|ProcessGroup", re.IGNORECASE)
_schedules = logging.getLogger("torch.distributed.pipelining.schedules")


@contextmanager
def ends_with_the_others(group: Any) -> Iterator[None]:
    """Around what ranks do together. An error of the connection to another becomes one line; others pass as they are."""
    began, level = time.monotonic(), _schedules.level
    _schedules.setLevel(logging.CRITICAL)  # else torch prints the lists of all ranks
    try:
        yield
    except RuntimeError as error:
        found = _of_a_connection(error)
        if found is None:
            raise
        raise lost_ranks(found, time.monotonic() - began, group, " of the pipeline inside a step") from None
    finally:
        _schedules.setLevel(level)


def _of_a_connection(error: BaseException | None) -> BaseException | None:
    """The error of a message or collective among the causes of an error; None: there is none."""
    while error is not None:
        if isinstance(error, dist.DistError) or (type(error) is RuntimeError and _TALK.search(str(error))):
            return error
        error = error.__cause__ or error.__context__
    return None
