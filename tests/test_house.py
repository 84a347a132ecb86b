"""Rules that keep the tree one that a stranger can live in. What breaks one today is named, and may only shrink."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from holdall.registry import member_names

ROOT = Path(__file__).parent.parent / "holdall"
FILES = sorted(ROOT.rglob("*.py"))
MEMBERS = {
    "actions",
    "planners",
    "tiers",
    "optim",
    "precision",
    "cli",
    "planning",
    "pipelines/schedules",
    "testing/families",
}  # folders whose files are members
LONG = {"harness.py": 510, "states/engine.py": 540, "tracing/recorder.py": 480}
CROWDED = {"tracing": 17}
LINES, ENTRIES = 400, 15
TWICE = 2  # names of classes that are used more than once


@cache
def nodes_of(path):
    """Of a file's tree: read once for all rules."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def lines(path):
    return len(path.read_text().splitlines())


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_has_one_idea(path):
    allowed = next((most for name, most in LONG.items() if str(path).endswith(name)), LINES)
    assert lines(path) <= allowed


def test_long_files_are_named_only_while_they_are_long():
    for name in LONG:
        (path,) = [p for p in FILES if str(p).endswith(name)]
        assert lines(path) > LINES, f"{name} is short enough now: take it off the list"


FOLDERS = sorted({p.parent for p in FILES} - {ROOT})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_folder_can_be_looked_over(folder):
    name = str(folder.relative_to(ROOT))
    if name in MEMBERS:
        return
    entries = [p for p in folder.iterdir() if p.name not in ("__pycache__", "__init__.py")]
    assert len(entries) <= CROWDED.get(name, ENTRIES)


def test_names_of_classes_say_which_is_meant():
    names = Counter(
        node.name
        for path in FILES
        for node in nodes_of(path)[0].body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and "testing" not in path.parts
    )
    twice = sorted(name for name, count in names.items() if count > 1)
    assert len(twice) <= TWICE, twice


WIDE = {"Engine": 45, "Harness": 44, "PlacedUnit": 33, "EvictionPool": 31, "Recorder": 26, "PlanBook": 27}
METHODS = 25


def test_no_class_owns_everything():
    found = {
        node.name: sum(isinstance(part, ast.FunctionDef) for part in node.body)
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
    }
    assert {name: count for name, count in found.items() if count > WIDE.get(name, METHODS)} == {}
    assert all(found[name] > METHODS for name in WIDE), "a class is small enough now: take it off the list"


BESIDE_MEMBERS = {"_json", "_keepers", "_chaos", "_buffers", "_extents", "_staged", "_errors", "_math", "_in_backward", "_page"}
"""Files with an underscore because all others of their folder are members, and the form in which types are saved."""


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_private_name_stays_in_its_folder(path):
    for node in nodes_of(path):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("holdall"):
            continue
        owner = ROOT.parent.joinpath(*node.module.split("."))
        folder = owner if owner.is_dir() else owner.parent
        private = {name for name in (*node.module.split("."), *(a.name for a in node.names)) if name.startswith("_")}
        assert folder in (path.parent, *path.parents) or private <= BESIDE_MEMBERS, f"{path.name} imports {sorted(private)}"


def test_the_tree_speaks_of_the_project_alone():
    """No absolute paths, no hosts."""
    for path in FILES:
        assert not re.search(
            r"[\"'](/home/|/root/|/Users/|https?://(?!arxiv|github|pytorch|docs|huggingface))", path.read_text()
        ), path


def test_cases_that_enter_through_fit_are_never_sampled():
    tests = Path(__file__).parent
    text = (tests / "conftest.py").read_text()
    listed = {t.targets[0].id: ast.literal_eval(t.value) for t in ast.parse(text).body if is_list_of(t, ("SAMPLED", "RARE"))}
    for pattern in (*listed["SAMPLED"], *listed["RARE"]):
        file, _, name = pattern.partition("::")
        for node in ast.parse((tests / file).read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith(name or "test_"):
                cases = any("parametrize" in ast.unparse(d) for d in node.decorator_list)
                assert not (cases and "holdall.fit(" in ast.unparse(node)), f"{file}::{node.name} enters through `fit`"


def is_list_of(node, names):
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names


ACTIONS = set(member_names("actions"))
BY_NAME = {  # where a word of the file's own is an action's name too, and reports, which see plans as data
    "planners/pofo/__init__.py": 1,
    "planners/protrain/model.py": 1,
    "optim/__init__.py": 1,
    "optim/adam_mini.py": 2,
    "reporting/html.py": 1,
}


def compared_names(path):
    """Names of actions that a file compares something with, or keeps in a set to do so."""
    found = []
    for node in nodes_of(path):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        sides += [node.left, node.right] if isinstance(node, ast.BinOp) else []
        parts = [part for side in sides for part in (side.elts if isinstance(side, ast.Set | ast.Tuple | ast.List) else [side])]
        found += [p.value for p in parts if isinstance(p, ast.Constant) and p.value in ACTIONS]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nobody_asks_for_an_action_by_its_name(path):
    """They ask for facts (`types.Facts`, `types.Choice`), or for the class: so an action is one file."""
    name = str(path.relative_to(ROOT))
    if not name.startswith(("actions/", "testing/")):
        assert len(compared_names(path)) <= BY_NAME.get(name, 0), compared_names(path)


# how tests get in

HARNESSES = 4  # `Harness(` in tests: enter through `holdall.fit`, or `holdall.apply` with a plan
PRIVATE = 11  # imports of private names: test what the optimizer, the command or the report does with them
REACHES = 7  # uses of `module._name`
PATCHES = 44  # replaced parts of holdall: take a context manager of `holdall.testing.stand_ins`, or write one there


def imported_names(nodes):
    """Name in a test file -> what it was imported as."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
    return found


def is_ours(dotted):
    return dotted.split(".")[0] == "holdall"


def is_private(dotted):
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))


def ways_in(path):
    """What a test file does that a user cannot: (rule, line) each."""
    nodes = tuple(ast.walk(ast.parse(path.read_text())))
    return tuple(found_ways(nodes, imported_names(nodes)))


def found_ways(nodes, names):
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and is_ours(node.module or ""):
            if any(is_private(f"{node.module}.{alias.name}") for alias in node.names):
                yield "private", node.lineno
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if is_ours(names.get(ast.unparse(node.value).split(".")[0], "")):
                yield "reach", node.lineno
        elif isinstance(node, ast.Call) and names.get(ast.unparse(node.func), "").endswith(".Harness"):
            yield "harness", node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            (".setattr", ".setitem", ".delattr", "patch.object")
        ):
            root = ast.unparse(node.args[0]).split(".")[0]  # an unknown one is a local name, for something of ours at worst
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if any(map(is_ours, texts)) or (not isinstance(node.args[0], ast.Constant) and is_ours(names.get(root, "holdall"))):
                yield "patch", node.lineno
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            root = ast.unparse(node.targets[0]).split(".")[0]
            yield from [("patch", node.lineno)] * is_ours(names.get(root, ""))


def test_tests_enter_as_users_do():
    """Through the public API, or a stand-in of `holdall.testing`. These numbers may only fall."""
    found = {}
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        for rule, line in ways_in(path):
            found.setdefault(rule, []).append(f"{path.name}:{line}")
    for rule, most in {"harness": HARNESSES, "private": PRIVATE, "reach": REACHES, "patch": PATCHES}.items():
        assert len(found.get(rule, [])) <= most, found[rule]
