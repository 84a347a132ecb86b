"""What modules hold in Python attributes, besides parameters and submodules: compared, and put back.

A forward may count its calls, keep a list, or give an attribute or a buffer a new tensor. If it is traced, or run a second time
in backward, that must not show; and a graph that was captured once has such values fixed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch

_RNN = {"_flat_weights", "_flat_weight_refs"}  # its parameters once more, which torch keeps up to date
_MODULE = frozenset(vars(torch.nn.Module())) - {"training"} | _RNN  # tables of torch: hooks, parameters, submodules, buffers
_HOOKS = tuple(name for name in _MODULE if name.startswith(("_forward", "_backward")))
_CONTAINERS = (dict, list, set, deque)
_SCALARS = frozenset((bool, int, float, complex, str, type(None), torch.dtype))
_FOREIGN = frozenset(("torch", "builtins", "types", "functools", "threading", "logging"))  # whose objects hold no settings
_LARGEST = 100_000  # entries of a container; larger ones are data
_DEPTH = 4  # containers in containers


class Attributes:
    """The attributes of a module and its submodules at one moment, with what is in their lists, dicts, sets and helper objects
    of a class from the same file. Tensors are referred to, not copied."""

    def __init__(self, module: torch.nn.Module, only: Collection[str] | None = None) -> None:
        """`only`: these attributes, by their paths in the module."""
        self._module, self._only = module, only
        self._own: list[tuple[str, torch.nn.Module, dict[str, Any], dict[str, Any]]] = []
        self._inside: list[tuple[str, Any, Any]] = []  # (attribute, container, a copy of it)
        self._hooks: list[tuple[Any, Any]] = []  # (table of a module, a copy of it)
        if only is not None and not only:
            return
        files = {type(m).__module__ for m in module.modules()}
        seen: set[int] = set()
        for path, m in module.named_modules():
            own = self._attributes_of(path, m)
            buffers = {name: value for name, value in m._buffers.items() if only is None or _joined(path, name) in only}
            self._own.append((path, m, own, buffers))
            self._hooks += [(table, dict(table)) for table in map(vars(m).get, _HOOKS) if only is None and table is not None]
            for name, value in own.items():
                if type(value) not in _SCALARS:
                    self._inside += _walk(_joined(path, name), value, files, seen, _DEPTH)

    def _attributes_of(self, path: str, m: torch.nn.Module) -> dict[str, Any]:
        found = {name: value for name, value in vars(m).items() if name not in _MODULE}
        return found if self._only is None else {n: value for n, value in found.items() if _joined(path, n) in self._only}

    def changed(self) -> dict[str, tuple[Any, Any]]:
        """What has changed since: attribute -> (its value then, its value now)."""
        found: dict[str, tuple[Any, Any]] = {}
        for path, m, own, buffers in self._own:
            now = self._attributes_of(path, m)
            for was, there in ((own, now), (buffers, m._buffers)):
                for name in dict.fromkeys((*was, *there)):
                    if name not in there or name not in was or not _same(was[name], there[name]):
                        found[_joined(path, name)] = (was.get(name), there.get(name))
        for name, container, copy in self._inside:
            if not _same_inside(container, copy):
                found.setdefault(name, (copy, container))
        if any(not _same_inside(table, copy) for table, copy in self._hooks):  # of which the model may say that they are there
            found = {name: (was, now) for name, (was, now) in found.items() if now is not True}
        return found

    def put_back(self) -> None:
        for path, m, own, buffers in self._own:
            for name in self._attributes_of(path, m).keys() - own.keys():
                del vars(m)[name]
            vars(m).update(own)
            if self._only is not None:
                m._buffers.update(buffers)
            elif not _same_inside(m._buffers, buffers):
                _fill(m._buffers, buffers)
        for container, copy in (*((container, copy) for _, container, copy in self._inside), *self._hooks):
            if not _same_inside(container, copy):
                _fill(container, copy)

    @contextmanager
    def again(self) -> Iterator[None]:
        """As they were, inside; afterwards as they are now."""
        now = Attributes(self._module, self._only)
        self.put_back()
        try:
            yield
        finally:
            now.put_back()


@contextmanager
def left_as_found(module: torch.nn.Module) -> Iterator[None]:
    """Whatever a forward inside does to attributes of the module is undone."""
    before = Attributes(module)
    try:
        yield
    finally:
        before.put_back()


class SettingsWatch:
    """Counts changes of plain values that modules may read in containers and objects, such as `self.config.scale`."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._modules = list(modules)
        self._version = 0
        self._find()

    def _find(self) -> None:
        seen: set[int] = set()
        found = [
            entry
            for m in self._modules
            for name, value in vars(m).items()
            if name not in _MODULE and type(value) not in _SCALARS
            for entry in _walk("", value, None, seen, _DEPTH)
        ]
        self._inside = [(container, _values(container)) for _, container, _ in found]

    def version(self) -> int:
        if not all(_is_as(container, values) for container, values in self._inside):
            if any(_plain(_values(container)) != _plain(values) for container, values in self._inside):
                self._version += 1
            self._find()
        return self._version


def _walk(name: str, value: Any, files: set[str] | None, seen: set[int], depth: int) -> Iterator[tuple[str, Any, Any]]:
    """The containers in a value, itself included, each once: (name, container, a copy). `files`: of the classes whose objects
    count, None: of all."""
    is_fixed = isinstance(value, tuple)
    table = value if is_fixed or isinstance(value, _CONTAINERS) else _attributes_of(value, files)
    if table is None or id(table) in seen or len(table) > _LARGEST or not depth:
        return
    seen.add(id(table))
    copy = table if is_fixed else _copied(table)
    if not is_fixed:
        yield name, table, copy
    for part in copy.values() if isinstance(copy, dict) else copy:
        if type(part) not in _SCALARS:
            yield from _walk(name, part, files, seen, depth - 1)


def _attributes_of(value: Any, files: set[str] | None) -> dict[str, Any] | None:
    """Of an object of a class that counts; never of tensors, modules and classes."""
    if isinstance(value, (torch.Tensor, torch.nn.Module, type)) or not hasattr(value, "__dict__"):
        return None
    of = type(value).__module__
    is_foreign = of not in files if files is not None else of.partition(".")[0] in _FOREIGN
    return None if is_foreign else vars(value)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _copied(table: Any) -> Any:
    if isinstance(table, dict):
        return dict(table)
    return set(table) if isinstance(table, set) else list(table)


def _fill(table: Any, copy: Any) -> None:
    table.clear()
    if isinstance(table, (dict, set)):
        table.update(copy)
    else:
        table.extend(copy)


def _same_inside(table: Any, copy: Any) -> bool:
    if len(table) != len(copy):
        return False
    if isinstance(table, set):
        return bool(table == copy)
    if isinstance(table, dict):
        return all(name in table and _same(table[name], value) for name, value in copy.items())
    return all(map(_same, table, copy))


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and type(a) in _SCALARS and a == b)


def _values(table: Any) -> list[Any]:
    return [*table, *table.values()] if isinstance(table, dict) else [*table]


def _is_as(table: Any, values: list[Any]) -> bool:
    now = _values(table)
    return len(now) == len(values) and all(map(is_, now, values))


def _plain(values: list[Any]) -> list[Any]:
    return [v for v in values if type(v) in _SCALARS]
