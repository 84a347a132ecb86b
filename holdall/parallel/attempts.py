"""Divides a model for a trace of one of its ranks (tensors, sequence, experts): finds what can be divided, and where something
turns out not to be, tries again without it."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch

from holdall.errors import HoldallError, Unsupported
from holdall.parallel.checks.sums import PartialSums
from holdall.parallel.context import find_attention
from holdall.parallel.experts import find_experts
from holdall.parallel.parts import Division
from holdall.parallel.regions import common_ancestor, find_readers, find_regions, find_vocabulary
from holdall.parallel.ways import divide_by, split_way
from holdall.types import Mesh, MeshDim, Op, Phase, TensorInfo, Trace
from holdall.types.info import ShardedStep, TensorRegion


class RankStep(Protocol):
    """A step of one rank."""

    @property
    def ops(self) -> Sequence[Op]: ...
    @property
    def tensors(self) -> Mapping[int, TensorInfo]: ...


T = TypeVar("T", bound=RankStep)
Record = Callable[[tuple[str, ...], Callable[[torch.nn.Module, Any], Division]], tuple[T, ShardedStep]]
_fakes = logging.getLogger("torch._subclasses.fake_tensor")
# sizes that a module's forward may take from its attributes, and that are a rank's own in a region
_SIZES = ("split_size", "all_head_size", "inner_dim", "num_heads", "num_attention_heads", "n_head", "n_heads", "nhead")
_KEY_SIZES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_dim")
_OVER_POSITIONS = ("aten._scaled_dot_product", "aten.bmm", "aten._softmax", "aten.convolution", "aten.cumsum")
_MATRIX = 2  # dimensions
_ATTEMPTS: tuple[tuple[tuple[str, ...], bool], ...] = (  # sizes that are divided, and are the module's own parameters, too?
    ((), False),
    (("split_size",), False),
    ((*_SIZES, *_KEY_SIZES), False),
    ((), True),
    ((*_SIZES, *_KEY_SIZES), True),
)


def divided_and_recorded(
    model: torch.nn.Module, mesh: Mesh, way: str, plain: Trace, views: Mapping[str, int], record: Record[T]
) -> tuple[T, ShardedStep]:
    """What `record` makes of a copy of the model that is divided by a function that it is given, with the modules concerned.
    `plain`: the trace of the whole model, and `views` what `first_views` saw meanwhile."""
    ways, over = split_way(way)[1], {dim.name: dim for dim in mesh.dividing}
    attention = _attention(model, plain) if "cp" in over else ()
    experts = _experts(model, over["ep"]) if "ep" in over else ()
    readers = find_readers(model, plain)
    if "tp" in over:
        return _by_tensors(model, over["tp"], ways, attention, experts, readers, plain, views, record)
    recorded, step = record(
        attention or experts,
        lambda fake, meshes: divide_by(ways, fake, meshes, attention=attention, experts=experts, readers=readers),
    )
    return recorded, replace(step, experts=experts if attention else (), readers=readers)


def _attention(model: torch.nn.Module, plain: Trace) -> tuple[str, ...]:
    attention = find_attention(plain)
    if not attention:
        raise Unsupported(
            f"no module of {type(model).__name__} calls F.scaled_dot_product_attention, so its sequence cannot be divided",
            hint='let it: attn_implementation="sdpa" in Hugging Face\'s models; others train over mesh={"dp": ...}',
        )
    return attention


def _experts(model: torch.nn.Module, over: MeshDim) -> tuple[str, ...]:
    experts = find_experts(model, over.size)
    if not experts:
        raise Unsupported(
            f"{type(model).__name__} has no experts that can be divided over {over.size} ranks: modules whose parameters are "
            f"stacks of a multiple of {over.size} experts, called with (tokens, indices of experts, weights)",
            hint='shard its parameters instead: mesh={"dp": ...}',
        )
    return experts


def _by_tensors(
    model: torch.nn.Module,
    over: MeshDim,
    ways: tuple[str, ...],
    attention: tuple[str, ...],
    experts: tuple[str, ...],
    readers: tuple[tuple[str, str], ...],
    plain: Trace,
    views: Mapping[str, int],
    record: Record[T],
) -> tuple[T, ShardedStep]:
    """Regions of a kind that cannot be computed in parts are left whole: that shows in shapes which do not fit. `attention`:
    modules whose attention is over a sequence that is divided too. `experts`: stacks that are divided too. `readers`: modules
    that read parameters of one inside of them, which stays whole."""
    found, vocabulary = find_regions(model, plain, over.size, views), find_vocabulary(model, plain, over.size)
    read = {owner for _, owner in readers}
    found = tuple(region for region in found if not read & {*region.columns, region.row})
    vocabulary = () if read & {*vocabulary} else vocabulary
    regions = tuple(region for region in found if not {*region.columns, region.row} & set(vocabulary))
    if not regions:  # a layer is divided in one way: of a model without others, its last two as a region
        regions, vocabulary = found, ()
    stack = _stack(plain, regions) if "sequence" in ways else ()
    if "sequence" in ways and not stack:
        raise Unsupported(
            f"{type(model).__name__} has no stack of layers, each of which saves less than a third of a step, whose linear "
            "layers are all divided, so its sequence is not either",
            hint='use shard="tensor"',
        )
    tried: Counter[str] = Counter()
    doubtful: list[tuple[TensorRegion, ...]] | None = None  # the regions without one kind, where sums are wrong with all
    while regions:
        _refuse_attention_on_parts(plain, regions, stack, experts)
        built: list[Division] = []

        def build(fake: torch.nn.Module, on: Any, regions: Any = regions, built: list[Division] = built) -> Division:
            what: dict[str, Any] = {"vocabulary": vocabulary, "attention": attention, "experts": experts, "readers": readers}
            built.append(divide_by(ways, fake, on, stack=stack, regions=regions, **what))
            return built[0]

        try:
            with _unlogged():
                recorded, step = record(stack, build)
        except PartialSums:  # what is in a region may use tensors that all ranks have
            if doubtful is None:
                doubtful = [tuple(r for r in regions if kind_of(model, r) != kind) for kind in _kinds(model, regions)]
            if not any(doubtful):
                raise
            regions = next(filter(None, doubtful))
            doubtful = doubtful[doubtful.index(regions) + 1 :]
            continue
        except HoldallError:
            raise
        except Exception:  # a model may raise anything
            running = (built[0].failed or built[0].region) if built else None
            failed = next((r for r in regions if running is not None and r == running.region), None)
            failed = failed or next((r for r in regions if r.own), None)  # what is read elsewhere too
            if failed is None:
                raise
        else:
            failed = None if attention else _with_other_attention(plain, recorded, regions, over.size)
        if failed is not None:
            kind = kind_of(model, failed)
            tried[kind] += 1
            regions = _changed(model, regions, kind, tried[kind], over.size)
            continue
        step = replace(step, regions=regions, vocabulary=vocabulary, attention=attention, experts=experts)
        return recorded, replace(step, readers=readers)
    raise Unsupported(
        f"{type(model).__name__} has no linear layers that can be divided over {over.size} ranks: none whose result only "
        f"another one reads, of a width (and a number of heads) that is a multiple of {over.size}",
        hint="shard its parameters instead: mesh=" + ('{"dp": ..., "ep": ...}' if experts else '{"dp": ...}'),
    )


def _with_other_attention(
    plain: Trace, recorded: RankStep, regions: tuple[TensorRegion, ...], ranks: int
) -> TensorRegion | None:
    """A region whose attention is not that of a part of the heads: where a forward leaves a size to a view, half of the
    features may be seen as half of the positions, or as heads half as wide."""
    above = {region: common_ancestor((*region.columns, region.row)) for region in regions}
    expected = {op.site: plain.tensors[op.writes[0]].shape for op in _attentions(plain)}
    for op in _attentions(recorded):
        part, whole = recorded.tensors[op.writes[0]].shape, expected.get(op.site)
        if whole is None:
            continue
        are_scores = op.site.op.startswith("aten._softmax") and part[-1] == part[-2]
        if part[-2:] == whole[-2:] and not (are_scores and math.prod(whole) != ranks * math.prod(part)):
            continue
        wrong = next((region for region, path in above.items() if _is_under(op.site.module, [path])), None)
        if wrong is not None:
            return wrong
    return None


def _attentions(step: RankStep) -> Iterator[Op]:
    names = ("aten._scaled_dot_product", "aten._softmax")
    for op in step.ops:
        if op.site.phase is Phase.FORWARD and op.site.op.startswith(names) and len(step.tensors[op.writes[0]].shape) > _MATRIX:
            yield op


@contextmanager
def _unlogged() -> Iterator[None]:
    """torch logs shapes that do not fit as errors, though another attempt may follow."""
    level = _fakes.level
    _fakes.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        _fakes.setLevel(level)


def _stack(trace: Trace, regions: tuple[TensorRegion, ...]) -> tuple[str, ...]:
    """The modules of the blocks with regions, in the order of their calls, if they follow each other."""
    with_regions = [
        n for n, b in enumerate(trace.blocks) if any(r.row.startswith(f"{b.module}.") for r in regions) and b.module
    ]
    if not with_regions or with_regions != list(range(with_regions[0], with_regions[-1] + 1)):
        return ()
    paths = tuple(trace.blocks[n].module for n in with_regions)
    return paths if len(set(paths)) == len(paths) else ()


def _refuse_attention_on_parts(
    trace: Trace, regions: tuple[TensorRegion, ...], stack: tuple[str, ...], experts: tuple[str, ...]
) -> None:
    """Between regions, activations are parts of the sequence: what looks at other positions must lie in a region. `experts`
    compute token by token."""
    inside = {*experts, *(common_ancestor((*region.columns, region.row)) for region in regions)}
    over = [op for op in trace.ops if op.site.phase is Phase.FORWARD and op.site.op.startswith(_OVER_POSITIONS)]
    paths = [op.site.module for op in over if not _is_of_router(op, trace)]
    wrong = next((path for path in paths if _is_under(path, stack) and not _is_under(path, inside)), "")
    if wrong:
        raise Unsupported(
            f"`{wrong}` looks at all positions and is not divided, so that activations cannot be along the sequence",
            hint='use shard="tensor"',
        )


def _is_of_router(op: Op, trace: Trace) -> bool:
    """Is it a softmax of a matrix, which has a row for each token?"""
    return op.site.op.startswith("aten._softmax") and any(len(trace.tensors[x].shape) == _MATRIX for x in op.writes)


def _is_under(path: str, modules: Iterable[str]) -> bool:
    return any(path == module or path.startswith(f"{module}.") for module in modules)


def kind_of(model: torch.nn.Module, region: TensorRegion) -> str:
    """Regions of one kind are treated alike: the same layers of modules of one class."""
    above = common_ancestor((*region.columns, region.row))
    inside = [path.removeprefix(f"{above}.") for path in (*region.columns, region.row)]
    return f"{type(model.get_submodule(above)).__name__}: {', '.join(inside)}"


def _kinds(model: torch.nn.Module, regions: tuple[TensorRegion, ...]) -> list[str]:
    return list(dict.fromkeys(kind_of(model, region) for region in regions))


def _changed(
    model: torch.nn.Module, regions: tuple[TensorRegion, ...], kind: str, attempt: int, ranks: int
) -> tuple[TensorRegion, ...]:
    """The regions with those of a kind as in the next attempt, or without them."""
    found = []
    for region in regions:
        if kind_of(model, region) != kind:
            found.append(region)
        elif attempt < len(_ATTEMPTS):
            above = model.get_submodule(common_ancestor((*region.columns, region.row)))
            names, with_own = _ATTEMPTS[attempt]
            sizes = {name: getattr(above, name, None) for name in names}
            divided = tuple(n for n, size in sizes.items() if isinstance(size, int) and size % ranks == 0)
            direct = above.named_parameters(recurse=False) if with_own else ()
            own = tuple(name for name, p in direct if p.dim() and p.shape[0] % ranks == 0)
            if own or not with_own:
                found.append(replace(region, divided=divided, own=own))
    return tuple(found)
