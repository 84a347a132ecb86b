"""Sizes of buffers, computed once: the simulator predicts with them and the runtime allocates by them. Standard library only.

flat buffer    tensors one after the other, each at a boundary of ALIGN bytes (weights, gradients, states of a unit)
update slot    device memory that a unit's states pass through: states + masters + gradients + new weights + work space
allocation     what CUDA's caching allocator hands out for a request: rounded up to BLOCK bytes; other devices hand out
               what was asked for
"""

from __future__ import annotations

from collections.abc import Iterable

ALIGN = 256  # bytes; kernels read from such boundaries at full speed
BLOCK = 512  # bytes; the unit of CUDA's caching allocator
PIECE = 1 << 26  # elements of a half-precision gradient that are converted to fp32 at a time: bounds the work space


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


def widened_bytes(elements: int) -> int:
    """Work space to convert a unit's half-precision gradients to fp32, a piece at a time."""
    return 4 * min(PIECE, elements)


def update_slot_bytes(*, states: int, masters: int, grads: int, staged: int, workspace: int) -> int:
    """Device memory that one unit needs to be updated there while its states live on the host.

    `masters`: fp32 weights that travel with the states. `staged`: new working weights that go back to the host.
    `workspace`: temporaries of the update, `widened_bytes` among them.
    """
    return states + masters + grads + staged + workspace
