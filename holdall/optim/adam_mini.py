"""Adam-mini: Adam with one second moment for each block of a parameter, the blocks following the Hessian's.

Zhang et al., "Adam-mini: Use Fewer Learning Rates To Gain More", ICLR 2025, arXiv 2406.16793. Blocks are declared by the
group (`block`), and `AdamMini.groups(model)` declares them from the modules: query and key weights by head, all other weights
by output row, norms as a whole, biases element by element. Experts that share one 3-D parameter have the rows of each expert.
Attention that fuses query, key and value is split where its layout is known (`nn.MultiheadAttention`) and refused elsewhere,
unless declared.

State of an n x m matrix: the first moment, nm numbers, and one for each block. Temporaries: two tensors of the parameter's
size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from holdall.errors import InvalidInput
from holdall.optim._math.per_parameter import Group, PerParameter, State, compute_dtype

# "element"; "row": a block an output; "column": the same for weights stored as (inputs, outputs); "tensor"; n: of n rows,
# as heads are; ((rows, n), ...): stretches of rows, each in blocks of n; "expert_row": the rows of each matrix of a stack
# (experts, outputs, inputs), "column" the columns of each; None: rows of matrices and of stacks, elements of vectors
Block = str | int | tuple[tuple[int, int], ...] | None

_QUERIES_AND_KEYS = {"q_proj", "k_proj", "wq", "wk", "query", "key", "q", "k", "to_q", "to_k", "q_lin", "k_lin"}
_FUSED = {"qkv", "qkv_proj", "c_attn", "query_key_value", "wqkv", "in_proj", "attn_qkv", "kv_proj", "to_qkv", "w_pack"}
_NORMS = ("norm", "rms")  # in a class's name
_HINT = 'declare it: `AdamMini.groups(model, declare={"name.of.weight": ((rows, rows_per_block), ...)})`'


class AdamMini(PerParameter):
    name: ClassVar[str] = "adam_mini"
    paper: ClassVar[str] = "Zhang et al. 2025, arXiv 2406.16793"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        block: Block = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **unknown: Any,
    ) -> None:
        """With `block="element"` it is AdamW, bit for bit."""
        options = {"lr": lr, "block": block, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options, unknown)

    @staticmethod
    def groups(model: nn.Module, *, declare: Mapping[str, Block] | None = None, **options: Any) -> list[Group]:
        """A group for each kind of block of a model; norms and biases do not decay. `declare`: blocks by parameter's name."""
        return _declared_groups(model, dict(declare or {}), options)

    def _check(self, group: Group) -> None:
        for p in group["params"]:
            _stretches(p.shape, group["block"])

    def _bytes(self, p: torch.Tensor, group: Group) -> int:
        return compute_dtype(p).itemsize * (p.numel() + _count(p.shape, group["block"]))

    def _update(self, value: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        beta1, beta2 = group["betas"]
        lr, block = float(group["lr"]), group["block"]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(value)
            whole = _count(value.shape, block) == value.numel()
            state["exp_avg_sq"] = torch.zeros_like(value) if whole else value.new_zeros(_count(value.shape, block))
        state["step"] = step = state.get("step", 0) + 1
        moment, square = state["exp_avg"], state["exp_avg_sq"]
        if group["weight_decay"]:
            value.mul_(1 - lr * group["weight_decay"])
        moment.lerp_(grad, 1 - beta1)
        if square.shape == value.shape:
            square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        else:
            square.mul_(beta2).add_(_block_means(grad.square(), block), alpha=1 - beta2)
        root = (square.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
        if root.shape != value.shape:
            root = _spread(root, value, block)
        value.addcdiv_(moment, root, value=-lr / (1 - beta1**step))


def _usual(shape: torch.Size, block: Block) -> Block:
    """The block for `None`; 3-D parameters are taken for stacks of experts."""
    if block is not None:
        return block
    return "expert_row" if len(shape) == 3 else "row" if len(shape) >= 2 else "element"


def _averaged(block: Block) -> int | None:
    """The dimension over which a block of a stack of matrices is averaged; None for other blocks."""
    return {"expert_row": -1, "column": -2}.get(block) if isinstance(block, str) else None


def _stretches(shape: torch.Size, block: Block) -> tuple[tuple[int, int], ...]:
    """((rows, rows per block), ...) of a parameter by its first dimension; empty: elements, stacks, or the whole."""
    block = _usual(shape, block)
    if block == "row" and shape:
        return ((shape[0], 1),)
    if block in ("element", "tensor", "row") or (_averaged(block) and len(shape) >= 2):
        return ()
    if isinstance(block, int) and shape:
        block = ((shape[0], block),)
    if not isinstance(block, (tuple, list)) or any(n < 1 or rows % n for rows, n in block):
        raise InvalidInput(f"`block` is {block!r}, which does not divide a parameter of shape {tuple(shape)}", hint=_HINT)
    if not shape or sum(rows for rows, _ in block) != shape[0]:
        raise InvalidInput(f"`block` {block!r} does not cover all rows of a parameter of shape {tuple(shape)}", hint=_HINT)
    return tuple((rows, n) for rows, n in block)


def _count(shape: torch.Size, block: Block) -> int:
    """The number of blocks."""
    stretches = _stretches(shape, block)
    if stretches:
        return sum(rows // n for rows, n in stretches)
    if block == "tensor":
        return 1
    averaged = _averaged(_usual(shape, block))
    return shape.numel() // (shape[averaged] if averaged else 1)


def _block_means(square: torch.Tensor, block: Block) -> torch.Tensor:
    """The mean of each block, in shape (blocks,)."""
    stretches = _stretches(square.shape, block)
    averaged = _averaged(_usual(square.shape, block))
    if averaged:
        return square.mean(dim=averaged).view(-1)
    if not stretches:
        return square.mean().view(1)
    parts = square.split([rows for rows, _ in stretches])
    return torch.cat([part.reshape(rows // n, -1).mean(dim=1) for part, (rows, n) in zip(parts, stretches, strict=True)])


def _spread(values: torch.Tensor, like: torch.Tensor, block: Block) -> torch.Tensor:
    """One value per block, broadcast to the block's elements."""
    stretches = _stretches(like.shape, block)
    averaged = _averaged(_usual(like.shape, block))
    if averaged:
        return values.view(*like.shape[:averaged], 1, *like.shape[like.dim() + averaged + 1 :])
    if not stretches:
        return values
    parts = values.split([rows // n for rows, n in stretches])
    by_row = torch.cat([part.repeat_interleave(n) for part, (_, n) in zip(parts, stretches, strict=True)])
    return by_row.view(-1, *[1] * (like.dim() - 1))


def _declared_groups(model: nn.Module, declare: dict[str, Block], options: dict[str, Any]) -> list[Group]:
    groups: dict[tuple[Block, bool], Group] = {}
    seen: set[int] = set()
    for name, p, found in _walk(model):
        if id(p) in seen or not p.requires_grad:  # tied weights are declared where they come first
            continue
        seen.add(id(p))
        block, decays = found() if name not in declare else (_plain(declare[name]), p.dim() >= 2)
        group = groups.setdefault((block, decays), {**options, "params": [], "block": block})
        group["params"].append(p)
        if not decays:
            group["weight_decay"] = 0.0
    return list(groups.values())


def _plain(block: Block) -> Block:
    """Lists, as read from a file, converted to tuples."""
    return tuple((rows, n) for rows, n in block) if isinstance(block, (list, tuple)) else block


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Any]]:
    """Every parameter with its name and a function that returns (its block, whether weight decay applies)."""
    modules = dict(model.named_modules())
    for path, module in modules.items():
        parent = modules[path.rpartition(".")[0]] if path else None
        for own, p in module.named_parameters(recurse=False):
            name = f"{path}.{own}" if path else own
            yield name, p, lambda n=name, q=p, m=module, up=parent: _block_of(n, q, m, up)


def _block_of(name: str, p: nn.Parameter, module: nn.Module, parent: nn.Module | None) -> tuple[Block, bool]:
    """The block of a parameter by the module that owns it, and whether weight decay is for it."""
    kind = type(module).__name__.lower()
    *_, called, own = ("", *name.split("."))
    if any(word in kind for word in _NORMS):
        return "tensor", False
    if p.dim() < 2 or own.endswith("bias"):  # experts' biases lie in a matrix
        return "element", False
    if isinstance(module, nn.MultiheadAttention):
        width, head = module.embed_dim, module.head_dim
        if own == "in_proj_weight":
            return ((width, head), (width, head), (width, 1)), True
        return (head if own in ("q_proj_weight", "k_proj_weight") else "row"), True
    if called.lower() in _FUSED:
        hint = f'declare={{"{name}": "column"}} gives each output its own' if kind == "conv1d" else _HINT
        raise InvalidInput(f"`{name}` seems to hold query, key and value in one tensor, in an unknown order", hint=hint)
    if called.lower() in _QUERIES_AND_KEYS:
        return _head_size(name, parent), True
    if p.dim() == 3 and "conv" not in kind:
        return ("column" if _is_transposed(own, p, module) else "expert_row"), True
    # Hugging Face's Conv1D is a linear layer stored the other way round
    return ("column" if kind == "conv1d" and p.dim() == 2 else "row"), True


def _is_transposed(own: str, p: nn.Parameter, experts: nn.Module) -> bool:
    """Is a stack of experts' weights (experts, inputs, outputs), by the module's attribute or by the model's width?"""
    said = getattr(experts, "is_transposed", None)
    if isinstance(said, bool):
        return said
    width = getattr(experts, "hidden_dim", getattr(experts, "hidden_size", None))
    inner, outer = (1, 2) if "down" in own else (2, 1)  # the dimension that is the model's width, if outputs come first
    return p.shape[inner] != width == p.shape[outer]


def _head_size(name: str, attention: nn.Module | None) -> int:
    """Rows of one head, as the attention module or its config says."""
    for attribute in ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim"):
        size = getattr(attention, attribute, None)
        if isinstance(size, int):
            return size
    config = getattr(attention, "config", None)
    width, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    if isinstance(width, int) and isinstance(heads, int):
        return width // heads
    raise InvalidInput(f"the attention of `{name}` does not say how large a head is", hint=_HINT)
