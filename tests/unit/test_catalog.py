"""The catalogue names every system once, and claims only what is there."""

import ast
from pathlib import Path

import pytest

from holdall.catalog import claims, orderings, state, system, systems
from holdall.errors import InvalidInput
from holdall.registry import member_names

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


@pytest.mark.parametrize("entry", [s for s in systems() if s.lives], ids=lambda s: s.id)
def test_what_a_paper_says_is_asserted_by_a_test_or_said_to_be_missing(entry):
    """Every claim names a function that exists, in a file that the entry names; what is missing has one line."""
    said = claims(entry.id)
    assert said
    assert len({c.says for c in said}) == len(said)
    for check in said:
        path, _, name = check.test.partition("::")
        tests = {n.name for n in ast.parse((ROOT / path).read_text(encoding="utf-8")).body if isinstance(n, ast.FunctionDef)}
        assert name in tests, check.test
    assert {c.test.partition("::")[0] for c in said} & set(entry.proven)
    assert all(line and "\n" not in line and line[-1] != "." for line in entry.missing)


def test_the_state_is_where_a_system_lives_or_not_yet():
    assert state(system("chen")) == "holdall/planners/chen.py"
    assert state(system("tmo")).startswith("holdall/pipelines/swapping/tmo.py")
    assert "holdall/parallel/context.py (partial: heads and context at once" in state(system("loongtrain"))
    assert {s.id for s in systems() if s.is_partial} >= {"loongtrain", "megatron-tp", "megtaichi"}


def test_an_unknown_system_answers_with_the_nearest():
    with pytest.raises(InvalidInput, match=r"unknown system `checkmat`\n.*did you mean `checkmate`"):
        system("checkmat")


def test_published_orders_are_between_planners_that_exist():
    pairs = [(o.faster, o.slower) for o in orderings()]
    assert len(set(pairs)) == len(pairs) >= 10
    assert {name for pair in pairs for name in pair} <= set(member_names("planners"))
    assert not {(slow, fast) for fast, slow in pairs} & set(pairs)
    assert all(o.factor is None or o.factor > 1 for o in orderings())
