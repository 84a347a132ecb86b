"""Context parallelism: every rank has a part of the sequence, and attention is computed together.

    ulysses  heads for positions: an all-to-all gives each rank the whole sequence of some of the heads, and another one gives
             the results back (DeepSpeed-Ulysses, arXiv 2309.14509)
    ring     keys and values travel round a ring of ranks (`attention/rings.py`)
    zigzag   the same, with two pieces of the sequence a rank, so that causal models have equal work on all ranks
    balanced contiguous pieces, and the first ranks help the last ones (`attention/balanced.py`)
    queries  queries are gathered, in as many portions as there are ranks (`attention/queries.py`)

The model is called with the whole batch on every rank. Its forward gets this rank's part of all that lies along the sequence,
the positions of that part, and labels that were shifted before the sequence was cut. Attention is met where modules call
`F.scaled_dot_product_attention`, the loss where they call `F.cross_entropy`: its mean is over the whole sequence. Parameters
are whole on every rank (DTensors, replicated), and their gradients are summed over the ranks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from holdall.errors import Unsupported
from holdall.parallel.attention.balanced import BalancedAttention
from holdall.parallel.attention.queries import QueryAttention
from holdall.parallel.attention.rings import Ring, RingAttention
from holdall.parallel.attention.windows import attend_in_window, is_window, refuse_window, window_of
from holdall.parallel.exchanges import Exchanged, Gathered
from holdall.parallel.parts import Division, Made, avoid_fast_paths, replicate, wrap
from holdall.types import Mesh, Phase, Trace

_SDPA = "aten._scaled_dot_product"
IGNORED = -100  # label of positions without one, in Hugging Face's losses and torch's


def find_attention(trace: Trace) -> tuple[str, ...]:
    """Paths of the modules that call `F.scaled_dot_product_attention`."""
    ops = [op for op in trace.ops if op.site.phase is Phase.FORWARD and op.site.op.startswith(_SDPA)]
    return tuple(dict.fromkeys(op.site.module for op in ops))


def divide_context(
    model: torch.nn.Module, attention: Sequence[str], device_mesh: Any, ways: Sequence[str], *, beside: Division | None = None
) -> Division:
    """Divide the sequence of a model's calls, in place, by the first of the `ways` that is for that. `beside`: the model is
    divided already, by tensors or experts, and those ranks have the same part of their sequences."""
    division = Division(device_mesh)
    if beside is None:
        division.split = 1  # always: gradients are partial sums
        made: Made = {}
        for module in list(model.modules()):
            if next(module.parameters(recurse=False), None) is not None:
                replicate(module, division, made)
        avoid_fast_paths(model)
    else:
        beside.positions = division.group
    way = next(w for w in ways if w in _ATTEND)
    ring = ring_of(division, way)
    for path in attention:
        _attend_together(model.get_submodule(path), ring, way)
    _divide_calls(model, ring)
    return beside or division


def _attend_together(module: torch.nn.Module, ring: Ring, way: str) -> None:
    def forward(plain: Any, *args: Any, **kwargs: Any) -> Any:
        with attention_over(ring, way, module):
            return plain(*args, **kwargs)

    wrap(module, forward)


def ring_of(division: Division, way: str) -> Ring:
    """How the sequence lies over the ranks that divide it."""
    return Ring(division.group, division.rank, division.ranks, zigzag=way == "zigzag")


# attention


def attention_over(ring: Ring, way: str, module: torch.nn.Module | None = None) -> TorchFunctionMode:
    """Inside, `F.scaled_dot_product_attention` is computed together by the ranks. `module`: whose attention it is."""
    return _Replaced({F.scaled_dot_product_attention: _attention(way, ring, module)})


class _Replaced(TorchFunctionMode):
    """Some functions of torch are others inside."""

    def __init__(self, others: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._others = others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._others.get(func, func)(*args, **(kwargs or {}))


def _attention(way: str, ring: Ring, module: torch.nn.Module | None) -> Callable[..., torch.Tensor]:
    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: ARG001
    ) -> torch.Tensor:
        size = window_of(module, query.shape[2] * ring.ranks)
        if size and attn_mask is not None and is_window(attn_mask, size):
            attn_mask, is_causal = None, True
        if attn_mask is not None or dropout_p:
            what = "has a mask of its own" if attn_mask is not None else "has dropout"
            raise Unsupported(f"attention {what}, and is not divided along the sequence then", hint='use mesh={"tp": ...}')
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if not size:
            return _ATTEND[way](query, key, value, ring, is_causal, scale)
        if way != "ulysses" or not is_causal:
            raise refuse_window(way, is_causal=is_causal)
        return _ulysses(query, key, value, ring, is_causal, scale, size)

    return scaled_dot_product_attention


def _ulysses(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: Ring, causal: bool, scale: float, window: int = 0
) -> torch.Tensor:
    if q.shape[1] % ring.ranks:
        raise Unsupported(f"{q.shape[1]} heads cannot be divided over {ring.ranks} ranks", hint='use shard="ring"')
    if k.shape[1] % ring.ranks:  # each rank needs whole heads of keys and values
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    q, k, v = (Exchanged.apply(t, 1, 2, ring.group) for t in (q, k, v))
    if window:
        out = attend_in_window(q, k, v, window, scale)
    else:
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=gqa)
    return Exchanged.apply(out, 2, 1, ring.group)  # type: ignore[no-any-return]


def _wide(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same in float32 or wider: what ranks have found is merged by sums of exponentials, which 16 bits are too few for."""

    @functools.wraps(attend)
    def attending(q: torch.Tensor, *others: Any) -> torch.Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        return attend(q.to(dtype), *(t.to(dtype) if isinstance(t, torch.Tensor) else t for t in others)).to(q.dtype)

    return attending


@_wide
def _around_ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: Ring, causal: bool, scale: float) -> torch.Tensor:
    return RingAttention.apply(q.contiguous(), k.contiguous(), v.contiguous(), ring, causal, scale)  # type: ignore[no-any-return]


@_wide
def _balanced(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: Ring, causal: bool, scale: float) -> torch.Tensor:
    if not causal or ring.ranks % 2:
        what = f"{ring.ranks} ranks" if causal else "attention in both directions"
        raise Unsupported(f'shard="balanced" is for causal models and even numbers of ranks, not for {what}', hint='use "ring"')
    return BalancedAttention.apply(q.contiguous(), k.contiguous(), v.contiguous(), ring, scale)  # type: ignore[no-any-return]


@_wide
def _by_queries(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: Ring, causal: bool, scale: float) -> torch.Tensor:
    return QueryAttention.apply(q, k, v, ring, causal, scale, ring.ranks)  # type: ignore[no-any-return]


_ATTEND = {
    "ulysses": _ulysses,
    "ring": _around_ring,
    "zigzag": _around_ring,
    "balanced": _balanced,
    "queries": _by_queries,
}


def attend_by_heads_and_context(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: Any, ring: Ring, causal: bool, scale: float
) -> torch.Tensor:
    """LoongTrain's attention in two dimensions: an all-to-all over the group `heads`, and a ring over the others."""
    q, k, v = (Exchanged.apply(t, 1, 2, heads) for t in (q, k, v))
    return Exchanged.apply(_around_ring(q, k, v, ring, causal, scale), 2, 1, heads)  # type: ignore[no-any-return]


# calls of the model


def _divide_calls(model: torch.nn.Module, ring: Ring) -> None:
    """Let the model's own forward get this rank's part of the sequence."""
    signature = inspect.signature(model.forward)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())

    def forward(plain: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        given = {name: value for name, value in bound.items() if name != "kwargs"} | bound.get("kwargs", {})
        with _Replaced({F.cross_entropy: _mean_over_ranks(ring)}):
            return plain(**_parts(model, given, ring, signature.parameters, takes_any))

    wrap(model, forward)


def _parts(model: torch.nn.Module, given: dict[str, Any], ring: Ring, names: Any, takes_any: bool) -> dict[str, Any]:
    """The arguments of a call, of this rank's part of the sequence."""
    along = {n: t for n, t in given.items() if isinstance(t, torch.Tensor) and t.dim() >= 2}
    length = next((t.shape[1] for t in along.values()), 0)
    pieces = ring.ranks * (2 if ring.zigzag else 1)
    if not length or length % pieces:
        raise Unsupported(
            f"a sequence of {length} positions cannot be divided into {pieces} pieces",
            hint=f"pass tensors of (batch, positions, ...), with a multiple of {pieces} positions",
        )
    mask = along.pop("attention_mask", None)
    if mask is not None and not bool((mask == 1).all()):
        raise Unsupported("a mask of padding is not divided along the sequence", hint="pack sequences without padding")
    first = next(iter(along.values()))
    if "position_ids" in names and "position_ids" not in along:
        along["position_ids"] = torch.arange(length, device=first.device).unsqueeze(0)
    if "labels" in along and _shifts(model) and takes_any and "shift_labels" not in along:
        labels = F.pad(along["labels"], (0, 1), value=IGNORED)[:, 1:]
        along |= {"labels": labels, "shift_labels": labels}
    changed = {name: own_positions(t, ring) if t.shape[1] == length else t for name, t in along.items()}
    if mask is not None or {"attention_mask", "position_ids"} <= set(names):  # one sequence, though its positions may leap
        changed["attention_mask"] = first.new_ones((first.shape[0], length // ring.ranks), dtype=torch.long)
    return {**given, **changed}


def own_positions(t: torch.Tensor, ring: Ring, dim: int = 1) -> torch.Tensor:
    """This rank's part of a sequence, which lies along a dimension."""
    pieces = t.chunk(ring.ranks * (2 if ring.zigzag else 1), dim)
    return torch.cat([pieces[n] for n in ring.pieces(ring.rank)], dim)


def own_part(mesh: Mesh, way: str, rank: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """Takes a rank's positions out of a tensor of the whole sequence, which lies along a dimension."""
    ring = Ring(None, mesh.place(rank, "cp"), mesh.dim("cp").size, zigzag="zigzag" in way.split("+"))
    return lambda t, dim: own_positions(t, ring, dim)


def all_positions(t: torch.Tensor, ring: Ring) -> torch.Tensor:
    """The sequence of which every rank has a part. All go on alike, and backward is each one's part of the gradient."""
    gathered = Gathered.apply(t, 1, ring.group, False)
    order = [n for rank in range(ring.ranks) for n in ring.pieces(rank)]
    if order == sorted(order):
        return gathered  # type: ignore[no-any-return]
    pieces = gathered.chunk(len(order), 1)
    return torch.cat([pieces[order.index(n)] for n in range(len(order))], 1)


def _shifts(model: torch.nn.Module) -> bool:
    """Does the model itself compare each position with the label of the next, as Hugging Face's causal ones do?"""
    return hasattr(model, "loss_function") and "CausalLM" in (getattr(model, "loss_type", None) or "ForCausalLM")


# the loss


class _TotalOfRanks(torch.autograd.Function):
    """The sum over ranks of what each has computed of a loss; each goes backward through its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]  # noqa: ARG004
        return grad, None


def _mean_over_ranks(ring: Ring) -> Callable[..., torch.Tensor]:
    def cross_entropy(
        input: torch.Tensor,  # noqa: A002
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = IGNORED,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:
        given = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        if weight is not None or size_average is not None or reduce is not None or target.is_floating_point():
            raise Unsupported("a weighted loss is not divided along the sequence", hint='use mesh={"tp": ...}')
        if reduction == "none":
            return F.cross_entropy(input, target, reduction="none", **given)  # type: ignore[arg-type]
        total = F.cross_entropy(input, target, reduction="sum", **given)  # type: ignore[arg-type]
        if reduction == "mean":
            count = (target != ignore_index).sum()
            dist.all_reduce(count, group=ring.group)
            total = total / count
        return _TotalOfRanks.apply(total, ring.group)  # type: ignore[no-any-return]

    return cross_entropy
