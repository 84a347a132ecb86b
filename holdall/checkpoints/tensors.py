"""Writes safetensors files directly from tensors and reads them directly into tensors, without a second copy in memory.

The usual writer first copies a whole file's tensors from the GPU to the host; here a host tensor is written as it is, and a
device tensor in pieces. The format is that of https://github.com/huggingface/safetensors: eight bytes with the length of a JSON
header, the header (name -> dtype, shape, begin and end), the bytes.

What a plan keeps on a disk goes from file to file inside the system (`copy_file_range`), so it need not fit into memory. File
systems that can (XFS, Btrfs) share blocks instead of copying them: for this, tensors whose bytes fill whole pages lie on page
boundaries.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import increment_version

from holdall.errors import DiskError, InvalidInput, Unsupported
from holdall.tiers._extents import FilePart, in_files
from holdall.types.layout import PAGE

PIECE = 16 * 2**20  # bytes of a device tensor that are on the host at a time
_CANNOT = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # between these two file systems
_LONGEST_HEADER = 100 * 2**20  # the limit of other readers

_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in _NAMES.items()}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor in a file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # offset in the file
    nbytes: int

    def __str__(self) -> str:
        return describe(self.dtype, self.shape)


def describe(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def save_file(tensors: Mapping[str, torch.Tensor], path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write the tensors one after the other."""
    for name, tensor in tensors.items():
        _check_is_plain(name, tensor)
    on_disk = {name: found for name in tensors if (found := _in_files(tensors[name]))}
    # every tensor lies on a multiple of its element size; of those on a disk, whole pages lie on page boundaries
    order = sorted(tensors, key=lambda n: (-tensors[n].element_size(), bool(on_disk) and tensors[n].nbytes % PAGE != 0, n))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % (PAGE if on_disk else 8))
    with open(path, "wb", buffering=0) as file:
        _write(file, memoryview(len(text).to_bytes(8, "little") + text))
        for name in order:
            if not _copy_inside(file, on_disk.get(name, ())):
                for piece in _pieces(tensors[name].detach()):
                    _write(file, piece)


def _in_files(tensor: torch.Tensor) -> list[FilePart]:
    if tensor.device.type != "cpu" or not tensor.numel() or not tensor.is_contiguous() or not hasattr(os, "copy_file_range"):
        return []
    return in_files(tensor.data_ptr(), tensor.nbytes)


def _copy_inside(file: io.FileIO, parts: Sequence[FilePart]) -> bool:
    """Append parts of other files. False: there are none, or the system does not copy between these two files."""
    begin = at = file.tell()
    for part in parts:
        done = 0
        while done < part.nbytes:
            try:
                count = os.copy_file_range(part.descriptor, file.fileno(), part.nbytes - done, part.offset + done, at)
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise
                count = 0
            if not count:
                file.seek(begin)
                return False
            done, at = done + count, at + count
    file.seek(at)
    return bool(parts)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The entries of a file; raises if it is incomplete."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= _LONGEST_HEADER:
                raise ValueError("it has no header")
            header = json.loads(file.read(length))
            size = os.fstat(file.fileno()).st_size
        header.pop("__metadata__", None)
        found = {name: _entry(path, about, 8 + length) for name, about in header.items()}
    except OSError as error:
        raise InvalidInput(f"cannot read `{path}`: {error.strerror}", hint="continue from another checkpoint") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(f"`{path}` is not a safetensors file: {error}", hint="continue from another checkpoint") from None
    if any(entry.begin + entry.nbytes > size for entry in found.values()):
        raise InvalidInput(f"`{path}` has been cut off", hint="continue from another checkpoint")
    return found


def read_into(entry: TensorEntry, target: torch.Tensor) -> None:
    """Overwrite a tensor of the same shape and dtype with the file's values."""
    assert target.dtype == entry.dtype and tuple(target.shape) == entry.shape
    if not entry.nbytes:
        return
    with torch.no_grad(), open(entry.path, "rb", buffering=0) as file:
        file.seek(entry.begin)
        if not target.is_contiguous():
            whole = torch.empty(entry.shape, dtype=entry.dtype)
            _read(file, _bytes_of(whole), entry)
            target.copy_(whole)
        elif target.device.type == "cpu":
            _read(file, _bytes_of(target), entry)
            increment_version(target)  # so that holders of copies notice the change
        else:
            flat = target.detach().view(-1).view(torch.uint8)
            room = torch.empty(min(PIECE, entry.nbytes), dtype=torch.uint8)
            for part in flat.split(PIECE):
                here = room[: part.numel()]
                _read(file, _bytes_of(here), entry)
                part.copy_(here)


def _entry(path: Path, about: Mapping[str, Any], start: int) -> TensorEntry:
    dtype, shape = _DTYPES[about["dtype"]], tuple(int(n) for n in about["shape"])
    begin, end = (int(at) for at in about["data_offsets"])
    if end - begin != math.prod(shape) * dtype.itemsize or begin < 0 or any(n < 0 for n in shape):
        raise ValueError("its header contradicts itself")
    return TensorEntry(path=path, dtype=dtype, shape=shape, begin=start + begin, nbytes=end - begin)


def _check_is_plain(name: str, tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.dtype not in _CODES:
        kind = f"{type(tensor).__name__} of {str(tensor.dtype).removeprefix('torch.')}"
        raise Unsupported(f"`{name}` is a {kind}, which a plain file cannot hold", hint="save it with the library that made it")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    if not tensor.numel():
        return
    if not tensor.is_contiguous():
        tensor = tensor.cpu().contiguous()  # in this order: the device may be full
    if tensor.device.type == "cpu":
        yield _bytes_of(tensor)
        return
    for part in tensor.view(-1).view(torch.uint8).split(PIECE):
        yield _bytes_of(part.cpu())


def _write(file: io.FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]  # the system writes at most 2 GiB at a time


def _fill(file: io.FileIO, into: memoryview) -> int | None:
    return file.readinto(into)


def _read(file: io.FileIO, into: memoryview, entry: TensorEntry) -> None:
    while into:
        try:
            count = _fill(file, into)
        except OSError as error:
            why = f"cannot read `{entry.path}`: {error.strerror}; what was read before it is loaded already"
            raise DiskError(why, hint="load it again, or continue from another checkpoint") from error
        if not count:
            raise InvalidInput(f"`{entry.path}` has been cut off", hint="continue from another checkpoint")
        into = into[count:]
