"""Checks of arguments while the command line is parsed, before torch is loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection

from holdall import optim
from holdall.errors import unknown_name
from holdall.machine.presets import ALIASES, gpu_names
from holdall.registry import member_names
from holdall.units import TiB, parse_bytes

DTYPES = ("float32", "bfloat16", "float16", "float64", "fp32", "bf16", "fp16", "fp64", "bf16-mixed")
AUTOCASTS = ("bf16", "bfloat16", "fp16", "float16", "no", "off", "fp32", "float32")

Check = Callable[[str | None], str | None]


def one_of(what: str, known: Callable[[], Collection[str]]) -> Check:
    """A check that raises for an unknown name and suggests the closest known one."""

    def check(word: str | None) -> str | None:
        if word is not None and word not in known():
            raise unknown_name(what, word, known())
        return word

    return check


known_planner = one_of("planner", lambda: member_names("planners"))
known_gpu = one_of("GPU", lambda: (*gpu_names(), *ALIASES))
known_dtype = one_of("dtype", lambda: DTYPES)
known_autocast = one_of("autocast", lambda: AUTOCASTS)


def known_rule(text: str | None) -> str | None:
    """Check the name of an optimizer, which may have options (`galore:rank=64`)."""
    name = (text or "").partition(":")[0]
    if text is not None and name not in optim.names():
        raise unknown_name("optimizer", name, optim.names())
    return text


def known_optimizer(text: str | None) -> str | None:
    """The same; also accepts `none`."""
    return text if text == "none" else known_rule(text)


def known_actions(text: str | None) -> str | None:
    """Check a comma-separated list of actions."""
    for name in (part.strip() for part in (text or "").split(",")):
        if name and name not in member_names("actions"):
            raise unknown_name("action", name, member_names("actions"))
    return text


def a_budget(text: str | None) -> str | None:
    """Check a budget: one size or one per tier. Shares are resolved later."""
    sizes = [part.partition("=")[2] for part in text.split(",")] if text and "=" in text else [text]
    for size in sizes:
        if size is not None and size.strip() != "auto":
            parse_bytes(size.strip(), total=TiB)
    return text
