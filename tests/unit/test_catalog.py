"""The catalogue names every system once, and claims only what is there."""

from pathlib import Path

import pytest

from holdall.catalog import state, system, systems
from holdall.errors import InvalidInput

ROOT = Path(__file__).parents[2]
FAMILIES = {"recompute", "swap", "states", "shard", "parallel", "shrink", "layout"}


def test_all_published_systems_are_listed_once():
    assert len(systems()) >= 88
    assert len({s.id for s in systems()}) == len({s.name for s in systems()}) == len(systems())


@pytest.mark.parametrize("entry", systems(), ids=lambda s: s.id)
def test_every_entry_is_complete(entry):
    assert entry.id == entry.id.lower() and set(entry.id) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert entry.source and 2010 <= entry.year <= 2026
    assert entry.families and set(entry.families) <= FAMILIES
    assert entry.idea.endswith(".") and ". " not in entry.idea  # one sentence


@pytest.mark.parametrize("entry", [s for s in systems() if s.lives or s.proven], ids=lambda s: s.id)
def test_what_is_claimed_exists_and_is_proven(entry):
    assert entry.lives and entry.proven
    missing = [path for path in (*entry.lives, *entry.proven) if not (ROOT / path).is_file()]
    assert not missing


def test_the_state_is_where_a_system_lives_or_not_yet():
    assert state(system("chen")) == "holdall/planners/chen.py"
    assert state(system("vdnn")) == "not yet"


def test_an_unknown_system_answers_with_the_nearest():
    with pytest.raises(InvalidInput, match=r"unknown system `checkmat`\n.*did you mean `checkmate`"):
        system("checkmat")
