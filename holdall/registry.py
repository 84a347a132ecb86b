"""The folders `actions`, `planners`, `tiers`, `optim`, `precision`, `layouts`, `pipelines/schedules` and `pipelines/searches`
are the registries: a file or package there is a member of that name.

Members are imported when asked for, so that a missing solver breaks only its own planner. Names that begin with an underscore
are helpers. Members of your own are added in one of two ways, and are then as good as those here (menus of planners, the
command line, plan files, tables, reports):

- a folder with the same layout (`mine/actions/nap.py`), named by `add_folder("mine")` or in the environment variable
  `HOLDALL_MEMBERS`, which takes several, separated as in `PATH`;
- an installed package with entry points of the group `holdall.actions`, `holdall.planners` and so on, each the member's class.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import json
import os
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from holdall.errors import InvalidInput, unknown_name

_ROOT = Path(__file__).parent
_VARIABLE = "HOLDALL_MEMBERS"


def add_folder(path: str | Path) -> None:
    """Add the members in a folder that is laid out as this package is: `actions/*.py`, `planners/*.py` and so on.

    For this process, and for those that it starts.
    """
    folder = Path(path).resolve()
    if not folder.is_dir():
        raise InvalidInput(f"there is no folder `{path}`", hint="name one with `actions/NAME.py` or `planners/NAME.py` in it")
    if folder not in _added():
        os.environ[_VARIABLE] = os.pathsep.join(map(str, [*_added(), folder]))


def _added() -> list[Path]:
    return [Path(part) for part in os.environ.get(_VARIABLE, "").split(os.pathsep) if part]


def member_names(folder: str) -> tuple[str, ...]:
    """Names of the members of a folder, without importing them."""
    names = {name for root in (_ROOT, *_added()) for name in _files(root / folder)}
    return tuple(sorted(names | _installed(folder).keys()))


@cache
def _installed(folder: str) -> dict[str, EntryPoint]:
    """Members of other installed packages, by entry point."""
    return {entry.name: entry for entry in entry_points(group=f"holdall.{_dotted(folder)}")}


def _dotted(folder: str) -> str:
    return folder.replace("/", ".")


def _files(folder: Path) -> dict[str, Path]:
    """Member -> its file."""
    found = {p.stem: p for p in folder.glob("*.py")} | {p.parent.name: p for p in folder.glob("*/__init__.py")}
    return {name: path for name, path in found.items() if not name.startswith("_")}


def is_own(folder: str, name: str) -> bool:
    """Is this a member of holdall itself?"""
    return name in _files(_ROOT / folder)


def load_member(folder: str, name: str) -> Any:
    """The module of a member (or what its entry point names)."""
    if name not in member_names(folder):
        raise unknown_name(folder.rpartition("/")[2].rstrip("s"), name, member_names(folder))
    if is_own(folder, name):
        return importlib.import_module(f"holdall.{_dotted(folder)}.{name}")
    for root in _added():
        path = _files(root / folder).get(name)
        if path is not None:
            return _load_file(path)
    return _installed(folder)[name].load()


def _load_file(path: Path) -> ModuleType:
    """The module of a file outside of this package; executed once."""
    name = f"holdall_member_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    inside = [str(path.parent)] if path.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=inside)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        fact = f"`{path}` cannot be imported ({type(error).__name__}: {error})"
        raise InvalidInput(fact, hint=f"correct the file, or take its folder out of {_VARIABLE}") from error
    return module


def member_class(folder: str, name: str) -> type[Any]:
    """The class of a member: the one defined in its file whose `name` is the file's."""
    module = load_member(folder, name)
    if isinstance(module, type):
        return module
    for value in vars(module).values():
        if isinstance(value, type) and getattr(value, "name", None) == name and value.__module__ == module.__name__:
            return value
    raise InvalidInput(f"`{module.__file__}` defines no class named {name!r}", hint=f'write `name: ClassVar[str] = "{name}"`')


def member_classes(folder: str) -> list[type[Any]]:
    """The classes of all members, in the order of their names."""
    return [member_class(folder, name) for name in member_names(folder)]


def allowed_by_default() -> frozenset[str]:
    """Names of the actions that planners may use without being told."""
    return frozenset(action.name for action in member_classes("actions") if action.by_default)


def build_member(folder: str, name: str, options: dict[str, Any], where: str) -> Any:
    """A member with its options; an unknown option raises an error that lists the known ones."""
    from holdall.types import _json

    cls = member_class(folder, name)
    if hasattr(cls, "from_older"):  # names of older versions
        with suppress(TypeError, AttributeError):  # damaged values are refused below
            options = cls.from_older(options)
    known = {f.name: f for f in dataclasses.fields(cls)}
    for option in options:
        if option not in known:
            raise unknown_name(f"option of {name}", option, known)
    hints = _json._hints(cls)
    read = {k: _json.unpack(hints[k], _json.pack(v), where) for k, v in options.items()}
    try:
        return cls(**read)
    except TypeError as error:
        raise InvalidInput(
            f"`{where}`: {name} cannot be made from its values ({error})",
            hint="save the file again with this version of holdall",
        ) from None


def action_from_json(entry: Any, where: str) -> Any:
    """An action from its entry in a plan file."""
    if not isinstance(entry, dict) or not isinstance(entry.get("action"), str):
        raise InvalidInput(f"`{where}` holds an action without a name", hint="write it again with `plan.save`")
    options = {k: v for k, v in entry.items() if k != "action"}
    return build_member("actions", entry["action"], options, where)


def read_choice(text: str) -> tuple[str, dict[str, Any]]:
    """(name, options) of a member as it is typed: `rockmate:menus=cut:slots=200`; values are JSON where they can be."""
    name, *pairs = text.split(":")
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise InvalidInput(
                f"`{text}` has the option `{pair}` without a value", hint="write options as `rockmate:menus=cut:slots=200`"
            )
        options[key] = read_value(value)
    return name, options


def read_value(text: str) -> Any:
    """The value parsed as JSON if possible, else as text or a list of texts."""
    try:
        return json.loads(text)
    except ValueError:
        is_list = text.startswith("[") and text.endswith("]")
        return [part.strip() for part in text[1:-1].split(",")] if is_list else text
