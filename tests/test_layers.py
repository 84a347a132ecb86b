"""Who may import whom: the imports of the package against the table of docs/architecture.md."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "holdall"
BASE = {"types", "errors", "units", "registry", "caching"}
ALLOWED = {
    "types": BASE,
    "errors": BASE,
    "units": BASE,
    "registry": BASE,
    "caching": BASE,
    "ops": BASE | {"torch"},
    "casts": BASE | {"torch"},
    "rezero": BASE | {"torch"},
    "optim": BASE | {"torch"},
    "precision": BASE | {"optim", "torch"},
    "cost": BASE,
    "simulator": BASE | {"cost"},
    "reporting": BASE,
    "catalog": BASE,
    "compatibility": BASE,
    "models": BASE | {"torch"},
    "tracing": BASE | {"casts", "cost", "ops", "optim", "torch"},
    "tiers": BASE | {"torch"},
    "checkpoints": BASE | {"torch"},
    "runtime": BASE | {"casts", "ops", "tiers", "optim", "torch"},
    "actions": BASE | {"cost", "optim", "runtime", "torch"},
    "parallel": BASE | {"runtime", "actions", "torch"},
    "planners": BASE | {"cost", "simulator", "actions"},
}
ANYTHING = {"api", "asking", "cli", "integrations", "testing", "training", "__init__", "__main__"}


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
    assert part in ALLOWED, f"{part} is not in the table of who may import whom"
    wrong = imports_of(path) - ALLOWED[part] - {part}
    assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_the_table_in_the_docs_lists_every_part():
    text = (ROOT.parent / "docs" / "architecture.md").read_text()
    for part in ALLOWED:
        assert f"`{part}`" in text, f"docs/architecture.md does not mention `{part}`"
