"""Which features work together: those of plans, models, loops and precision, with a verdict for every pair.

This table is the only source. `holdall compatible` and docs/compatibility.md show it, and
tests/contracts/test_compatibility.py runs every pair against plain training: where it says exact, losses and weights are the
same bits and the peak is the predicted one; where it says refused, `trace`, `plan` or `apply` raises before the first step.

Features of a plan are the actions that say `what` they do; what follows from their facts (exact or not, alone on a block or
not) is derived, so that an action that is added has its row. A pair that is not named is exact. What holds of more than two
features follows from their pairs: the worst of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

from holdall.errors import unknown_name
from holdall.registry import member_class, member_classes, member_names

EXACT, CLOSE, REFUSED = "exact", "close", "refused"
LEVELS = (EXACT, CLOSE, REFUSED)  # from best to worst


@dataclass(frozen=True, kw_only=True)
class Feature:
    name: str
    group: str  # who decides about it: plan, model, loop or precision
    what: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of combining features."""

    level: str = EXACT
    why: str = ""  # why it is not exact; for exact ones, a remark
    hint: str = ""  # of a refusal: what to do instead
    is_bound: bool = False  # the peak may stay below its prediction
    extra: int = 0  # bytes of the loop's own that come on top of the predicted peak


_OTHERS = (
    Feature(name="lora", group="model", what="a PEFT model with LoRA adapters"),
    Feature(name="tied", group="model", what="the head is the embedding"),
    Feature(name="moe", group="model", what="a mixture of experts (Mixtral)"),
    Feature(name="frozen", group="model", what="embedding and first layer are not trained"),
    Feature(name="compiled", group="model", what="torch.compile of single blocks"),
    Feature(name="compiled_model", group="model", what="torch.compile of the whole model"),
    Feature(name="checkpointing", group="model", what="gradient_checkpointing_enable() was called"),
    Feature(name="accumulate", group="loop", what="several backwards per step (accumulate=2)"),
    Feature(name="clip", group="loop", what="clip_grad_norm_ over all parameters"),
    Feature(name="evaluate", group="loop", what="evaluation without gradients between steps"),
    Feature(name="bf16", group="precision", what='computed in bfloat16, float32 parameters (precision="bf16")'),
    Feature(name="autocast", group="precision", what="forward under torch.autocast"),
    Feature(name="scaler", group="precision", what="the loss is scaled by a torch.amp.GradScaler"),
)


def features() -> tuple[Feature, ...]:
    """All features: first the actions in their order of rewriting, those allowed by default before the others."""
    return *(Feature(name=a.name, group="plan", what=a.what) for a in _actions()), *_OTHERS


def names() -> tuple[str, ...]:
    return tuple(feature.name for feature in features())


def _actions() -> tuple[type[Any], ...]:
    return _classes(member_names("actions"))


@lru_cache(maxsize=4)
def _classes(_: tuple[str, ...]) -> tuple[type[Any], ...]:
    said = [action for action in member_classes("actions") if action.what]
    return tuple(sorted(said, key=lambda a: (not a.by_default, a.rank)))


_COMPILED = Verdict(
    level=REFUSED,
    why="compiled kernels save other tensors than a plan can see",
    hint="give the model as it was before `compile`: under a plan it runs op by op",
)

ALONE = {
    "compress": Verdict(
        level=CLOSE,
        why="gradients are approximate: at 8 bits, losses of the first steps are within 0.1 % of plain training's",
    ),
    "pieces": Verdict(
        level=CLOSE,
        why="gradients of weights are summed over pieces: in float32, losses of ten steps stay within 0.001 % of plain ones",
    ),
    "compiled": _COMPILED,
    "compiled_model": _COMPILED,
    "checkpointing": Verdict(
        level=REFUSED,
        why="the model runs its layers again in any case, and leaves a plan nothing to decide",
        hint="call `model.gradient_checkpointing_disable()`: the plan says what is recomputed",
    ),
    "scaler": Verdict(why="the scaler's own three numbers come on top of the predicted peak", extra=12),
    "bf16": Verdict(why="exact: as copies in bfloat16 beside float32 parameters train without a plan"),
}
"""What holds of a feature whatever it is put together with."""

_APART = Verdict(why="on different blocks; one block is refused")
_LOOKS = "the loop looks at gradients before the step, and in backward they are used up"

PAIRS = {
    ("in_backward", "accumulate"): Verdict(
        level=REFUSED,
        why="gradients of several backwards add up, and in backward they are used up by the first",
        hint="make the batch one backward, or let gradients be held: `in_backward(optimizer, accumulate=...)`",
    ),
    ("in_backward", "clip"): Verdict(
        level=REFUSED, why=_LOOKS, hint="let it clip instead of the loop: `in_backward(optimizer, max_norm=...)`"
    ),
    ("in_backward", "scaler"): Verdict(level=REFUSED, why=_LOOKS, hint="plan without it, or compute in bfloat16, unscaled"),
    ("reschedule", "moe"): Verdict(
        level=REFUSED,
        why="torch cannot run grouped matrix products on fake tensors in float32",
        hint="keep, recompute or offload such blocks whole; in bfloat16 they can be run op by op",
    ),
    ("pieces", "layer_swap"): Verdict(
        level=REFUSED,
        why="a block that runs in pieces has no feature maps to swap one by one",
        hint="offload the block instead: `offload`",
    ),
    ("pieces", "reschedule"): Verdict(level=CLOSE, why="on different blocks; one block is refused"),
    ("pieces", "autocast"): Verdict(level=CLOSE, why="modules whose weights autocast casts run whole"),
    ("offload", "reschedule"): Verdict(why="on one block, what the program keeps is offloaded"),
    ("layer_swap", "reschedule"): Verdict(why="on one block, its inputs and what the program keeps leave"),
    ("offload", "compress"): Verdict(why="on different blocks; codes that are to wait elsewhere: `swap`"),
    ("place", "in_backward"): Verdict(why='as `place` with when="backward"; both actions in one plan are refused'),
    ("in_backward", "bf16"): Verdict(why='as `place` with when="backward"'),
    ("accumulate", "bf16"): Verdict(why="sums of gradients are counted as if there from the start", is_bound=True),
}
"""Pairs that need a word; all others follow from what holds of each alone."""


_ONE = Verdict(level=REFUSED, why="a step has one of a kind", hint="leave one of them out")
MEMBERS = {"optimizer": "optim", "recipe": "precision"}
"""Groups whose features are the members of a registry, found when they are asked for -> the registry."""


def members() -> dict[str, tuple[Feature, Verdict, str]]:
    """Optimizers and precision recipes: what each is, what holds of it alone, and the feature that it behaves as, or nothing.

    Their classes say it, so that one more needs no word here. tests/unit/test_by_name.py runs those of this package under a
    plan of `auto`; their pairs with other features are derived, not run.
    """
    return _members(*((group, folder, member_names(folder)) for group, folder in MEMBERS.items()))


@lru_cache(maxsize=4)
def _members(*sets: tuple[str, str, tuple[str, ...]]) -> dict[str, tuple[Feature, Verdict, str]]:
    found = {}
    for group, folder, names in sets:
        for name in names:
            cls = member_class(folder, name)
            shown = name.replace("_", "-") if group == "recipe" else name
            says = _of_recipe(cls()) if group == "recipe" else _of_optimizer(cls)
            what = getattr(cls, "what", "") or getattr(cls, "paper", "")
            found[shown] = (Feature(name=shown, group=group, what=what), *says)
    return found


def _of_optimizer(cls: Any) -> tuple[Verdict, str]:
    if getattr(cls, "forward_only", False):
        return Verdict(level=REFUSED, why=f"{cls.name} takes no gradients", hint="train without a plan"), ""
    if getattr(cls, "consumes_gradients", False):
        why = f"{cls.name} updates in backward by hooks of its own"
        return Verdict(level=REFUSED, why=why, hint="plan for SGD with `reads_gradients=False`"), ""
    return Verdict(why=f"exact: as {cls.name} trains without a plan"), ""


def _of_recipe(recipe: Any) -> tuple[Verdict, str]:
    if recipe.obstacle:
        hint = f'without a plan: `holdall.precision.prepare("{recipe}", ...)`'
        return Verdict(level=REFUSED, why=f"{recipe} {recipe.obstacle}", hint=hint), ""
    kin = "bf16" if recipe.copies is not None else "autocast" if recipe.compute is not None else ""
    return Verdict(why="" if recipe.exact else f"exact: as {recipe} trains without a plan"), kin


def feature(name: str) -> Feature:
    """The feature of a name, or a member of a registry as a feature; an unknown name raises with the closest known one."""
    known = {f.name: f for f in features()}
    if name in known:
        return known[name]
    found = members()
    if name not in found:
        raise unknown_name("feature", name, (*known, *found))
    return found[name][0]


def verdict(*features: str) -> Verdict:
    """The verdict for these features together: the worst of each alone and of all pairs."""
    found = _said(tuple(dict.fromkeys(feature(name).name for name in features)))
    level = max((v.level for v in found), key=LEVELS.index, default=EXACT)
    said = [v for v in found if v.level == level] if level == REFUSED else found
    return Verdict(
        level=level,
        why="; ".join(dict.fromkeys(v.why for v in said if v.why)),
        hint="; ".join(dict.fromkeys(v.hint for v in said if v.hint)),
        is_bound=any(v.is_bound for v in found),
        extra=sum(v.extra for v in found),
    )


def _said(given: tuple[str, ...]) -> list[Verdict]:
    """All verdicts on these features, alone and in pairs."""
    others = {} if set(given) <= set(names()) else members()
    groups = Counter(others[name][0].group for name in given if name in others)
    groups["recipe"] += "bf16" in given  # a recipe, too
    of_members = [others[name][1] for name in given if name in others]
    kinds = dict.fromkeys(others[name][2] if name in others else name for name in given)
    together = [_pair(a, b) for a, b in combinations(kinds, 2)]
    alone = [_alone(name) for name in given if name not in others]
    return [v for v in (*alone, *of_members, *together, *(_ONE for n in groups.values() if n > 1)) if v is not None]


def _alone(name: str) -> Verdict | None:
    inexact = any(a.name == name and not a.exact for a in _actions())
    return ALONE.get(name) or (Verdict(level=CLOSE, why=f"{name} is not exact") if inexact else None)


def _pair(a: str, b: str) -> Verdict | None:
    return PAIRS.get((a, b)) or PAIRS.get((b, a)) or (_APART if _are_apart(a, b) else None)


def _are_apart(a: str, b: str) -> bool:
    """Do both act on blocks, and cannot act on the same block?"""
    found = [action for action in _actions() if action.name in (a, b) and action.spares_activations]
    return len(found) == 2 and any(x.alone and y.name not in x.beside for x, y in (found, reversed(found)))


def pairs(of: Iterable[str] | None = None) -> tuple[tuple[str, str], ...]:
    """All pairs of features."""
    return tuple(combinations(names() if of is None else of, 2))


def tiers() -> dict[str, str]:
    """Every tier with the tensors that it can hold: activations always, model states if the host can compute on its memory."""
    found = {}
    for name in member_names("tiers"):
        tier = member_class("tiers", name)
        if tier.serves:
            what = "activations and model states" if hasattr(tier, "memory") else "activations"
            found[name] = f"{what}, from {' or '.join(sorted(tier.serves))}"
    return found


def page() -> str:
    """The text of docs/compatibility.md."""
    known = names()
    singly = {name: _alone(name) for name in known}
    together = {(a, b): _pair(a, b) for a, b in pairs(known)}
    lines = [
        "# What works with what",
        "",
        "Made from `holdall/compatibility.py` by `holdall compatible --markdown`; every pair is run by",
        "`tests/contracts/test_compatibility.py`.",
        "",
        "- **=** exact: losses and weights are plain training's to the bit, the peak is the predicted one.",
        "- **~** close: works, with approximate gradients.",
        "- **x** refused before the first step, in one line with a hint.",
        "",
        "| feature | decided by | what it is |",
        "|---|---|---|",
        *(f"| `{f.name}` | {f.group} | {f.what} |" for f in features()),
        "",
        f"| | {' | '.join(f'`{name}`' for name in known)} |",
        "|---" * (len(known) + 1) + "|",
        *(f"| `{a}` | {' | '.join(_sign(a, b) for b in known)} |" for a in known),
        "",
        "## In words",
        "",
        *(_line(f"`{name}`", said) for name, said in singly.items() if said is not None),
        *(_line(f"`{a}` with `{b}`", said) for (a, b), said in together.items() if said is not None),
        "",
        "More than two features together are as good as the worst of their pairs. Optimizers and precision recipes, which are",
        "members of open sets, stand in the table that `holdall compatible` prints: `holdall compatible galore offload`.",
        "",
        "## Tiers",
        "",
        "Where bytes can leave to. All of the above holds for each of them.",
        "",
        *(f"- `{name}`: {what}." for name, what in tiers().items()),
    ]
    return "\n".join(lines) + "\n"


SIGNS = {EXACT: "=", CLOSE: "~", REFUSED: "x"}


def _sign(a: str, b: str) -> str:
    return SIGNS[verdict(a, b).level]


def _line(who: str, said: Verdict) -> str:
    level = f"{said.level}: " if said.level != EXACT else ""
    hint = f" ({said.hint})" if said.hint else ""
    return f"- {who}: {level}{said.why}{hint}."
