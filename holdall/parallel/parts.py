"""Modules that compute with this rank's parts of their parameters, which are DTensors: so norms, checkpoints and optimizers see
whole ones, and activations are plain tensors."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from holdall.parallel.exchanges import Averaged
from holdall.sharded import is_shard, local_of

Made = dict[torch.nn.Parameter, torch.nn.Parameter]  # by the parameter in whose place it is
MeanOver = tuple[Any, int]  # (group over which gradients are summed, or none; what the sum is divided by)


class Division:
    """What the divided modules of a model have in common: the group, and the region that is running."""

    def __init__(self, over: Any, whole: Any = None) -> None:
        """`over`: torch's mesh of the one dimension over which they are divided. `whole`: the mesh that parameters are on, of
        which this is a dimension, where others of the model's modules are divided over another; None: the same."""
        self.group, self.device_mesh = over.get_group(), over if whole is None else whole
        self.dim = 0 if whole is None else whole.mesh_dim_names.index(over.mesh_dim_names[0])  # of that mesh
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.region: Any = None  # the one that is running
        self.failed: Any = None  # the last one that did not come to its end
        self.split = 0  # depth of modules whose activations are parts of the sequence
        self.batches: MeanOver | None = None  # ranks that have batches of their own; see `experts.py`
        self.positions: Any = None  # group whose ranks have other parts of the sequence; see `context.py`
        self.dtype: torch.dtype | None = None  # in which modules compute; None: that of their parameters

    @property
    def is_partial(self) -> bool:
        """Do modules see a part of the activations, so that gradients of whole parameters are partial sums?"""
        return self.region is not None or self.split > 0

    def local(
        self,
        module: torch.nn.Module,
        names: Sequence[str] | None = None,
        *,
        is_partial: bool = False,
        batches: MeanOver | None = None,
    ) -> AbstractContextManager[None]:
        """`local_parameters` in the dtype in which modules compute. `is_partial`: gradients are partial sums. `batches`: in the
        place of this division's."""
        over = [
            (self.positions, 1) if self.positions is not None else None,
            (self.group, 1) if is_partial else None,
            batches or self.batches,
        ]
        return local_parameters(module, [means for means in over if means is not None], names, dtype=self.dtype)


class Fork:
    """Random numbers that differ from rank to rank for a while, and agree afterwards. Both follow from the state before, so
    that a repeated forward repeats them."""

    def __init__(self, division: Division) -> None:
        self._rank = division.rank
        self._device = str(division.device_mesh.device_type)
        self._after: int | None = None  # seed with which all ranks go on

    def begin(self) -> None:
        if is_traced():
            return
        before = zlib.crc32(torch.get_rng_state().numpy().tobytes())
        self._after = before + 1
        self._seed((before + 1) * 65_537 + self._rank)

    def end(self) -> None:
        if self._after is not None:
            self._seed(self._after)
            self._after = None

    def _seed(self, seed: int) -> None:
        """The host's generator and that of the device in use; no other device is touched."""
        torch.default_generator.manual_seed(seed)
        if self._device == "cuda":
            torch.cuda.manual_seed(seed)


def draws(module: torch.nn.Module) -> bool:
    """May it draw random numbers?"""
    probabilities = [
        value
        for m in module.modules()
        for name, value in vars(m).items()
        if ("drop" in name or (name == "p" and "Drop" in type(m).__name__)) and isinstance(value, (int, float))
    ]
    return any(probabilities)


def part_of(p: torch.nn.Parameter, dim: int, parts: int, division: Division, made: Made) -> Any:
    """The parameter divided along `dim`; with `parts` matrices side by side there, each of them is divided."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if parts == 1:
        own = p.detach().chunk(division.ranks, dim)[division.rank].clone(memory_format=torch.contiguous_format)
        return put(p, own, Shard(dim), division, made)
    own = torch.cat([piece.chunk(division.ranks, dim)[division.rank] for piece in p.detach().chunk(parts, dim)], dim)
    return put(p, own, _StridedShard(dim, split_factor=parts), division, made)


def put(p: torch.nn.Parameter, own: torch.Tensor, placement: Any, division: Division, made: Made) -> Any:
    from torch.distributed.tensor import DTensor, Replicate

    if p not in made:
        on = division.device_mesh
        places = [placement if dim == division.dim else Replicate() for dim in range(on.ndim)]
        spread = DTensor.from_local(own, on, places, run_check=False, shape=p.shape, stride=p.stride())
        made[p] = torch.nn.Parameter(spread, requires_grad=p.requires_grad)
    return made[p]


def side_by_side(p: Any) -> Any:
    """How a DTensor is divided that has several matrices side by side (see `part_of`); None: it has not."""
    from torch.distributed.tensor.placement_types import _StridedShard

    place = p.placements[_dividing(p)] if is_shard(p) else None
    return place if isinstance(place, _StridedShard) else None


def _dividing(p: Any) -> int:
    """The dimension of its mesh over which a DTensor is divided: the last that does so, since those of data come first."""
    return max((n for n, place in enumerate(p.placements) if not place.is_replicate()), default=0)


def joined(p: Any) -> Any:
    """The same with these matrices whole on every rank that divides them: their parts are no pieces of one tensor, as
    checkpoints write them. Any other tensor itself."""
    from torch.distributed.tensor import Replicate

    if side_by_side(p) is None:
        return p
    own = _dividing(p)
    return p.detach().redistribute(placements=[Replicate() if n == own else place for n, place in enumerate(p.placements)])


def take_parts(p: Any, whole: Any) -> None:
    """Put this rank's parts of what `joined` made into it."""
    place, own, dim = side_by_side(p), local_of(whole), _dividing(p)
    rank, ranks = p.device_mesh.get_local_rank(dim), p.device_mesh.size(dim)
    pieces = own.chunk(place.split_factor, place.dim)
    local_of(p.detach()).copy_(torch.cat([piece.chunk(ranks, place.dim)[rank] for piece in pieces], place.dim))


def is_uncuttable(p: torch.Tensor) -> bool:
    """Are there matrices side by side along its first dimension, which is then not to be cut over data?"""
    place = side_by_side(p)
    return place is not None and place.dim == 0


def keep_whole(
    model: torch.nn.Module, over_data: Any, flat: Any, *, is_cut: bool = True, dtype: torch.dtype | None = None
) -> set[torch.nn.Parameter]:
    """Parameters that torch's engine cannot share over ranks with other data: numbers, and divided ones that cannot be cut once
    more, where the engine cuts any (`is_cut`). All these ranks have them whole, and take the mean of their gradients in
    backward. They are put on the mesh of both, as others will be, or on `flat`, which has all of `over_data` in one dimension
    where others have that. `dtype`: as of `local_parameters`."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate

    made: Made = {}
    groups = [(over_data.get_group(n), over_data.size(n)) for n in range(over_data.ndim)]
    for module in model.modules():
        numbers: list[str] = []  # of a module that is not divided
        for name, p in list(module.named_parameters(recurse=False)):
            cannot = is_cut and is_uncuttable(p) and (p.dim() == 1 or local_of(p).shape[1] % over_data.size(-1))
            if p.dim() and not cannot:
                continue
            if not is_shard(p):
                numbers.append(name)
            if p not in made:
                on, places = flat, [Replicate()] * flat.ndim
                if is_shard(p):
                    on = DeviceMesh._concatenate([over_data, p.device_mesh])  # type: ignore[attr-defined]
                    places = [*[Replicate()] * over_data.ndim, *p.placements]  # type: ignore[attr-defined]
                spread = DTensor.from_local(local_of(p).detach(), on, places, run_check=False, shape=p.shape, stride=p.stride())
                made[p] = torch.nn.Parameter(spread, requires_grad=p.requires_grad)
                made[p].holdall_data = groups  # type: ignore[attr-defined]
            module.register_parameter(name, made[p])
        if numbers:
            _compute_with_local(module, numbers, dtype)
    return set(made.values())


def _compute_with_local(module: torch.nn.Module, names: Sequence[str], dtype: torch.dtype | None) -> None:
    def forward(plain: Any, *args: Any, **kwargs: Any) -> Any:
        with local_parameters(module, names=names, dtype=dtype):
            return plain(*args, **kwargs)

    wrap(module, forward)


def replicate(module: torch.nn.Module, division: Division, made: Made) -> None:
    """Every rank has its parameters; on a part of the activations, gradients are summed over the ranks. Those that are divided
    already are this rank's, and so are their gradients."""
    from torch.distributed.tensor import Replicate

    parts = [name for name, p in module.named_parameters(recurse=False) if is_shard(p)]
    names = [name for name, _ in module.named_parameters(recurse=False) if name not in parts] if parts else None
    for name, p in list(module.named_parameters(recurse=False)):
        if not is_shard(p):
            module.register_parameter(name, put(p, p.detach(), Replicate(), division, made))

    def forward(plain: Any, *args: Any, **kwargs: Any) -> Any:
        with division.local(module, names, is_partial=division.is_partial), division.local(module, parts):
            return plain(*args, **kwargs)

    wrap(module, forward)


def let_read(reader: torch.nn.Module, owner: torch.nn.Module, division: Division) -> None:
    """Let the forward of a module have the parameters of another as that one's own forward has them."""

    def forward(plain: Any, *args: Any, **kwargs: Any) -> Any:
        with division.local(owner, is_partial=division.is_partial):
            return plain(*args, **kwargs)

    wrap(reader, forward)


def wrap(module: torch.nn.Module, forward: Callable[..., Any]) -> None:
    """Let `forward`, which gets the plain one first, be the module's."""
    plain = module.forward

    @functools.wraps(plain)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return forward(plain, *args, **kwargs)

    module.forward = wrapped  # type: ignore[method-assign]


@contextmanager
def local_parameters(
    module: torch.nn.Module,
    over: Sequence[MeanOver] = (),
    names: Sequence[str] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Iterator[None]:
    """Inside, the module's own parameters are this rank's parts, and their gradients sums or means `over` other ranks.
    `dtype`: float32 ones are copies in it, whose gradients are summed in float32."""
    modules = module.modules() if isinstance(module, torch.nn.MultiheadAttention) else (module,)  # reads those of its child
    shards = [
        (m, name, p) for m in modules for name, p in m._parameters.items() if is_shard(p) and (names is None or name in names)
    ]
    for m, name, p in shards:
        local = p.to_local()  # type: ignore[union-attr, operator]
        for group, ranks in (*getattr(p, "holdall_data", ()), *over):  # see `keep_whole`
            local = Averaged.apply(local, group, ranks)
        m._parameters[name] = local.to(dtype) if dtype is not None and local.dtype == torch.float32 else local
    try:
        yield
    finally:
        for m, name, p in shards:
            m._parameters[name] = p


def avoid_fast_paths(model: torch.nn.Module) -> None:
    """Let torch's own transformer layers compute by their modules: in evaluations they may read parameters past them."""

    def forward(plain: Any, *args: Any, **kwargs: Any) -> Any:
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            return plain(*args, **kwargs)
        finally:
            torch.backends.mha.set_fastpath_enabled(before)

    for module in model.modules():
        if isinstance(module, (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)):
            wrap(module, forward)


def is_traced() -> bool:
    """Are tensors fake, so that nothing is drawn and no value is known?"""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
