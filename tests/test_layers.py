"""Who may import whom: the imports of the package against the table of docs/architecture.md, and that table by itself."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "holdall"
TABLE = (ROOT.parent / "docs" / "architecture.md").read_text().split("## Who may import whom")[1]


def read_table():
    """(part -> what it may import besides the first row, the first row, parts that may import anything)"""
    rows = [line.strip("|").split("|") for line in TABLE.splitlines() if line.startswith("| `")]
    allowed, free = {}, {"__init__", "__main__"}
    for parts, may in rows:
        names = set(re.findall(r"`(\w+)`", parts))
        if may.strip() == "anything":
            free |= names
            continue
        named = set(re.findall(r"`(\w+)`", may.split(";")[0])) | ({"torch"} if "torch" in may else set())
        allowed |= dict.fromkeys(names, named)
    first = set(re.findall(r"`(\w+)`", rows[0][0]))
    return allowed, first, free


ALLOWED, BASE, ANYTHING = read_table()


def imports_of(path):
    """Names of the package's parts, and torch, that a file imports, wherever in the file it does so."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "holdall" else [node.module]
        for name in names:
            parts = name.split(".")
            if parts[0] == "holdall" and len(parts) > 1:
                found.add(parts[1])
            elif parts[0] == "torch":
                found.add("torch")
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_only_what_its_folder_may(path):
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if part in ANYTHING:
        return
    assert part in ALLOWED, f"`{part}` is not in the table of docs/architecture.md"
    wrong = imports_of(path) - ALLOWED[part] - BASE - {part}
    assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_the_table_names_parts_that_exist():
    there = {p.name.removesuffix(".py") for p in ROOT.iterdir()}
    assert set(ALLOWED) | ANYTHING <= there


def test_no_two_parts_import_each_other():
    """By the table, so that no cycle can come about; parts that may import anything are above all of these."""
    below = {part: set(may) - {"torch"} for part, may in ALLOWED.items() if part not in BASE}
    while below:
        free = [part for part, may in below.items() if not may & below.keys()]
        assert free, f"these import each other in a circle: {sorted(below)}"
        for part in free:
            del below[part]
