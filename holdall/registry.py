"""The folders `actions`, `planners`, `tiers` and `optim` are the registries: a file or package there is a member of that name.

Members are imported when asked for, so that a missing solver breaks only its own planner. Names that begin with an underscore
are helpers. Packages elsewhere add planners through the entry-point group `holdall.planners`.
"""

from __future__ import annotations

import dataclasses
import importlib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from holdall.errors import InvalidInput, unknown_name

_ROOT = Path(__file__).parent


def member_names(folder: str) -> tuple[str, ...]:
    """Names of the members of a folder, without importing them."""
    found = [*(_ROOT / folder).glob("*.py"), *(p.parent for p in (_ROOT / folder).glob("*/__init__.py"))]
    names = {p.stem for p in found if not p.stem.startswith("_")}
    names |= {entry.name for entry in entry_points(group=f"holdall.{folder}")}
    return tuple(sorted(names))


def load_member(folder: str, name: str) -> Any:
    """The module of a member (or what its entry point names)."""
    if name not in member_names(folder):
        raise unknown_name(folder.rstrip("s"), name, member_names(folder))
    if (_ROOT / folder / f"{name}.py").exists() or (_ROOT / folder / name / "__init__.py").exists():
        return importlib.import_module(f"holdall.{folder}.{name}")
    return next(entry.load() for entry in entry_points(group=f"holdall.{folder}") if entry.name == name)


def member_class(folder: str, name: str) -> type[Any]:
    """The class of a member: the one defined in its file whose `name` is the file's."""
    module = load_member(folder, name)
    if isinstance(module, type):
        return module
    for value in vars(module).values():
        if isinstance(value, type) and getattr(value, "name", None) == name and value.__module__ == module.__name__:
            return value
    raise AttributeError(f"holdall/{folder}/{name}.py defines no class named {name!r}")


def build_member(folder: str, name: str, options: dict[str, Any], where: str) -> Any:
    """A member with its options; options it does not have are refused with those it has."""
    from holdall.types import _json

    cls = member_class(folder, name)
    known = {f.name: f for f in dataclasses.fields(cls)}
    for option in options:
        if option not in known:
            raise unknown_name(f"option of {name}", option, known)
    hints = _json._hints(cls)
    read = {k: _json.unpack(hints[k], _json.pack(v), where) for k, v in options.items()}
    try:
        return cls(**read)
    except TypeError as error:
        raise InvalidInput(f"`{where}`: {name} needs other values ({error})", hint="write the file again") from None


def action_from_json(entry: Any, where: str) -> Any:
    """An action from its entry in a plan file."""
    if not isinstance(entry, dict) or not isinstance(entry.get("action"), str):
        raise InvalidInput(f"`{where}` holds an action without a name", hint="write it again with `plan.save`")
    options = {k: v for k, v in entry.items() if k != "action"}
    return build_member("actions", entry["action"], options, where)
