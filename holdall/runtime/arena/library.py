"""`arena.cpp` as a library: compiled on first use against the headers of the torch that runs."""

from __future__ import annotations

import ctypes
import subprocess
from functools import cache
from pathlib import Path

import torch

from holdall.errors import Unsupported
from holdall.updates.host_library import COMPILERS, compile_source, find_compiler

SOURCE = Path(__file__).with_name("arena.cpp")
_ARRAY = ctypes.POINTER(ctypes.c_int64)
_FLAGS = ctypes.POINTER(ctypes.c_uint8)
_HANDLE, _NUMBER, _INT, _NOTHING = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, None
_TABLE = (_NUMBER, _ARRAY, _ARRAY, _FLAGS)
_FUNCTIONS = {  # name -> (result, arguments)
    "message": (ctypes.c_char_p, ()),
    "make": (_HANDLE, (_INT, _INT, _INT, _NUMBER, _NUMBER, _NUMBER, *_TABLE)),
    "drop": (_NOTHING, (_HANDLE,)),
    "base": (_HANDLE, (_HANDLE,)),
    "replan": (_NOTHING, (_HANDLE, *_TABLE)),
    "poison": (_NOTHING, (_HANDLE, _HANDLE, _HANDLE)),
    "begin": (_NOTHING, (_HANDLE, _INT)),
    "end": (_NOTHING, (_HANDLE,)),
    "counts": (_NOTHING, (_HANDLE, _ARRAY)),
    "recorded": (_NUMBER, (_HANDLE, _ARRAY, _NUMBER)),
    "take": (_NUMBER, (_HANDLE, _NUMBER)),
    "give": (_NOTHING, (_HANDLE, _NUMBER)),
    "used_on": (_INT, (_HANDLE, _HANDLE, _NUMBER, _INT)),
    "hook": (_INT, (_HANDLE,)),
    "unhook": (_NOTHING, (_HANDLE,)),
    "seen": (_NUMBER, (_HANDLE,)),
    "alive": (_NUMBER, ()),
}


@cache
def load() -> ctypes.CDLL:
    """The library, with its functions declared; `Unsupported` if it cannot be compiled here."""
    compiler = find_compiler()
    if compiler is None:
        raise _unsupported(f"no C++ compiler is on the path (of {', '.join(COMPILERS)})")
    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    libraries = (f"-L{root / 'lib'}", "-lc10", f"-Wl,-rpath,{root / 'lib'}")
    found, reason = None, ""
    for standard in ("-std=c++17", "-std=c++20"):  # newer headers ask for the later one
        flags = (standard, "-O2", abi, f"-I{root / 'include'}", "-pthread")
        try:
            path = compile_source(SOURCE, compiler, flags, depends_on=torch.__version__, libraries=libraries)
            found = ctypes.CDLL(str(path))
        except (OSError, subprocess.SubprocessError, RuntimeError) as error:
            reason = reason or str(error)
            continue
        break
    if found is None:
        raise _unsupported(reason)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(found, f"holdall_arena_{name}")
        function.restype, function.argtypes = result, arguments
    return found


def _unsupported(reason: str) -> Unsupported:
    return Unsupported(f"a planned layout cannot be used here: {reason}", hint="leave `layout` out")


def table(sizes: tuple[int, ...], offsets: tuple[int, ...], brief: tuple[int, ...]) -> tuple[object, ...]:
    """The arguments that describe planned requests."""
    count = len(sizes)
    flags = (ctypes.c_uint8 * count)()
    for number in brief:
        flags[number] = 1
    return count, (ctypes.c_int64 * count)(*sizes), (ctypes.c_int64 * count)(*offsets), flags
