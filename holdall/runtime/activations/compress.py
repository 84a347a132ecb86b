"""Compresses the saved tensors of a block to a few bits per element until backward needs them.

Saved tensors are grouped by storage and codec. After the block's forward each storage is encoded and freed. The first unpack in
backward decodes it and frees the codes; the decoded storage then lives as long as the original would have. Forward values are
exact. The codes can also be offloaded to another tier.

Ownership: autograd holds one `_Held` per saved tensor, each `_Held` holds a `_Coded`, and that holds the storage, then its
codes, then the decoded storage. Nothing else refers to them after the block's forward.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_iter

from holdall.codecs import Codec, seed_from
from holdall.runtime.activations.offload import Forward, OffloadedEntry, OffloadedGroup
from holdall.runtime.activations.resident import CallSaves
from holdall.types import Mesh

FLOATS = ("float32", "bfloat16", "float16")


def worth_coding(dtype: str, nbytes: int, itemsize: int, codec: Codec) -> bool:
    """Are the codes of a storage smaller than the storage? Planner and runtime share this rule."""
    return dtype in FLOATS and codec.nbytes(nbytes // itemsize) < nbytes


@dataclass
class Compression:
    """How the saved tensors of a block are compressed. Uses a generator of its own, so the model's random numbers do not
    change.
    """

    codecs: Mapping[int, Codec]  # index of a saved tensor, in the order in which autograd packs them -> its codec
    seed: int = 0
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)


def seed_of(block: str, seed: int, mesh: Mesh | None = None) -> int:
    """A seed per block, the same in every run. Ranks have their own, but for those that divide tensors: what all of these have
    must be rounded alike, or their copies of a parameter would drift apart."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    rank = rank if mesh is None else mesh.first_along(rank, ("tp",))
    return zlib.crc32((f"{seed}:{block}:{rank}" if rank else f"{seed}:{block}").encode())


class _Coded:
    """One storage with one codec: original, then encoded (possibly offloaded), then decoded."""

    __slots__ = ("_away", "_codec", "_codes", "_dtype", "_size", "storage")

    def __init__(self, storage: torch.UntypedStorage, dtype: torch.dtype, codec: Codec) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self._dtype = dtype
        self._codec = codec
        self._size = storage.nbytes() // dtype.itemsize
        self._codes: torch.UntypedStorage | None = None
        self._away: OffloadedEntry | None = None

    @torch.no_grad()
    def encode(self, generator: torch.Generator) -> None:
        """Replace the storage by its codes."""
        assert self.storage is not None
        flat = torch.empty(0, dtype=self._dtype, device=self.storage.device).set_(self.storage)
        self._codes = self._codec.encode(flat, generator).untyped_storage()
        self.storage = None

    def park(self, group: OffloadedGroup) -> OffloadedEntry:
        """Pass the codes to a group that offloads them."""
        assert self._codes is not None
        self._away, self._codes = OffloadedEntry(self._codes, group), None
        return self._away

    @torch.no_grad()
    def decode(self) -> torch.UntypedStorage:
        if self.storage is None:
            if self._away is not None:
                self._codes, self._away = self._away.fetch(), None
            assert self._codes is not None
            codes = torch.empty(0, dtype=torch.uint8, device=self._codes.device).set_(self._codes)
            self.storage = self._codec.decode(codes, self._size, self._dtype).untyped_storage()
            self._codes = None
        return self.storage


class _Held:
    """Stands for a saved tensor in autograd's graph: a view of an encoded storage."""

    __slots__ = ("coded", "like")

    def __init__(self, coded: _Coded, tensor: torch.Tensor) -> None:
        self.coded = coded
        self.like = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())


def _unpack(held: Any) -> torch.Tensor:
    if isinstance(held, torch.Tensor):
        return held
    dtype, shape, stride, offset = held.like
    storage = held.coded.decode()
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)


def compress_saved(
    how: Compression, group: OffloadedGroup | None, saves: CallSaves, forward: Forward, args: Any, kwargs: Any
) -> Any:
    """Run a block's forward and compress what autograd saves. `group`: offloads the codes to another tier."""
    coded: dict[tuple[int, Codec], _Coded] = {}

    def pack(tensor: torch.Tensor) -> Any:
        number = saves.number(tensor)
        if number is None:
            return tensor
        codec = how.codecs.get(number)
        storage = tensor.untyped_storage()
        name = str(tensor.dtype).removeprefix("torch.")
        if codec is None or not worth_coding(name, storage.nbytes(), tensor.element_size(), codec):
            return tensor
        key = (storage._cdata, codec)
        if key not in coded:
            coded[key] = _Coded(storage, tensor.dtype, codec)
        return _Held(coded[key], tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        out = forward(*args, **kwargs)
    outputs = {t.untyped_storage()._cdata for t in tree_iter(out) if isinstance(t, torch.Tensor)}
    leaving = [one for (key, _), one in coded.items() if key not in outputs]
    coded.clear()  # autograd keeps `pack` alive as long as any saved tensor of the block
    seed = seed_from(how.generator)
    for n, one in enumerate(leaving):  # each by itself: experts on ranks that divide tensors have unequal numbers of tokens
        one.encode(torch.Generator().manual_seed(seed + n))
    if group is not None:
        group.leave([one.park(group) for one in leaving])
    return out
