"""Captures blocks that a plan runs op by op before the first step, and checks that their ops are the traced ones.

The runtime captures a block at its first call. A block with other ops would then be recomputed whole, and the step would need
more memory than planned. So the plan is checked against the captured ops while another can still be made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from holdall.actions.reschedule import is_recurrent, made_outside, region
from holdall.errors import HoldallError
from holdall.planning.menus import kind_of
from holdall.precision import put_on
from holdall.problem import Precision, resolve_precision, resolve_recipe
from holdall.runtime.programs.capture import capture, tensors_of
from holdall.tracing.calls import Given, Like
from holdall.types import Block, Plan, Trace

Names = tuple[str, ...]


def plan_captured(
    trace: Trace, make: Callable[[Trace], Plan], correct: Callable[[Trace, Plan], Trace | None]
) -> tuple[Plan, Trace]:
    """A plan whose op-by-op blocks were captured with the planned ops, and the trace that it is for. `correct`: the trace
    corrected by captures of a plan's blocks; None: nothing to correct."""
    made = make(trace)
    for _ in trace.blocks:
        corrected = correct(trace, made)
        if corrected is None:
            break
        trace = corrected
        made = make(trace)
    return made, trace


def correct_blocks(
    trace: Trace, plan: Plan | None, model: torch.nn.Module, given: Mapping[str, Given], precision: Precision
) -> Trace | None:
    """The trace corrected by captures, if the plan runs blocks op by op whose ops differ. None: they are the same.

    Without a plan, all blocks are checked. `precision`: as of the trace; blocks are captured with the layers that the step will
    have.
    """
    recipe, dtype = resolve_recipe(precision), resolve_precision(precision)
    by_ops = plan is None or any(action.by_ops for action in plan.actions)
    undo = put_on(recipe, model, to_trace=True) if recipe is not None and by_ops else lambda: None
    try:
        return _corrected_blocks(trace, plan, model, given, dtype)
    finally:
        undo()


def _corrected_blocks(
    trace: Trace, plan: Plan | None, model: torch.nn.Module, given: Mapping[str, Given], precision: torch.dtype | None
) -> Trace | None:
    actions = plan.actions if plan is not None else ()
    planned = {block for action in actions for block in action.by_ops if block}
    if plan is None:
        planned = {block.name for block in trace.blocks}
    kinds = {(kind_of(b), b.wanted) for b in trace.blocks if b.name in planned}
    alike = [b for b in trace.blocks if (kind_of(b), b.wanted) in kinds and b.name in given and not b.apart]
    captured: dict[object, Names | str] = {}
    blocks = list(trace.blocks)
    for block in (b for b in alike if not is_recurrent(trace, b)):
        key = kind_of(block), block.wanted
        if key not in captured:
            captured[key] = _names(block, model.get_submodule(block.module), given[block.name], precision)
        blocks[block.id] = _corrected(trace, block, captured[key])
    return None if blocks == list(trace.blocks) else replace(trace, blocks=tuple(blocks))


def _corrected(trace: Trace, block: Block, names: Names | str) -> Block:
    if isinstance(names, str):
        return replace(block, apart=names)
    if names == tuple(op.site.op for op in region(trace, block)[0]):
        return block
    beside = made_outside(trace, block, names)
    if beside is None:
        return replace(block, apart="run alone, it uses other ops than in the step")
    return replace(block, beside=(*block.beside, *beside))


def _names(block: Block, module: torch.nn.Module, given: Given, precision: torch.dtype | None) -> Names | str:
    """The op names of a block, or the reason why they are unknown."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = next((leaf.device for leaf in given.leaves if isinstance(leaf, Like)), None)
    with mode:
        args, kwargs = given.make()
        state = {name: _stand_in(t, device, precision) for name, t in tensors_of(module)}
    try:
        with ExitStack() as stack:
            for kind, enabled, dtype in given.autocast:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
            graph = capture(module, module.forward, args, kwargs, wanted=block.wanted, state=state)
    except HoldallError as error:
        return error.fact
    return tuple(graph.names())


def _stand_in(t: torch.Tensor, device: torch.device | None, precision: torch.dtype | None) -> torch.Tensor:
    narrow = precision is not None and isinstance(t, torch.nn.Parameter) and t.dtype == torch.float32
    like = Like.of(t)._replace(device=device or t.device, dtype=precision if narrow and precision is not None else t.dtype)
    return like.make()
