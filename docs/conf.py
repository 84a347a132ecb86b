"""The site: `python -m sphinx -W -b html docs docs/_build`. Written for Sphinx with MyST and furo (extra `docs`).

Two things are made when the site is built, so that they cannot be out of date: the help of the command line (`command-line`)
and the table of published systems (`systems`). Docstrings are plain sentences with code in single backticks, and become
reStructuredText here.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ["COLUMNS"] = "100"  # of the help texts

from holdall import __version__

project, author, release, language = "holdall", "the holdall authors", __version__, "en"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "holdall"
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True


class CommandLine(Directive):
    """The help of every verb, as it is printed."""

    def run(self) -> list[nodes.Node]:
        from typer.testing import CliRunner

        from holdall.cli import app
        from holdall.cli._verbs import VERBS

        made: list[nodes.Node] = []
        for verb in VERBS:
            title = f"holdall {verb}"
            section = nodes.section(ids=[title.replace(" ", "-")], names=[title])
            shown = CliRunner().invoke(app, [verb, "--help"], prog_name="holdall").output
            text = nodes.literal_block(shown, shown.strip(), language="text")
            section += [nodes.title(title, title), text]
            made.append(section)
        return made


class Systems(Directive):
    """The published systems as a table, and then the families that are meant (all, if none is named). `built`: those with a
    file; `missing`: those without one, or with parts of the paper left out."""

    required_arguments = 1
    optional_arguments = 10

    def run(self) -> list[nodes.Node]:
        from holdall.catalog import systems

        which, *families = self.arguments
        heads = ("system", "what it does" if which == "built" else "what is missing", "source", "lives in")
        rows = [
            (s.name, s.idea if which == "built" else "; ".join(s.missing) or "all of it", s.source, ", ".join(s.lives))
            for s in systems()
            if (bool(s.lives) if which == "built" else s.missing or not s.lives)
            and (not families or set(families) & set(s.families))
        ]
        return [_table(heads, rows) if rows else nodes.paragraph("", "None.")]


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> nodes.table:
    group = nodes.tgroup(cols=len(heads))
    group += [nodes.colspec(colwidth=1) for _ in heads]
    group += [nodes.thead("", _row(heads)), nodes.tbody("", *map(_row, rows))]
    return nodes.table("", group)


def _row(cells: tuple[str, ...]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", cell)) for cell in cells))


def to_rst(lines: list[str]) -> list[str]:
    """Our docstrings as reStructuredText: backticks are code, indented parts are shown as they are, the rest is text."""
    made: list[str] = []
    inside = False
    for line in lines:
        indented = line.startswith("    ") and bool(line.strip())
        if indented and not inside:
            made += ["", "::", ""]
        elif inside and not indented and line.strip():
            made.append("")
        inside = indented or (inside and not line.strip())
        made.append(line if indented else _inline(line))
    return made


def _inline(line: str) -> str:
    parts = re.split(r"`([^`]+)`", line)
    text = [re.sub(r"([*_|\\])", r"\\\1", part) if n % 2 == 0 else f"``{part}``" for n, part in enumerate(parts)]
    return re.sub(r"``(?=\w)", r"``\\ ", "".join(text)) if len(parts) > 1 and _glued(parts) else "".join(text)


def _glued(parts: list[str]) -> bool:
    """Whether a letter follows a piece of code at once ("`Unit`s"), which needs a mark."""
    return any(part[:1].isalnum() for part in parts[2::2])


def fields_of(kind: type) -> list[str]:
    """A list of a dataclass' own fields with their types and the comments beside them."""
    made = [""]
    for line in inspect.getsource(kind).splitlines():
        found = re.match(r"    (\w+): ([^=#]+?)(?: = [^#]+?)?(?:\s+# (.*))?$", line)
        if found and not found[1].startswith("_") and found[1] in kind.__dataclass_fields__:
            about = f": {_inline(found[3])}" if found[3] else ""
            made.append(f"- ``{found[1]}`` (``{found[2].strip()}``){about}")
    return made


def _rewrite(_app: Any, what: str, _name: str, thing: Any, _options: Any, lines: list[str]) -> None:
    is_noun = what == "class" and dataclasses.is_dataclass(thing)
    written = [] if is_noun and lines and lines[0].startswith(f"{thing.__name__}(") else to_rst(lines)
    lines[:] = [*written, *(fields_of(thing) if is_noun else [])]


def _sign(_app: Any, what: str, name: str, thing: Any, *_rest: Any) -> tuple[str, None] | None:
    """Nobody calls a noun: its fields are listed instead."""
    return ("", None) if what == "class" and (dataclasses.is_dataclass(thing) or name == "holdall.Harness") else None


def setup(app: Any) -> None:
    app.add_directive("command-line", CommandLine)
    app.add_directive("systems", Systems)
    app.connect("autodoc-process-docstring", _rewrite)
    app.connect("autodoc-process-signature", _sign)
