"""Facts about torch's ops that their signatures tell, or fail to tell."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_iter


def mutated_arguments(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among the arguments that the op changes in place."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return []
    values = {a.name: args[i] if i < len(args) else kwargs.get(a.name) for i, a in enumerate(schema.arguments)}
    found: list[Any] = []
    if "batch_norm" in schema.name and "backward" not in schema.name and (values.get("training") or values.get("train")):
        found += [values.get("running_mean"), values.get("running_var")]  # which its schema does not say
    if schema.is_mutable:
        found += [values[a.name] for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [t for t in tree_iter(found) if isinstance(t, torch.Tensor)]


def is_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the op draws from a generator."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    if "scaled_dot_product" not in str(func):
        return True
    at = next((i for i, a in enumerate(func._schema.arguments) if a.name == "dropout_p"), None)
    if at is None:
        return False
    return bool(args[at] if at < len(args) else kwargs.get("dropout_p", 0.0))
