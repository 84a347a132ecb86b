"""Low-memory optimizers: a file is a member, its class a plain `torch.optim.Optimizer` that works alone, without holdall.

    from holdall.optim.galore import GaLore
    optimizer = GaLore(GaLore.groups(model, rank=128), lr=1e-2)
    optimizer = holdall.optim.make("galore:rank=128", model)  # the same by name, as the command line has it

Besides torch's interface each class has `name`, `paper`, `exact` (the same numbers as the torch optimizer it stands for),
`consumes_gradients` (it updates in backward, and leaves no gradient behind) and `state_bytes(param)`: the bytes of state it
allocates for a parameter, known before the first step. It may have `groups(model, **options)`, which makes parameter groups
for a model, and `usual(model)`, the default options for a model. Files with an underscore are shared parts and the engine's
own. `names`, `find` and `make` know the members of this folder and torch's own optimizers.

`in_backward(optimizer)` makes any optimizer that updates each parameter on its own do so during backward.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from holdall.errors import InvalidInput, unknown_name
from holdall.registry import member_class, member_names, read_choice

if TYPE_CHECKING:
    import torch

TORCH = {
    "adadelta": "Adadelta",
    "adagrad": "Adagrad",
    "adam": "Adam",
    "adamax": "Adamax",
    "adamw": "AdamW",
    "asgd": "ASGD",
    "nadam": "NAdam",
    "radam": "RAdam",
    "rmsprop": "RMSprop",
    "rprop": "Rprop",
    "sgd": "SGD",
}
"""torch's own that take any parameter with a dense gradient; its Adafactor is `adafactor:variant=torch`."""

_FUSED = {"adam": {"fused": True}, "adamw": {"fused": True}}  # without temporaries of the parameters' size
_OF_ALL_GROUPS = ("lr", "betas", "eps", "weight_decay", "seed")  # the other options are for the groups that a class makes


def names() -> tuple[str, ...]:
    """Names of all optimizers: the members of this folder, and torch's own. Does not need torch."""
    return tuple(sorted({*member_names("optim"), *TORCH}))


def find(name: str) -> type[torch.optim.Optimizer]:
    """The class of that name."""
    if name not in names():
        raise unknown_name("optimizer", name, names())
    if name in member_names("optim"):
        return member_class("optim", name)
    import torch

    found: type[torch.optim.Optimizer] = getattr(torch.optim, TORCH[name])
    return found


def option_names(name: str) -> dict[str, Any]:
    """The options of an optimizer with their defaults."""
    cls: Any = find(name)
    taken = [inspect.signature(cls.__init__), *([inspect.signature(cls.groups)] if hasattr(cls, "groups") else [])]
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = {p.name: p.default for signature in taken for p in signature.parameters.values() if p.kind in kinds}
    return {key: value for key, value in found.items() if key not in ("self", "params", "model")}


def read(text: str) -> tuple[str, dict[str, Any]]:
    """(name, options) of a typed optimizer such as `galore:rank=128`; unknown options raise an error."""
    name, options = read_choice(text)
    known = option_names(name)
    for option in options:
        if option not in known:
            raise unknown_name(f"option of {name}", option, known)
    return name, {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}


def make(text: str, model: torch.nn.Module, *, decay_vectors: bool = True, **options: Any) -> torch.optim.Optimizer:
    """An optimizer by name for the trainable parameters of a model, with `options` and those in the text.

    Other options are the class's choice for the model (`usual`), or its defaults.
    `decay_vectors=False`: norms and biases form groups without weight decay.
    """
    name, typed = read(text)
    cls: Any = find(name)
    usual = cls.usual(model) if hasattr(cls, "usual") else _FUSED.get(name, {})
    given = {**usual, **options, **typed}
    common = {key: given.pop(key) for key in _OF_ALL_GROUPS if key in given}
    try:
        if hasattr(cls, "groups"):
            groups = cls.groups(model, **given)
        else:
            groups, common = [{"params": [p for p in model.parameters() if p.requires_grad]}], {**common, **given}
        if not decay_vectors and "weight_decay" in option_names(name):
            groups = [part for group in groups for part in _without_decay_of_vectors(group)]
        made: torch.optim.Optimizer = cls(groups, **common)
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"{text} cannot be made: {error}", hint="`holdall optimizers` lists options and defaults") from error
    return made


def _without_decay_of_vectors(group: dict[str, Any]) -> list[dict[str, Any]]:
    matrices = {**group, "params": [p for p in group["params"] if p.dim() > 1]}
    vectors = {**group, "params": [p for p in group["params"] if p.dim() <= 1], "weight_decay": 0.0}
    return [part for part in (matrices, vectors) if part["params"]]


def __getattr__(name: str) -> Any:
    if name == "in_backward":  # looked for only where it is asked for: the list of members is read without torch
        from holdall.optim._in_backward.in_backward import in_backward

        return in_backward
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
