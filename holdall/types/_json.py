"""Frozen dataclasses to JSON and back. Data only: no class name, path or code is ever read from a file."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from holdall.errors import InvalidInput

T = TypeVar("T")


def pack(value: Any) -> Any:
    """Dataclasses to dictionaries, tuples to lists, enums to their values; lists of dataclasses become tables."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: pack(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(pack(k)): pack(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [pack(v) for v in value]
    if isinstance(value, float) and math.isnan(value):
        return None
    return value


def unpack(kind: Any, value: Any, where: str) -> Any:
    """The inverse of `pack`, guided by the annotations of `kind`; anything that does not fit is refused."""
    try:
        return _unpack(kind, value)
    except InvalidInput as error:
        raise InvalidInput(f"`{where}`: {error.fact}", hint=error.hint) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidInput(
            f"`{where}` does not hold what it should ({error})", hint="write it again with the same version of holdall"
        ) from None


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(kind: type) -> dict[str, Any]:
    if kind not in _HINTS:
        _HINTS[kind] = typing.get_type_hints(kind)
    return _HINTS[kind]


def _unpack(kind: Any, value: Any) -> Any:
    if kind is Any:
        return value
    origin, args = get_origin(kind), get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _unpack(next(a for a in args if a is not type(None)), value)
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"a list was expected, not {type(value).__name__}")
        if len(args) == 2 and args[1] is Ellipsis:
            if args[0] in (int, str) and all(type(v) is args[0] for v in value):
                return tuple(value)
            return tuple(_unpack(args[0], v) for v in value)
        return tuple(_unpack(a, v) for a, v in zip(args, value, strict=True))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise TypeError(f"an object was expected, not {type(value).__name__}")
        return {_unpack_key(args[0], k): _unpack(args[1], v) for k, v in value.items()}
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise TypeError(f"an object was expected, not {type(value).__name__}")
        hints = _hints(typing.cast(type, kind))
        build = typing.cast("type[Any]", kind)
        return build(**{f.name: _unpack(hints[f.name], value[f.name]) for f in dataclasses.fields(kind) if f.name in value})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"a number was expected, not {value!r}")
        return float(value)
    if kind in (int, str, bool):
        if type(value) is not kind:
            raise TypeError(f"{kind.__name__} was expected, not {value!r}")
        return value
    raise TypeError(f"cannot read a {kind}")


def _unpack_key(kind: Any, key: str) -> Any:
    return int(key) if kind is int else _unpack(kind, key)


def write(path: str | Path, data: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(data, separators=(",", ":")))


def write_text(path: str | Path, text: str) -> None:
    """Write a file whole or not at all: to a neighbour first, then renamed."""
    path = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent or ".", prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InvalidInput(
            f"cannot write `{path}`: {error.strerror or error}", hint="check the folder, its permissions and free space"
        ) from error


def read(path: str | Path, expected: str) -> dict[str, Any]:
    """A JSON object whose `format` is `expected`."""
    noun = expected.split("-")[1]
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"cannot read `{path}`: {error.strerror or error}", hint=f"give the path of a {noun} file") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidInput(f"`{path}` is not a {noun} file: {error}", hint=f"write it again with `{noun}.save`") from None
    found = data.get("format") if isinstance(data, dict) else None
    if found != expected:
        raise InvalidInput(
            f"`{path}` is not a {noun} file of this version (format {found!r}, expected {expected!r})",
            hint=f"write it again with `{noun}.save`",
        )
    data.pop("format")
    return typing.cast("dict[str, Any]", data)
