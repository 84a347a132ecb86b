"""Memory of the classic transformer in closed form: an estimate to compare a trace with.

Sources. *Korthikanti*: "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198. *Survey*: Tang et
al., "Training large-scale language models with limited GPU memory: a survey", FITEE 2025.

Symbols, as in both: b sequences of s tokens, hidden size h, a heads, l layers, vocabulary V. The classic block has a 4h-wide
GELU MLP, unfused attention and dropout; SwiGLU models and fused attention keep other tensors: use a trace for them.
Saved tensors of one block, in elements of the compute dtype and in dropout masks of one byte:

    two layer norms: inputs                    2 bsh
    attention: input, Q, K, V, context         5 bsh             output's mask       1 bsh
    attention: softmax, dropped softmax        2 b s^2 a         softmax's mask      1 b s^2 a
    MLP: input, GELU's input and output        1 + 4 + 4 bsh     output's mask       1 bsh
    ------------------------------------------------------------------------------------------
    sum                                        16 bsh + 2 b s^2 a                    2 bsh + 1 b s^2 a

At two bytes an element this is the well-known 34 bsh + 5 b s^2 a; at four bytes it is 66 bsh + 9 b s^2 a.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdall.errors import unknown_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A classic transformer; `heads` matters for activations only."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int = 0


BERT_LARGE = Shape(layers=24, hidden=1024, heads=16, vocabulary=30522)
GPT3_6_7B = Shape(layers=32, hidden=4096, heads=32, vocabulary=50257)

STATE_BYTES = {  # recipe -> bytes per parameter of weights, gradients and optimizer states together
    "sgd-fp32": 4 + 4,
    "momentum-fp32": 4 + 4 + 4,
    "adam-fp32": 4 + 4 + 4 + 4,  # weight, gradient, two moments; autocast keeps the same
    "adam-mixed": 2 + 2 + 4 + 4 + 4,  # half weight and gradient; float32 master and moments (ZeRO's 16)
    "adam-mixed-fp32-grad": 2 + 4 + 4 + 4 + 4,  # the gradient is summed in float32 (Megatron-LM's 18)
    "adam-bf16": 2 + 2 + 2 + 2,  # everything in bfloat16, no master
    "adam-8bit": 2 + 2 + 4 + 1 + 1,  # as mixed, with quantised moments; their scales are left out
}


def parameters(shape: Shape) -> int:
    """l(12h^2 + 13h) + Vh, as the survey counts: weights, biases and norms of the blocks, and one (tied) embedding.

    Positions and the last norm are left out: 0.6 % of GPT-2 small, less of anything larger.
    """
    h = shape.hidden
    return shape.layers * (12 * h * h + 13 * h) + shape.vocabulary * h


def state_bytes(count: int, recipe: str = "adam-mixed") -> int:
    """Bytes of weights, gradients and optimizer states of `count` parameters, on one rank that shards nothing."""
    if recipe not in STATE_BYTES:
        raise unknown_name("recipe", recipe, STATE_BYTES)
    return count * STATE_BYTES[recipe]


def activation_bytes(shape: Shape, *, batch: int, seq: int, element: int = 2) -> int:
    """Bytes that the blocks keep for backward, with one-byte masks; `element`: bytes of the compute dtype.

    At element 2 it is Korthikanti's (34 bsh + 5 b s^2 a) l. Embedding, head and loss are left out.
    """
    rows, squares = _units(shape, batch, seq)
    return shape.layers * (rows * (16 * element + 2) + squares * (2 * element + 1))


def survey_activation_bytes(shape: Shape, *, batch: int, seq: int, element: int = 4) -> int:
    """The survey's figures: the half-precision *bytes* of a block read as *elements*, times the bytes of one element.

    So come its 8.25 GiB for BERT-Large and 39.0 GiB for GPT-3 6.7B (b=16, s=128, fp32): exactly 4 (34 bsh + 5 b s^2 a) l.
    The 34 and the 5 already hold two bytes an element, so a real fp32 block keeps 66 bsh + 9 b s^2 a: 3.94 and 18.75 GiB there.
    Kept to compare with the published table; to plan, use `activation_bytes`.
    """
    return element * activation_bytes(shape, batch=batch, seq=seq, element=2)


def selective_bytes(shape: Shape, *, batch: int, seq: int, element: int = 2) -> int:
    """Korthikanti's selective recompute: the part that grows with s^2 is dropped, 34 bsh l at two bytes an element."""
    rows, _ = _units(shape, batch, seq)
    return shape.layers * rows * (16 * element + 2)


def full_recompute_bytes(shape: Shape, *, batch: int, seq: int, element: int = 2) -> int:
    """Only the input of each block is kept: 2 bsh l at two bytes per element. The block being recomputed is extra."""
    rows, _ = _units(shape, batch, seq)
    return shape.layers * rows * element


def parallel_activation_bytes(
    shape: Shape, *, batch: int, seq: int, ranks: int, sequence: bool = False, selective: bool = False
) -> float:
    """Korthikanti's half-precision bytes of one tensor-parallel rank of `ranks`.

    Tensor parallelism splits 24 bsh + 5 b s^2 a of them and leaves 10 bsh whole (norms, their outputs, residual dropouts);
    `sequence` parallelism splits those too. `selective` drops the part with s^2.
    """
    rows, squares = _units(shape, batch, seq)
    split = 24 * rows + (0 if selective else 5 * squares)
    whole = 10 * rows
    return shape.layers * ((split + whole) / ranks if sequence else split / ranks + whole)


def _units(shape: Shape, batch: int, seq: int) -> tuple[int, int]:
    """(bsh, b s^2 a): every tensor of a block is a multiple of one of them."""
    return batch * seq * shape.hidden, batch * seq * seq * shape.heads
