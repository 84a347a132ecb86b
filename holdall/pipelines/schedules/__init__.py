"""Published pipeline schedules, a file each, found by name: `pipeline("zb_h1", ranks=4, micro_batches=8)`.

A member is a dataclass whose fields are its options and whose call makes the lists. `tests/unit/test_pipeline_schedules.py`
checks them all.
"""

from __future__ import annotations

from typing import Any

from holdall.errors import InvalidInput
from holdall.pipelines.pipeline import Pipeline, PipeSchedule
from holdall.registry import build_member, load_member, member_names, read_choice

FOLDER = "pipelines/schedules"
ALIASES = {
    "1f1b": "one_f_one_b",
    "pipedream_flush": "one_f_one_b",
    "interleaved_1f1b": "interleaved",
    "2bw": "pipedream_2bw",
    "looped_bfs": "breadth_first",
    "dualpipev": "dualpipe_v",
    "zbv": "zb_v",
}


def schedule_names() -> tuple[str, ...]:
    return member_names(FOLDER)


def schedule(name: str, **options: Any) -> PipeSchedule:
    """The schedule of this name, with options as keywords or in the name: "interleaved:chunks=3"."""
    short, typed = read_choice(name)
    member = ALIASES.get(short.lower().replace("-", "_"), short.lower().replace("-", "_"))
    if member not in schedule_names():
        load_member(FOLDER, short)  # raises, and names what is near
    made: PipeSchedule = build_member(FOLDER, member, {**typed, **options}, f"schedule {name}")
    return made


def pipeline(name: str, *, ranks: int, micro_batches: int, **options: Any) -> Pipeline:
    """The lists of a schedule for so many ranks and micro-batches."""
    for what, value in (("ranks", ranks), ("micro_batches", micro_batches)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidInput(f"`{what}` is {value!r}, not a number of at least 1", hint=f"use {what}=4")
    return schedule(name, **options)(ranks, micro_batches)
