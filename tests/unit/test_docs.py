"""The docs are true: their code runs, their commands parse, their links lead somewhere, the messages they quote exist."""

import ast
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from typer.main import get_command

import holdall
from holdall.cli import VERBS, app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
ALL = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
TEXT = {page: page.read_text(encoding="utf-8") for page in ALL}
FENCE = re.compile(r"^```(\S[^\n]*)?\n(.*?)^```$", re.M | re.S)
SETUP = re.compile(r"<!-- run first\n(.*?)-->", re.S)
NOT_RUN = 4  # blocks that need a GPU, a trainer of somebody else's or weights; one more should be hard to add


def fences(page: Path) -> list[tuple[str, str]]:
    """(what stands behind the ticks, the code), in order; what is hidden in the page for the test counts as python."""
    found = [(m.start(), (m[1] or "").strip(), m[2]) for m in FENCE.finditer(TEXT[page])]
    found += [(m.start(), "python", m[1]) for m in SETUP.finditer(TEXT[page])]
    return [(kind, code) for _, kind, code in sorted(found)]


RUNNABLE = [page for page in PAGES if any(kind == "python" for kind, _ in fences(page)) and page.stem != "long_batches"]


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.stem)
def test_the_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    """Blocks of a page go on from each other, as a reader's session would."""
    if "from peft" in TEXT[page]:
        pytest.importorskip("peft")
    if "holdall.models" in TEXT[page]:
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": f"docs_{page.stem}"}
    for kind, code in fences(page):
        if kind == "python":
            exec(compile(code, page.name, "exec"), names)


class Counter(torch.nn.Module):
    """Tokens in, loss out: the model that long_batches.md speaks of."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(16, 4), torch.nn.Linear(4, 16)

    def forward(self, ids):
        return cross_entropy(self.head(self.embed(ids)).flatten(0, 1), ids.flatten())


def test_each_of_the_calls_of_long_batches_runs():
    """The page shows ways to make one call: each on a model of its own."""
    code = "".join(code for kind, code in fences(DOCS / "long_batches.md") if kind == "python")
    for call in ast.parse(code).body:
        model = Counter()
        names = {
            "holdall": holdall,
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters()),
            "batch": torch.zeros(2, 8, dtype=torch.long),
            "a_long_batch": torch.zeros(2, 32, dtype=torch.long),
        }
        eval(compile(ast.Expression(call.value), "long_batches.md", "eval"), names).close()


def test_code_that_is_not_run_is_rare_and_at_least_compiles():
    marked = [(page.name, code) for page in PAGES for kind, code in fences(page) if kind == "python no-run"]
    for name, code in marked:
        compile(code, name, "exec")
    assert len(marked) <= NOT_RUN
    kinds = {kind.split(" ")[0] for page in PAGES for kind, _ in fences(page)}
    odd = {kind for kind in kinds if not kind.startswith("{")} - {"python", "sh", ""}
    assert not odd, f"fences of kinds that no test reads: {odd}"


def commands() -> list[tuple[str, str]]:
    """(page, line) of every `holdall ...` in a block of shell; a line may stand behind `&&` and go on behind a backslash."""
    found = []
    for page in ALL:
        for kind, code in fences(page):
            lines = code.replace("\\\n", " ").splitlines() if kind == "sh" else []
            parts = [part.strip() for line in lines for part in line.split("&&")]
            found += [(page.name, part) for part in parts if part.startswith("holdall ")]
    return found


def load_verb(verb: str) -> Any:
    return get_command(app).resolve_command(None, [verb])[1]


def examples() -> list[tuple[str, str]]:
    """(verb, line) of every example in the help of the command line."""
    texts = {verb: (load_verb(verb).help or "").replace("\\\n", " ") for verb in VERBS}
    return [(verb, line) for verb, text in texts.items() for line in re.findall(r"^\s*(?:Example: )?(holdall .*)$", text, re.M)]


@pytest.mark.parametrize(("where", "line"), [*commands(), *examples()])
def test_a_command_line_parses(where, line):
    _, verb, *words = shlex.split(line)
    assert verb in VERBS
    load_verb(verb).make_context(verb, words)


def test_verbs_and_options_that_are_only_mentioned_exist():
    mentions = {(page, code) for page in ALL for code in re.findall(r"`(holdall [a-z][^`\n]*)`", FENCE.sub("", TEXT[page]))}
    for page, code in mentions:
        verb, *words = code.split()[1:]
        assert verb in VERBS, f"{page.name}: {code}"
        known = {name for option in load_verb(verb).params for name in (*option.opts, *option.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= known, f"{page.name}: {code}"


QUICK = [line for page, line in commands() if " tiny-" in line and page != "README.md" and " --gpu " in line]


@pytest.mark.parametrize("line", QUICK)
def test_a_command_line_with_a_tiny_model_runs(line, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from typer.testing import CliRunner

    from holdall.cli import app

    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
    assert result.output.strip()


# Links


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and MyST make them."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    heads = re.findall(r"^#+ (.*)$", prose, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def links() -> list[tuple[Path, str]]:
    return [
        (page, target)
        for page in ALL
        for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", TEXT[page]))
        if not re.match(r"[a-z]+:", target)
    ]


@pytest.mark.parametrize(("page", "target"), [pytest.param(p, t, id=f"{p.stem}-{t}") for p, t in links()])
def test_a_link_leads_somewhere(page, target):
    path, _, anchor = target.partition("#")
    there = page.parent / path if path else page
    assert there.is_file(), f"{page.name} links to {target}, which is not there"
    assert not anchor or anchor in anchors(there), f"{page.name} links to {target}: no such heading"


def test_every_page_is_in_the_table_of_contents():
    listed = re.findall(r"```\{toctree\}\n(.*?)```", TEXT[DOCS / "index.md"], re.S)
    names = {line.strip() for block in listed for line in block.splitlines() if line.strip() and not line.startswith(":")}
    assert names == {page.stem for page in PAGES} - {"index"} | {"self"}


# Messages


def messages() -> list[str]:
    """Every string of the package, with a mark where a value stands."""
    found = []
    for path in (ROOT / "holdall").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
    return found


def quoted() -> list[str]:
    """The first cells of the tables of messages."""
    text = TEXT[DOCS / "troubleshooting.md"]
    tables = re.findall(r"^\| message \|[^\n]*\n\|[-|]+\|\n((?:\|.*\n?)+)", text, re.M)
    cells = [row.split(" | ")[0].removeprefix("| ") for table in tables for row in table.splitlines()]
    return [cell.strip().removeprefix("``").removesuffix("``").strip() for cell in cells]


def test_the_messages_of_the_troubleshooting_page_exist():
    said = "\n".join(messages())
    wrong = []
    for message in quoted():
        pattern = r"[^\n]*?".join(re.escape(part) for part in message.split("..."))
        if not re.search(pattern, said):
            wrong.append(message)
    assert len(quoted()) > 60
    assert not wrong, f"quoted, but no longer said: {wrong}"


def test_every_kind_of_error_is_explained():
    tree = ast.parse((ROOT / "holdall/errors.py").read_text(encoding="utf-8"))
    kinds = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    text = TEXT[DOCS / "troubleshooting.md"]
    assert not {kind for kind in kinds if f"`{kind}`" not in text and f"`holdall.{kind}`" not in text}


# The site


def test_the_site_builds_without_warnings(tmp_path):
    if not all(map(find_spec, ("sphinx", "myst_parser", "furo"))):
        pytest.skip('the tools of the extra `docs` are not installed: pip install "holdall[docs]"')
    from sphinx.cmd.build import main

    assert main(["-W", "-q", "-b", "html", str(DOCS), str(tmp_path / "site")]) == 0
    page = (tmp_path / "site/cli.html").read_text(encoding="utf-8")
    assert "--smallest-budget" in page and "holdall ladder" in page
    assert "tensor movement orchestration" in (tmp_path / "site/swap.html").read_text(encoding="utf-8")
    assert sys.modules["sphinx"]
