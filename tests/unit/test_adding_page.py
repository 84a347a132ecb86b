"""The page about members of one's own names calls that exist."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "adding.md").read_text()
CALLS = re.findall(r"^\| `(\w+)` \| `(\w+)\.of\((.*?)\)`", PAGE, re.MULTILINE)


def test_the_table_is_found():
    assert len(CALLS) >= 5


@pytest.mark.parametrize(("action", "kind", "arguments"), CALLS, ids=[action for action, *_ in CALLS])
def test_an_action_is_made_as_the_page_says(action, kind, arguments):
    made_by = getattr(import_module(f"holdall.actions.{action}"), kind).of
    call = eval(f"bind({arguments})", {"bind": lambda *a, **k: (a, k)} | dict.fromkeys(re.findall(r"\b[a-z]+\b", arguments)))
    inspect.signature(made_by).bind(*call[0], **call[1])
