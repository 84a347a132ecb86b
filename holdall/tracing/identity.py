"""A digest of everything that a trace may depend on, for the cache of traces.

A trace depends on code and on values that the code reads. The digest covers everything reachable from the model, the loss
function and the optimizer: classes, attributes (dropout, flags, configs), functions with their closures, shapes of parameters
and buffers, hooks; also the sources of every loaded user module, versions of packages, and torch's settings. If something
cannot be described, there is no digest and the trace is not cached.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import site
import sys
import sysconfig
import types
import weakref
from collections.abc import Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    range,
    slice,
    PurePath,
)
_FEW = 1 << 12  # most elements of a constant whose values are hashed; steps with larger ones are not cached
_OF_OPTIMIZERS = (
    "state",
    "param_groups",
    "step",
    "_step_count",
    "_opt_called",
    "_zero_grad_profile_name",
    "_patch_step_function",
)
_BY_PROCESS = (
    "_original_object_hash",
)  # library attributes that hold values of Python's `hash`, which differ between processes
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType)


class Unknowable(Exception):
    """Something cannot be described."""


def identity_of(
    model: torch.nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None, options: Mapping[str, Any]
) -> str | None:
    """A digest of the step without the values of the batch. None: something cannot be described."""
    told = _Telling()
    try:
        told.value(model)
        told.optimizer(optimizer)
        told.value(dict(options))
        leaves, structure = tree_flatten(batch)
        told.write(str(structure))
        for leaf in leaves:
            told.tensor(leaf) if isinstance(leaf, torch.Tensor) else told.value(leaf)
        told.write(*_of_torch())
        told.sources()
    except (Unknowable, RecursionError, OSError):
        return None
    return told.digest.hexdigest()


def values_of(batch: Any, which: Mapping[int, Any] | list[int]) -> dict[int, str]:
    """Index of a tensor in the batch -> digest of its values; a repeated tensor counts once."""
    unique: dict[int, torch.Tensor] = {}
    for leaf in tree_flatten(batch)[0]:
        if isinstance(leaf, torch.Tensor):
            unique.setdefault(id(leaf), leaf)
    tensors = list(unique.values())
    return {n: _digest_of_values(tensors[n]) if n < len(tensors) else "" for n in which}


def _digest_of_values(t: torch.Tensor) -> str:
    if t.device.type == "meta":
        return "meta"
    data = t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class _Telling:
    """Hashes objects, each once; a repeated object is hashed as a reference, so that ties are kept."""

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        self._met: dict[int, tuple[int, Any]] = {}  # keeps the object, so that its id stays unique
        self._classes: set[type] = set()
        self._modules: set[str] = set()

    def write(self, *parts: Any) -> None:
        for part in parts:
            self.digest.update(repr(part).encode())
            self.digest.update(b"\x00")

    def value(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN or isinstance(value, PurePath):
            self.write(kind.__name__, value)
            return
        if id(value) in self._met:
            self.write("met", self._met[id(value)][0])
            return
        self._met[id(value)] = len(self._met), value
        self.write(kind.__module__, kind.__qualname__)
        if isinstance(value, torch.Tensor):
            self.tensor(value, is_constant=not isinstance(value, torch.nn.Parameter))
        elif isinstance(value, torch.nn.Module):
            self._module(value)
        elif isinstance(value, Enum):
            self.write(value.name)
        elif isinstance(value, Mapping):
            self._class(kind)
            self._items(value)
            if hasattr(value, "__dict__"):
                self._items(vars(value))
        elif isinstance(value, (list, tuple)):
            self._class(kind)
            self.write(len(value))
            for item in value:
                self.value(item)
        elif isinstance(value, (set, frozenset)):
            if not all(type(v) in _PLAIN for v in value):
                raise Unknowable(f"a set of {kind}")
            self.write(sorted(map(repr, value)))
        else:
            self._other(value)

    def _other(self, value: Any) -> None:
        if isinstance(value, types.ModuleType):
            self.write(value.__name__)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._function(value.__func__) if isinstance(value.__func__, types.FunctionType) else self.value(value.__func__)
            self.value(value.__self__)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self.value(part)
        elif isinstance(value, _BUILTIN):
            self.write(value.__name__, getattr(value, "__module__", None))
            owner = getattr(value, "__self__", None)
            if owner is not None and not isinstance(owner, (types.ModuleType, type)):
                self.value(owner)
        elif isinstance(value, (weakref.ref, torch.Generator)) or type(value).__module__.startswith(("_thread", "threading")):
            raise Unknowable(f"a {type(value)}")
        elif hasattr(value, "__dict__"):
            if any(base.__flags__ & (1 << 9) == 0 and base is not object for base in type(value).__mro__):
                raise Unknowable(f"a {type(value)}, partly implemented outside Python")  # `Py_TPFLAGS_HEAPTYPE` is not set
            self._class(type(value))
            self._items(vars(value))
            self._slots(value)
        else:
            raise Unknowable(f"a {type(value)}")

    def _slots(self, value: Any) -> None:
        for base in type(value).__mro__:
            for name in base.__dict__.get("__slots__", ()):
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    self.write(name)
                    self.value(getattr(value, name))

    def _items(self, items: Mapping[Any, Any]) -> None:
        self.write(len(items))
        for key, item in items.items():
            self.value(key)
            if key not in _BY_PROCESS:
                self.value(item)

    def tensor(self, t: torch.Tensor, *, is_constant: bool = False) -> None:
        if type(t) not in (torch.Tensor, torch.nn.Parameter):
            raise Unknowable(f"a tensor of {type(t)}")
        if getattr(t, "_backward_hooks", None) or getattr(t, "_post_accumulate_grad_hooks", None):
            raise Unknowable("a hook on a tensor")
        self.write(tuple(t.shape), tuple(t.stride()), t.storage_offset(), t.dtype, t.device.type, t.requires_grad, t.is_leaf)
        self.write(t.untyped_storage().nbytes() if t.layout is torch.strided else str(t.layout))
        if is_constant:  # code may read it
            if t.numel() > _FEW:
                raise Unknowable("a large constant")
            self.write(_digest_of_values(t))

    def _module(self, module: torch.nn.Module) -> None:
        self._class(type(module))
        for name, item in vars(module).items():
            self.write(name)
            if "hooks" in name and isinstance(item, Mapping):
                if item:
                    raise Unknowable("a hook")
            elif name == "_buffers":
                for key, buffer in item.items():
                    self.write(key)
                    if buffer is None or id(buffer) in self._met:
                        self.value(buffer)
                    else:
                        self._met[id(buffer)] = len(self._met), buffer
                        self.tensor(buffer)  # its values are not known to a trace
            else:
                self.value(item)

    def optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is None:
            self.write("no optimizer")
            return
        self._class(type(optimizer))
        for group in optimizer.param_groups:
            self._items(group)
        for name, item in vars(optimizer).items():
            self.write(name)
            if "hooks" in name:
                if item:
                    raise Unknowable("a hook of the optimizer")
            elif name not in _OF_OPTIMIZERS:
                self.value(item)

    def _class(self, kind: type) -> None:
        for base in kind.__mro__:
            if base not in self._classes and base.__module__ != "builtins":
                self._classes.add(base)
                self._modules.add(base.__module__)
                self.write(base.__module__, base.__qualname__)
                self._patched(base)

    def _patched(self, kind: type) -> None:
        """Hash methods that were patched into a class, which its source does not show."""
        for name, item in vars(kind).items():
            if isinstance(item, types.FunctionType) and item.__module__ != kind.__module__:
                self.write(name)
                self.value(item)

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        self._modules.add(function.__module__ or "")
        self.write(function.__module__, function.__qualname__, code.co_code, code.co_names, code.co_varnames)
        self._constants(code)
        for part in (function.__defaults__, function.__kwdefaults__):
            self.value(part)
        for cell in function.__closure__ or ():
            try:
                self.value(cell.cell_contents)
            except ValueError:  # empty
                self.write("empty")
        if _is_installed(getattr(sys.modules.get(function.__module__ or ""), "__file__", None)):
            return  # covered by the package version
        for name in code.co_names:
            if name in function.__globals__:
                self.write(name)
                self.value(function.__globals__[name])

    def _constants(self, code: types.CodeType) -> None:
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.write(constant.co_code, constant.co_names)
                self._constants(constant)
            elif isinstance(constant, frozenset):  # its order differs between processes
                self.write(sorted(map(repr, constant)))
            else:
                self.write(constant)

    def sources(self) -> None:
        """Hash the files of the user's modules, and the versions of the packages met."""
        packages = set()
        for name in self._modules - {""}:
            module = sys.modules.get(name)
            file = getattr(module, "__file__", None)
            if file is None and name not in sys.builtin_module_names:
                raise Unknowable(f"`{name}` has no readable source")
            packages.add(name.partition(".")[0])
        for name in sorted(packages | {"torch", "transformers"}):
            self.write(name, _version_of(name))
        for file in sorted(_own_files()):
            self.write(Path(file).name, hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest())


def _own_files() -> set[str]:
    """Sources of loaded modules that belong neither to Python, nor to an installed package, nor to holdall."""
    found = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        package = name.partition(".")[0]
        if not isinstance(file, str) or package == "holdall" or not file.endswith(".py"):
            continue
        if not _is_installed(file) and not _is_installed(getattr(sys.modules.get(package), "__file__", None)):
            found.add(file)
    return found


@functools.cache
def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {paths[k] for k in ("stdlib", "platstdlib", "purelib", "platlib") if k in paths}
    found |= set(site.getsitepackages() if hasattr(site, "getsitepackages") else ())
    found.add(site.getusersitepackages() if hasattr(site, "getusersitepackages") else sys.prefix)
    return tuple(sorted({str(Path(p).resolve()) for p in found} | found))


def _is_installed(file: str | None) -> bool:
    """Does a file belong to Python or an installed package, which its version identifies?"""
    return file is not None and file.startswith(_installed())


@functools.cache
def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(package), "__version__", ""))


def _of_torch() -> list[Any]:
    """torch's settings that decide which kernels run."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    found: list[Any] = [sys.version, torch.get_default_dtype(), torch.get_float32_matmul_precision()]
    found += [torch.are_deterministic_algorithms_enabled(), cudnn.enabled, cudnn.benchmark, cudnn.deterministic]
    found += [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()]
    for kind in ("cpu", "cuda"):
        found += [torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)]
    return [*found, torch.is_autocast_cache_enabled(), torch.is_grad_enabled()]
