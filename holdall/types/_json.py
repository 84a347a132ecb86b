"""Frozen dataclasses to JSON and back. Data only: no class name, path or code is ever read from a file."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from holdall.errors import InvalidInput

T = TypeVar("T")


_PLAIN = (str, int, bool, type(None))
_FIELDS: dict[type, tuple[str, ...]] = {}


def pack(value: Any) -> Any:
    """Dataclasses to dictionaries, tuples to lists, enums to their values; lists of dataclasses become tables."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        return None if math.isnan(value) else value
    if kind is tuple or kind is list:
        return [v if type(v) in _PLAIN else pack(v) for v in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if kind not in _FIELDS:
            _FIELDS[kind] = tuple(f.name for f in dataclasses.fields(value))
        return {name: pack(getattr(value, name)) for name in _FIELDS[kind]}
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
    return _reader(kind)(value)


_READERS: dict[Any, Callable[[Any], Any]] = {}


def _reader(kind: Any) -> Callable[[Any], Any]:
    """What reads values of a kind; made once, since a trace has tens of thousands of them."""
    found = _READERS.get(kind)
    if found is None:
        found = _READERS[kind] = _make_reader(kind)
    return found


def _make_reader(kind: Any) -> Callable[[Any], Any]:
    if kind is Any:
        return lambda value: value
    origin, args = get_origin(kind), get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = _reader(next(a for a in args if a is not type(None)))
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        return _tuple_reader(args)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping_reader(args)
    if dataclasses.is_dataclass(kind):
        return _dataclass_reader(typing.cast("type[Any]", kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    if kind is float:
        return _read_float
    if kind in (int, str, bool):
        return partial(_read_plain, kind)
    raise TypeError(f"cannot read a {kind}")


def _tuple_reader(args: tuple[Any, ...]) -> Callable[[Any], Any]:
    if len(args) == 2 and args[1] is Ellipsis:
        one, plain = _reader(args[0]), args[0] if args[0] in (int, str) else None

        def read_all(value: Any) -> Any:
            if not isinstance(value, list):
                raise TypeError(f"a list was expected, not {type(value).__name__}")
            if plain is not None and all(type(v) is plain for v in value):
                return tuple(value)
            return tuple([one(v) for v in value])

        return read_all
    each = [_reader(a) for a in args]

    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise TypeError(f"a list was expected, not {type(value).__name__}")
        return tuple([reader(v) for reader, v in zip(each, value, strict=True)])

    return read


def _mapping_reader(args: tuple[Any, ...]) -> Callable[[Any], Any]:
    key: Callable[[Any], Any] = int if args[0] is int else _reader(args[0])
    one = _reader(args[1])

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise TypeError(f"an object was expected, not {type(value).__name__}")
        return {key(k): one(v) for k, v in value.items()}

    return read


def _dataclass_reader(kind: type[Any]) -> Callable[[Any], Any]:
    readers: list[tuple[str, Callable[[Any], Any]]] = []  # found when first needed: a kind may have fields of its own kind

    def read(value: Any) -> Any:
        if not readers:
            hints = _hints(kind)
            readers.extend([(f.name, _reader(hints[f.name])) for f in dataclasses.fields(kind)])
        if not isinstance(value, dict):
            raise TypeError(f"an object was expected, not {type(value).__name__}")
        if hasattr(kind, "from_older"):
            value = kind.from_older(value)
        if getattr(kind, "closed", False):
            _refuse_others(kind, value, [name for name, _ in readers])
        return kind(**{name: reader(value[name]) for name, reader in readers if name in value})

    return read


def _refuse_others(kind: type[Any], value: Mapping[str, Any], names: list[str]) -> None:
    for name in value:
        if name not in names:
            raise InvalidInput(f"{kind.__name__} has no field `{name}`", hint="write it again with this version of holdall")


def _read_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"a number was expected, not {value!r}")
    return float(value)


def _read_plain(kind: type[Any], value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} was expected, not {value!r}")
    return value


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
