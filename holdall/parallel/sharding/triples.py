"""Parameters, gradients and optimizer states, each in shards of their own width, as PaRO (arXiv 2310.06003) and AMSP (arXiv
2311.00257) combine them, on a mesh of replicas and shards.

A way is written with three letters, for parameters, gradients and states: whole on every rank (N), in shards inside the group
(I), or over all ranks (G). No letter is narrower than the one before.

    nni nng    whole gradients add up on each rank; the last backward of a step scatters their mean to who updates what
    nii nig    every backward scatters its gradients inside the group; the last one sums over groups
    ngg igg    every backward scatters its gradients over all ranks
    iig        parameters are gathered inside the group, where every backward scatters; the last one scatters over groups

Shards are rows: those of a rank inside the group are cut further over the groups. A collective over all ranks is made in two,
inside the group and between groups: as many bytes as one ring over all, of which groups exchange few. After an update the ranks
gather the new rows, first between groups, then inside.

A gradient is a DTensor of the shape of its parameter, cut as far as it is summed, so that loops may clip and log it. The memory
of a sum stays until the gradients are dropped, as wide as between two backwards.

Frozen parameters have no gradients and no states, so that a triple of their own is one letter. `i-nig` and so on: they are in
shards inside the group, gathered by torch's engine, and the others as the triple says. Without it they are as parameters are.

The other triples are ways of torch's engine: nnn is `ddp` and ggg `zero3`, both on {"dp": n}; iii is `zero3` on this mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_iter

from holdall.errors import InvalidInput, Unsupported
from holdall.parallel.exchanges import gather_into, reduce_into
from holdall.parallel.parts import avoid_fast_paths, local_parameters, wrap
from holdall.parallel.sharding.own_parts import BUCKET, check_elementwise
from holdall.sharded import is_shard, local_of

NONE, INSIDE, ALL = range(3)  # the letters: how often rows are cut


class _Stage:
    """One cut of rows, over the ranks of one dimension."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        parts = rows.chunk(self.ranks)
        return parts[self.rank] if self.rank < len(parts) else rows[:0]

    def scatter(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's rows of the means over the ranks, in one buffer."""
        parts = [t.chunk(self.ranks) for t in tensors]
        sizes = [some[0].numel() for some in parts]
        whole = tensors[0].new_zeros(self.ranks * sum(sizes))
        for rank, row in enumerate(whole.view(self.ranks, -1)):
            for some, place in zip(parts, row.split(sizes), strict=True):
                if rank < len(some):
                    place[: some[rank].numel()].copy_(some[rank].reshape(-1))
        made = whole.new_empty(sum(sizes))
        reduce_into(made, whole, self.group, dist.ReduceOp.SUM)
        made.div_(self.ranks)
        shapes = [self.own(t).shape for t in tensors]
        return [place[: shape.numel()].view(shape) for place, shape in zip(made.split(sizes), shapes, strict=True)]

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """The means over the ranks, in place, by one all-reduce."""
        flat = torch.cat([t.reshape(-1) for t in tensors])
        dist.all_reduce(flat, group=self.group)
        flat.div_(self.ranks)
        for t, mean in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.copy_(mean.view_as(t))

    def gather(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have the rows of all ranks in these tensors, which have this rank's."""
        parts = [t.chunk(self.ranks) for t in tensors]
        sizes = [some[0].numel() for some in parts]
        mine = tensors[0].new_zeros(sum(sizes))
        for t, place in zip(tensors, mine.split(sizes), strict=True):
            own = self.own(t)
            place[: own.numel()].copy_(own.reshape(-1))
        whole = mine.new_empty(self.ranks * mine.numel())
        gather_into(whole, mine, self.group)
        for rank, row in enumerate(whole.view(self.ranks, -1)):
            for some, place in zip(parts, row.split(sizes), strict=True):
                if rank < len(some):
                    some[rank].copy_(place[: some[rank].numel()].view_as(some[rank]))


class Triple:
    """Divides a model by the letters of a way, and sums its gradients; for good, as models are divided for good."""

    is_engine = True  # see `sharded.is_engines`

    def __init__(self, model: torch.nn.Module, groups: Sequence[str], device_mesh: Any, way: str) -> None:
        from torch.distributed.tensor import Replicate, Shard

        frozen, _, letters = way.rpartition("-")
        self.params, self.grads, self.states = ("nig".index(letter) for letter in letters)
        self.is_last = True  # of the backwards of a step is the one that runs, or comes next
        self._stages = (_Stage(device_mesh.get_group(1)), _Stage(device_mesh.get_group(0)))
        shards, near = _shards_first(device_mesh), device_mesh[device_mesh.mesh_dim_names[1]]
        self._spreads = ((device_mesh, [Replicate(), Replicate()]), (near, [Shard(0)]), (shards, [Shard(0), Shard(0)]))
        modules = [model.get_submodule(path) for path in groups]
        modules = [*(m for m in modules if m is not model), model]
        if self.params == INSIDE or frozen:
            from torch.distributed.fsdp import fully_shard

            ours = {p for p in model.parameters() if p.requires_grad} if self.params < INSIDE else set()
            for module in modules:
                fully_shard(module, mesh=near, reshard_after_forward=True, ignored_params=ours)
        if self.params < INSIDE:
            self._replicate(model, modules)
        self._groups = _groups(modules)
        self._group_of = {p: n for n, some in enumerate(self._groups) for p in some}
        self._fresh: dict[int, list[torch.nn.Parameter]] = {}  # group -> those whose gradients of this backward have come
        self._held: dict[torch.nn.Parameter, torch.Tensor] = {}  # sums of the backwards before, while another runs
        self._open: set[torch.nn.Parameter] = set()  # whose gradients are not yet summed over all ranks
        self._current: int | None = None  # number of the backward that is running, by autograd
        for p in self._group_of:
            p.register_post_accumulate_grad_hook(self._came)
        model.register_forward_hook(self._called)
        model.holdall_triple = self  # type: ignore[assignment]  # see `triple_of`

    def _replicate(self, model: torch.nn.Module, groups: Sequence[torch.nn.Module]) -> None:
        """Parameters become DTensors that every rank has whole; modules compute with their local tensors, and those of `groups`
        and all under them too: a module may read the weights of its child. Those that torch's engine has are left to it."""
        made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        names: dict[torch.nn.Module, list[str]] = {}
        for module in model.modules():
            own = [(name, p) for name, p in module.named_parameters(recurse=False) if not is_shard(p)]
            names[module] = [name for name, _ in own]
            for name, p in own:
                if p.dim() == 0:
                    raise Unsupported(f"`{name}` has no rows that ranks could share", hint="give it one dimension")
                if p not in made:
                    made[p] = torch.nn.Parameter(self._spread(p.detach(), NONE, p), requires_grad=p.requires_grad)
                module.register_parameter(name, made[p])
        avoid_fast_paths(model)
        for module in model.modules():
            reads = module in groups or isinstance(module, torch.nn.MultiheadAttention)
            inside = module.modules() if reads else (module,)
            if swapped := {m: names[m] for m in inside if names[m]}:
                wrap(module, _with_local(swapped))

    def _spread(self, local: torch.Tensor, letter: int, like: torch.Tensor) -> torch.Tensor:
        """The DTensor of this rank's rows at a letter, for a parameter."""
        from torch.distributed.tensor import DTensor

        mesh, cut = self._spreads[letter]
        return DTensor.from_local(local, mesh, cut, run_check=False, shape=like.shape, stride=like.stride())

    # gradients

    def sum_now(self, is_last: bool) -> None:
        """Whether the backward that begins is the last of its step, which sums over groups."""
        self.is_last = is_last

    def _called(self, module: torch.nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        for t in tree_iter(output):
            if not isinstance(t, torch.Tensor) or not t.requires_grad:
                continue
            if not getattr(t, "is_spent", True):  # the head's gradient would come before backward is known to have begun
                raise Unsupported(
                    "the loss of a head in chunks is computed outside of the model, which PaRO's triples do not follow",
                    hint='use head="whole", or shard="zero2"',
                )
            t.register_hook(self._backward_began)

    def _backward_began(self, grad: torch.Tensor) -> None:  # noqa: ARG002
        number = int(torch._C._current_graph_task_id())
        if number == self._current:
            return  # another of the outputs
        self._current = number
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)  # type: ignore[attr-defined]
        self._fresh.clear()
        self._open = {p for p in self._open if p.grad is not None}
        for p in self._group_of:
            if p.grad is None:
                continue
            if self.grads < self.states and p not in self._open:
                raise InvalidInput(
                    "gradients of the last step are still there, in the shards of who updates what",
                    hint="call optimizer.zero_grad() after each step",
                )
            if self.params < self.grads:
                self._held[p], p.grad = p.grad, None

    def _came(self, p: torch.nn.Parameter) -> None:
        number = self._group_of[p]
        fresh = self._fresh.setdefault(number, [])
        fresh.append(p)
        if len(fresh) == len(self._groups[number]):
            self._reduce(number)

    def _backward_ended(self) -> None:
        for number, some in enumerate(self._groups):
            self._reduce(number)
            for p in some:  # no gradient in this backward
                if p in self._held:
                    p.grad = self._held.pop(p)
            if self.is_last:
                self._sum([p for p in some if p in self._open])
        self._current = None

    def _reduce(self, number: int) -> None:
        """Sum what this backward brought, as far as every backward does."""
        fresh = set(self._fresh.pop(number, ()))
        params = [p for p in self._groups[number] if p in fresh]
        if not params:
            return
        if self.params < self.grads:
            tensors = [local_of(p.grad).detach() for p in params if p.grad is not None]
            for p in params:
                p.grad = None
            for stage in self._stages[self.params : self.grads]:
                tensors = stage.scatter(tensors)
            for p, new in zip(params, tensors, strict=True):
                held = self._held.pop(p, None)
                if held is not None:
                    local_of(held).add_(new)
                p.grad = self._spread(new, self.grads, p) if held is None else held
        if self.grads < ALL:
            self._open.update(params)
            if self.is_last:
                self._sum(params)

    def _sum(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Sum over all ranks what the backwards of the step have added up."""
        if not params:
            return
        self._open.difference_update(params)
        tensors = [local_of(p.grad).detach() for p in params if p.grad is not None]
        sums = tensors
        for stage in self._stages[self.grads : self.states]:
            sums = stage.scatter(sums)
        for stage in self._stages[self.states :]:
            stage.average(sums)
        if self.grads < self.states:
            for p, t, new in zip(params, tensors, sums, strict=True):
                rows = self._rows(t, self.grads, self.states)
                rows.copy_(new)
                p.grad = self._spread(rows, self.states, p)

    def _rows(self, t: torch.Tensor, have: int, want: int) -> torch.Tensor:
        for stage in self._stages[have:want]:
            t = stage.own(t)
        return t

    # updates

    def divide(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the optimizer hold this rank's rows of the parameters, and exchange the new ones after its steps."""
        check_elementwise(optimizer, why="where optimizer states are in more shards than parameters", otherwise="zero3")
        own = set(self._group_of)
        self._pairs: list[tuple[torch.nn.Parameter, torch.nn.Parameter]] = []  # a parameter, and this rank's rows of it
        for group in optimizer.param_groups:
            parts = [self._part(p) if p in own else p for p in group["params"]]
            self._pairs += [(p, part) for p, part in zip(group["params"], parts, strict=True) if part is not p]
            group["params"] = parts
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]

    def _own(self, p: torch.nn.Parameter) -> torch.Tensor:
        return self._rows(local_of(p).detach(), self.params, self.states)

    def _part(self, p: torch.nn.Parameter) -> torch.nn.Parameter:
        part = torch.nn.Parameter(self._spread(self._own(p), self.states, p), requires_grad=p.requires_grad)
        part.holdall_whole = p  # type: ignore[attr-defined]  # see `sharded.part_of_parameter`
        return part

    def _before_step(self, *_: Any) -> None:
        for p, part in self._pairs:
            own = self._own(p)
            if own.untyped_storage()._cdata != local_of(part).untyped_storage()._cdata:  # torch's engine has put it elsewhere
                part._local_tensor = own  # type: ignore[attr-defined]
            part.grad = p.grad

    def _after_step(self, *_: Any) -> None:
        bucket: list[torch.Tensor] = []
        for p, part in self._pairs:
            if part.grad is None:
                continue
            part.grad = None
            full = sum(t.numel() for t in bucket) + p.numel() > BUCKET
            if bucket and (full or bucket[0].dtype != p.dtype):
                self._exchange(bucket)
                bucket = []
            bucket.append(local_of(p).detach())
        if bucket:
            self._exchange(bucket)

    def _exchange(self, tensors: Sequence[torch.Tensor]) -> None:
        for have in reversed(range(self.params, self.states)):
            self._stages[have].gather([self._rows(t, self.params, have) for t in tensors])

    def _zero_grad(self, set_to_none: bool = True) -> None:
        for p, part in self._pairs:
            part.grad = None
            if p.grad is not None and not set_to_none and self.grads == self.states:
                p.grad.detach_().zero_()
            else:
                p.grad = None


def triple_of(model: torch.nn.Module) -> Triple | None:
    """What divides the model; None: a way of torch's engine does."""
    return getattr(model, "holdall_triple", None)


def _with_local(modules: Mapping[torch.nn.Module, Sequence[str]]) -> Any:
    def forward(plain: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for module, names in modules.items():
                stack.enter_context(local_parameters(module, names=names))
            return plain(*args, **kwargs)

    return forward


def _groups(modules: Sequence[torch.nn.Module]) -> list[list[torch.nn.Parameter]]:
    """Parameters whose gradients travel together: of a module, but for those of modules before it, in one precision."""
    seen: set[torch.nn.Parameter] = set()
    found: list[list[torch.nn.Parameter]] = []
    for module in modules:
        by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for p in module.parameters():
            if p not in seen and p.requires_grad:
                seen.add(p)
                by_dtype.setdefault(p.dtype, []).append(p)
        found += by_dtype.values()
    return found


def _shards_first(device_mesh: Any) -> Any:
    """The mesh of replicas and shards the other way round: the rows of a shard are cut further among replicas."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.device_mesh import DeviceMesh

    groups = [device_mesh.get_group(1), device_mesh.get_group(0)]
    names = tuple(reversed(device_mesh.mesh_dim_names))
    with unset_fake_temporarily():  # it reads the numbers of ranks
        return DeviceMesh.from_group(groups, device_mesh.device_type, device_mesh.mesh.t().contiguous(), mesh_dim_names=names)
