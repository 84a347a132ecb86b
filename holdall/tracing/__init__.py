"""Model -> Trace: records one training step of an unmodified model."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from holdall.errors import HoldallError, InvalidInput, Unsupported
from holdall.layers.int8_weight import Int8Weight
from holdall.sharded import refuse_sharded
from holdall.tracing.autocast import Autocast, outside_autocast, resolve_autocast
from holdall.tracing.calls import Given
from holdall.tracing.eager import record_real_step
from holdall.tracing.fake import record_fake_step
from holdall.tracing.mixing import MixedDtypes
from holdall.tracing.process_memory import other_memory
from holdall.tracing.step import How, Loss, Recorded, default_loss
from holdall.tracing.values.known import UnknownValue
from holdall.types import Mesh, Trace, TraceInfo
from holdall.types.trace import signature_of

log = logging.getLogger("holdall")
_BY_HAND = "shard it by hand with `fully_shard`, and use `holdall.apply` with a plan of the unsharded model"
OWN_DROPOUT = (
    "cuDNN resets the random state of dropout between recurrent layers whenever torch's random state is set, "
    "as recomputation does: with recomputed blocks its masks differ from plain training"
)


def trace_step(
    model: torch.nn.Module,
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss | None = None,
    device: str | torch.device | None = None,
    precision: torch.dtype | None = None,
    autocast: Autocast = None,
    given: dict[str, Given] | None = None,
) -> Trace:
    """Record one training step of `model` on `batch`; see `holdall.trace`. Fills `given` with the arguments of each block."""
    _check_inputs(model, batch, optimizer)
    check_model(model)
    refuse_sharded(model)
    target = target_device(model, device)
    how = How(precision=precision, autocast=resolve_autocast(autocast, target.type))
    run = loss or default_loss
    other = other_memory(model, optimizer, batch, target)  # measured before the step is traced
    notes: list[str] = []
    drawn = random.getstate()  # torch draws from it when its compiler is first loaded
    try:
        recorded, source = _record(model, batch, optimizer, run, target, how, notes)
    finally:
        random.setstate(drawn)
    if any(op.random and op.site.op == "aten._cudnn_rnn.default" for op in recorded.ops):
        notes.append(OWN_DROPOUT)
        log.warning("holdall: %s", OWN_DROPOUT)
    if given is not None:
        given.update(recorded.given)
    return Trace(
        ops=recorded.ops,
        tensors=recorded.tensors,
        blocks=recorded.blocks,
        whole=recorded.whole,
        saves=recorded.saves,
        units=recorded.units,
        about=TraceInfo(
            model=type(model).__name__,
            signature=model_signature(model),
            device=target.type,
            source=source,
            optimizer=type(optimizer).__name__ if optimizer is not None else None,
            batch=recorded.called or None,
            precision=_name(precision),
            autocast=_name(recorded.autocast),
            casts=recorded.casts,
            timed=torch.cuda.get_device_name(target) if recorded.timed else None,
            torch=str(torch.__version__),
            process=other.process,
            besides=other.besides,
            asked=recorded.asked,
            looked_at=recorded.looked_at,
            parts=recorded.parts,
            calls=recorded.calls,
            alters=recorded.effects.alters,
            once=recorded.effects.once,
            notes=tuple(notes),
        ),
    )


def trace_sharded(
    model: torch.nn.Module,
    batch: Any,
    mesh: Mesh,
    way: str,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss | None = None,
    device: str | torch.device | None = None,
    precision: torch.dtype | None = None,
    autocast: Autocast = None,
    given: dict[str, Given] | None = None,
    chunk: Callable[[torch.nn.Module], object] = lambda _: None,
) -> Trace:
    """Record the step of one rank of `mesh`, with the model sharded; see `holdall.trace`. Fills `given` with the arguments of
    each block. `chunk`: chunks the head of a copy of the model."""
    from holdall.parallel.attempts import divided_and_recorded  # it imports torch.distributed, as does the last
    from holdall.parallel.regions import first_views
    from holdall.parallel.ways import is_divided
    from holdall.tracing.shards import record_sharded_step

    plainly: dict[str, Any] = {"device": device, "precision": precision, "autocast": autocast, "given": given}
    watched: AbstractContextManager[dict[str, int]] = first_views(model) if is_divided(way) else nullcontext({})
    with watched as views:
        plain = trace_step(model, batch, optimizer=optimizer, loss=loss, **plainly)
    if plain.about.source != "fake":
        raise _needs_values(model, plain.about.notes[-1])
    target = target_device(model, device)
    how = How(precision=precision, autocast=resolve_autocast(autocast, target.type))
    step = (model, batch, optimizer, loss or default_loss, how, target, mesh, way)
    casts = plain.about.casts
    drawn = random.getstate()
    try:
        with outside_autocast():
            if is_divided(way):
                beside = groups_of(model, plain) if mesh.data is not None else ()
                recorded, shards = divided_and_recorded(
                    model,
                    mesh,
                    way,
                    plain,
                    views,
                    lambda groups, build: record_sharded_step(*step, groups, build, beside, casts, chunk),
                )
            else:
                recorded, shards = record_sharded_step(*step, groups_of(model, plain), casts=casts, chunk=chunk)
    except UnknownValue as error:
        raise _needs_values(model, error.fact) from error
    except HoldallError:
        raise
    except Exception as error:  # a model may raise anything
        raise Unsupported(
            f"the model cannot be sharded as {way}: {_first_line(error)}",
            hint='use mesh={"dp": ...}, which shards parameters and leaves computation as it is'
            if is_divided(way)
            else _BY_HAND,
        ) from error
    finally:
        random.setstate(drawn)
    return replace(
        plain,
        ops=recorded.ops,
        tensors=recorded.tensors,
        blocks=recorded.blocks,
        whole=recorded.whole,
        saves=recorded.saves,
        units=recorded.units,
        about=replace(plain.about, shards=shards, precision=None, casts=()),  # there are no working copies: the engine casts
    )


def _needs_values(model: torch.nn.Module, reason: str) -> Unsupported:
    return Unsupported(
        f"{type(model).__name__} cannot be traced on fake tensors, which sharding needs ({reason})", hint=_BY_HAND
    )


def groups_of(model: torch.nn.Module, trace: Trace) -> tuple[str, ...]:
    """The modules that are sharded by themselves: blocks of a kind that is repeated, called once, with parameters of their own.

    What they share with other modules, or others read, cannot be gathered by one of them: such a module stays with the rest of
    the model.
    """
    from holdall.parallel.regions import find_readers

    kinds, calls = Counter(b.kind for b in trace.blocks), Counter(b.module for b in trace.blocks)
    owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    read = [(f"{reader}.", f"{owner}.") for reader, owner in find_readers(model, trace)]
    found = []
    for path in dict.fromkeys(b.module for b in trace.blocks if b.module and kinds[b.kind] > 1 and calls[b.module] == 1):
        parameters = list(model.get_submodule(path).parameters())
        is_read = any(owner.startswith(f"{path}.") and not reader.startswith(f"{path}.") for reader, owner in read)
        if parameters and not is_read and all(owners[id(p)] == 1 for p in parameters):
            found.append(path)
    return tuple(found)


def _record(
    model: torch.nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None,
    loss: Loss,
    device: torch.device,
    how: How,
    notes: list[str],
) -> tuple[Recorded, str]:
    """The recorded step, and the kind of tensors used: fake ones or, if those do not suffice, real ones."""
    try:
        with outside_autocast():
            return record_fake_step(model, batch, optimizer, loss, device, how), "fake"
    except MixedDtypes as error:  # a module with weights of its own received float32
        if error.kind in how.needed:
            raise
        return _record(model, batch, optimizer, loss, device, replace(how, needed=how.needed | {error.kind}), notes)
    except UnknownValue as error:
        reason = error.fact
    except HoldallError:
        raise
    except Exception as error:  # a model may raise anything
        if not _can_run(model, device):
            raise _rejected(error, how.precision) from error
        reason = _first_line(error)
    return _watch(model, batch, optimizer, loss, device, how, reason, notes), "eager"


def _watch(
    model: torch.nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None,
    loss: Loss,
    device: torch.device,
    how: How,
    reason: str,
    notes: list[str],
) -> Recorded:
    """Record a real step, for models whose control flow depends on values."""
    if not _can_run(model, device):
        raise Unsupported(
            f"the step cannot be traced on fake tensors ({reason}), and the model has no weights on {device.type}",
            hint=f"build the model on {device.type}, so that a real step can be recorded",
        )
    try:
        with outside_autocast():
            recorded = record_real_step(model, batch, optimizer, loss, how)
    except MixedDtypes as error:
        if error.kind in how.needed:
            raise
        again = replace(how, needed=how.needed | {error.kind})
        return _watch(model, batch, optimizer, loss, device, again, reason, notes)
    except HoldallError:
        raise
    except Exception as error:  # a model may raise anything
        raise _rejected(error, how.precision) from error
    notes.append(f"recorded a real step instead of a fake one: {reason}")
    log.warning("holdall: %s", notes[-1])
    return recorded


def _can_run(model: torch.nn.Module, device: torch.device) -> bool:
    return all(p.device.type == device.type for p in model.parameters())


def _rejected(error: Exception, precision: torch.dtype | None) -> InvalidInput:
    hint = (
        "check that `batch` is what the loop passes to the model, and what `loss=`, called as loss(model, batch), does with it"
    )
    if precision is not None:  # some ops have no narrow kernels
        hint += (
            "; if it runs in float32, use precision='bf16-under-autocast', or torch.autocast in the loop without `precision=`"
        )
    return InvalidInput(f"the model rejected the batch: {_first_line(error)}", hint=hint)


def _name(dtype: torch.dtype | None) -> str | None:
    return str(dtype).removeprefix("torch.") if dtype is not None else None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def model_signature(model: torch.nn.Module) -> str:
    return signature_of((name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters(remove_duplicate=False))


def target_device(model: torch.nn.Module, device: str | torch.device | None) -> torch.device:
    """The device that a step is traced for: the one requested, or the model's."""
    if device is not None:
        try:
            target = torch.device(device)
        except RuntimeError:
            raise InvalidInput(f"unknown device {device!r}", hint='use "cpu" or "cuda"') from None
        if target.type not in ("cpu", "cuda"):
            raise InvalidInput(f"device {target.type!r} is not one that holdall plans for", hint='use "cpu" or "cuda"')
        return target
    first = next(model.parameters(), None)
    if first is None or first.device.type == "meta":
        return torch.device("cpu")
    return first.device


def check_model(model: torch.nn.Module) -> None:
    """Refuse models that recompute or compile by themselves: they would not do what was traced."""
    for path, module in model.named_modules():
        where = f"`{path}`" if path else "the model"
        if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
            raise Unsupported(
                f"{where} is compiled by torch.compile, whose kernels save tensors that a plan cannot see",
                hint="pass the model from before `torch.compile`; to compile blocks under a plan, use fit(..., compile=True)",
            )
        if module.training and getattr(module, "gradient_checkpointing", False) is True:
            raise Unsupported(
                f"gradient checkpointing is on in {where}, so its layers are recomputed whatever the plan says",
                hint="call `model.gradient_checkpointing_disable()` first: the plan decides what is recomputed",
            )
        for own, p in module.named_parameters(recurse=False):
            if isinstance(p, Int8Weight):
                raise Unsupported(
                    f"`{own}` of {where} is stored in 8 bits (`int8_`), which plans do not support yet",
                    hint="train without a plan, or do not call `int8_` on the model",
                )


def _check_inputs(model: torch.nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None) -> None:
    if not isinstance(model, torch.nn.Module):
        raise InvalidInput(f"`model` is {type(model).__name__}, not a torch.nn.Module", hint="pass the model itself")
    if not any(isinstance(t, torch.Tensor) for t in tree_leaves(batch)):
        hint = "pass a dictionary of tensors, as the loader yields it"
        if isinstance(batch, Mapping) or batch is not None:
            raise InvalidInput(f"`batch` ({type(batch).__name__}) holds no tensor", hint=hint)
        raise InvalidInput("`batch` is missing", hint=hint)
    if optimizer is not None:
        _check_optimizer(optimizer)
        own = {id(p) for p in model.parameters()}
        foreign = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in own]
        if foreign:
            raise InvalidInput(
                f"the optimizer holds {len(foreign)} parameters that are not the model's",
                hint="build the optimizer over this model's parameters, after it was moved or wrapped",
            )


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse rules that are not a backward and a step, which is what is traced and planned."""
    who = type(optimizer).__name__
    if getattr(optimizer, "forward_only", False):
        hint = "train without a plan: `optimizer.step(closure)` needs little more memory than a forward does"
        raise Unsupported(f"{who} takes no gradients, and a plan is for steps with a backward", hint=hint)
    if getattr(optimizer, "consumes_gradients", False):
        hint = "plan for torch.optim.SGD with `reads_gradients=False`: parameters are then updated in backward, too"
        raise Unsupported(f"{who} updates in backward by hooks of its own, which a plan cannot see", hint=hint)
