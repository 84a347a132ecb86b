"""Facts about torch's ops: mutated arguments, randomness, FLOPs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

PLAIN = (torch.Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)  # what a captured block may be called with


_SCALARS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors among the arguments or results of an op, in order. torch's pytree takes ten times as long, for every op."""
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    kind = type(value)
    if kind in _SCALARS:
        return
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif kind is tuple or kind is list:
        for part in value:
            _collect(part, found)
    elif kind is dict:
        for part in value.values():
            _collect(part, found)
    else:
        found += (leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor))


def odd_argument(args: Any) -> str:
    """The class of an argument that a captured block cannot have, such as a cache that it would fill; empty: there is none."""
    return next((type(leaf).__name__ for leaf in tree_iter(args) if not isinstance(leaf, PLAIN)), "")


def called_with(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], args: Any, kwargs: Any = None) -> Any:
    """Call a module with other parameters and buffers, by name; one that has several names is swapped under all of them.

    torch's own function swaps the tensors of a module that has several paths once for each, and leaves the swapped ones there.
    """
    known = dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])
    others = {id(known[name]): t for name, t in tensors.items()}
    swap = {}
    for path, inner in module.named_modules():  # each once
        for key, t in [*inner._parameters.items(), *inner._buffers.items()]:
            if t is not None and id(t) in others:
                swap[f"{path}.{key}" if path else key] = others[id(t)]
    return torch.func.functional_call(module, swap, args, kwargs, tie_weights=False)


def mutated_arguments(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among the arguments that the op changes in place."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return []
    values = {a.name: args[i] if i < len(args) else kwargs.get(a.name) for i, a in enumerate(schema.arguments)}
    found: list[Any] = []
    if schema.name.startswith("c10d::") and schema.arguments:
        found.append(values[schema.arguments[0].name])  # results, though not marked in the schema
    if "batch_norm" in schema.name and "backward" not in schema.name and (values.get("training") or values.get("train")):
        found += [values.get("running_mean"), values.get("running_var")]  # mutated, though not in its schema
    if schema.is_mutable:
        found += [values[a.name] for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return tensors_in(found)


def backward_nodes(out: Any) -> list[Any]:
    """The nodes of the graph at which the backward of whoever made `out` may begin.

    Of a view that is later changed in place, autograd enters at the node of its base instead of its own.
    """
    tensors = tensors_in(out)
    with torch._C.DisableTorchFunctionSubclass():  # lazy logits would compute themselves
        bases = [t._base for t in tensors if t._base is not None]
        nodes = [t.grad_fn for t in (*tensors, *bases) if t.grad_fn is not None]
    return list({id(node): node for node in nodes}.values())


_FACTORIES = ("arange", "full", "zeros", "ones", "scalar_tensor", "eye")
_LITTLE = 2**21  # elements; small beside a model


def is_factory(func: Any) -> bool:
    """Does the op create a tensor of known values without tensor inputs?"""
    return str(func).split(".")[1] in _FACTORIES if "." in str(func) else False


def makes_little(args: Any, kwargs: Any) -> bool:
    """Does a factory call create a small tensor? The product of its integers is an upper bound of the size."""
    product = 1
    for n in tree_iter((args, kwargs)):
        if isinstance(n, int) and not isinstance(n, bool):
            product *= max(1, abs(n))
    return product <= _LITTLE


def is_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Does the op draw random numbers?"""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    if str(func) == "aten._cudnn_rnn.default":
        return bool(args[11] and args[12])  # dropout, in training
    if "scaled_dot_product" not in str(func):
        return True
    at = next((i for i, a in enumerate(func._schema.arguments) if a.name == "dropout_p"), None)
    if at is None:
        return False
    return bool(args[at] if at < len(args) else kwargs.get("dropout_p", 0.0))


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Two products over the score matrix; causal masking is not discounted, as elsewhere in torch's registry."""
    b, h, s, d = q.shape
    return int(2 * b * h * s * k.shape[2] * (d + v.shape[-1]))


def count_flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """FLOPs by torch's registry and the formulas that it lacks; 0 for ops that only move bytes."""
    packet = getattr(func, "_overloadpacket", None)
    name = str(packet)
    if name == "aten._scaled_dot_product_flash_attention_for_cpu":
        return _attention(args[0], args[1], args[2])
    if name == "aten._scaled_dot_product_flash_attention_for_cpu_backward":
        return _attention(args[1], args[2], args[3]) * 5 // 2  # five products instead of two
    if name == "aten._grouped_mm":
        a, b = args[0], args[1]
        rows = a.shape[-2] if a.dim() == 2 else a.shape[0] * a.shape[1]
        return int(2 * rows * a.shape[-1] * b.shape[-1])
    if name == "aten.mkldnn_rnn_layer":
        x, w, u = args[0], args[1], args[2]
        return int(2 * x.shape[0] * x.shape[1] * (w.numel() + u.numel()))
    if name in ("aten._cudnn_rnn", "aten._cudnn_rnn_backward"):
        x, products = args[0], sum(w.numel() for w in args[1] if w.dim() > 1)
        return int(2 * (x.numel() // x.shape[-1]) * products) * (2 if name.endswith("backward") else 1)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    try:
        return int(formula(*args, **kwargs, out_val=out))
    except (TypeError, AttributeError, AssertionError, ValueError, IndexError):
        return 0  # a formula that does not know this overload


@contextmanager
def branches_of_a_real_run() -> Iterator[None]:
    """Inside, Hugging Face models take the branches of a real run although tensors are fake, since the values are known."""
    try:
        from transformers.utils import import_utils
    except ImportError:
        yield
        return
    original = getattr(import_utils, "is_fake_tensor", None)
    if original is None:  # a version that does not look
        yield
        return
    import_utils.is_fake_tensor = lambda x: False  # noqa: ARG005
    try:
        yield
    finally:
        import_utils.is_fake_tensor = original
