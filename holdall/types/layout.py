"""Sizes of buffers, computed once: the simulator predicts with them and the runtime allocates by them. Standard library only.

flat buffer    tensors one after the other, each at a boundary of ALIGN bytes (weights, gradients, states of a unit)
update slot    device memory that a unit's states pass through: states + masters + gradients + new weights + work space
stretch        a part of a unit's masters, and the same part of each of its states, that is read from a disk, updated and
               written back while others are on their way; it takes one of a few buffers in host memory
allocation     what CUDA's caching allocator hands out for a request: rounded up to BLOCK bytes; other devices hand out
               what was asked for
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

ALIGN = 256  # bytes; kernels read from such boundaries at full speed
PAGE = 4096  # bytes; disks are read and written in multiples of it past the page cache
BLOCK = 512  # bytes; the unit of CUDA's caching allocator
PIECE = 1 << 26  # elements of a half-precision gradient that are converted to fp32 at a time: bounds the work space
ELEMENTWISE_NAMES = frozenset(  # classes of `torch.optim` that treat each element separately: they can be updated in stretches
    ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def flat_bytes(sizes: Iterable[int]) -> int:
    """Bytes of a flat buffer that holds tensors of these sizes."""
    return sum(round_up(size, ALIGN) for size in sizes)


def block_of(device: str) -> int:
    """The unit of this kind of device's allocator ("cuda", "cpu")."""
    return BLOCK if device == "cuda" else 1


def allocated_bytes(size: int, device: str) -> int:
    """Bytes that this kind of device's allocator hands out for a request."""
    return round_up(size, block_of(device))


_ELEMENT = {"float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}


def element_bytes(shape: Sequence[int], dtype: str) -> int:
    """Bytes of a tensor's elements; of a type that is not listed, each takes one."""
    return prod(shape) * _ELEMENT.get(dtype, 1)


def leading_bytes(sizes: Sequence[int], nbytes: int, *, smallest_first: bool) -> list[int]:
    """Of storages laid end to end, largest or smallest first, how much of each is within the first `nbytes` bytes."""
    order = sorted(range(len(sizes)), key=lambda n: sizes[n] if smallest_first else -sizes[n])
    found = [0] * len(sizes)
    for n in order:
        found[n] = min(sizes[n], nbytes)
        nbytes -= found[n]
    return found


def widened_bytes(elements: int) -> int:
    """Work space to convert a unit's half-precision gradients to fp32, a piece at a time."""
    return 4 * min(PIECE, elements)


def update_slot_bytes(*, states: int, masters: int, grads: int, staged: int, workspace: int) -> int:
    """Device memory that one unit needs to be updated there while its states live on the host.

    `masters`: fp32 weights that travel with the states. `staged`: new working weights that go back to the host.
    `workspace`: temporaries of the update, `widened_bytes` among them.
    """
    return states + masters + grads + staged + workspace


def stretches(masters: int, stretch: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of every stretch of a flat buffer of so many bytes."""
    size = round_up(stretch, PAGE)
    for begin in range(0, masters, size):
        yield begin, min(begin + size, masters)


def stretch_bytes(masters: Iterable[int], stretch: int) -> int:
    """Room for one stretch of the masters, or of one state, of any of these units."""
    return min(round_up(stretch, PAGE), round_up(max(masters, default=0), PAGE))
