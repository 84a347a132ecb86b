"""Reads lists of planners and peers with options, as in `rotor,checkmate:method=lp,compile:ratios=[1,0.5]`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_origin

from holdall.errors import InvalidInput, unknown_name
from holdall.experiments.peers import PEERS, Peer
from holdall.experiments.request import check_options
from holdall.registry import member_class, member_names, read_choice
from holdall.types import _json

_COMMA = re.compile(r",(?![^\[]*\])")  # not those of a list


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """A planner with options; `label` is what was typed."""

    label: str
    name: str
    options: Mapping[str, Any]


def read_planners(text: str) -> list[PlanChoice]:
    """Planners with their options; an unknown option raises an error that lists the known ones."""
    found = [(label, *read_choice(label)) for label in _split(text)]
    return [PlanChoice(label=label, name=name, options=check_options(name, options)) for label, name, options in found]


def every_planner(*, time_limit: float = 10.0) -> list[PlanChoice]:
    """All planners with their default options but for `time_limit`; those that cannot be imported here are left out."""
    found = []
    for name in member_names("planners"):
        try:
            known: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(member_class("planners", name))}
        except ImportError:
            continue
        options = {"time_limit": time_limit} if known.get("time_limit", 0.0) > time_limit else {}
        found.append(PlanChoice(label=name, name=name, options=options))
    return found


def read_peers(text: str) -> list[Peer]:
    """Peers with their options."""
    return [_peer(*read_choice(typed)) for typed in _split(text)]


def _split(text: str) -> list[str]:
    return [part.strip() for part in _COMMA.split(text) if part.strip()]


def _peer(name: str, given: Mapping[str, Any]) -> Peer:
    if name not in PEERS:
        raise unknown_name("peer", name, PEERS)
    cls = PEERS[name]
    known = [field.name for field in dataclasses.fields(cls)]
    options: dict[str, Any] = {}
    for key, read in given.items():
        if key not in known:
            raise unknown_name(f"option of {name}", key, known)
        kind = _json._hints(cls)[key]
        value = [read] if get_origin(kind) is tuple and not isinstance(read, list) else read
        try:
            options[key] = _json.unpack(kind, value, f"{name}:{key}")
        except InvalidInput as error:
            raise InvalidInput(error.fact, hint="write a list as `compile:ratios=[1,0.5]`") from error
    made: Peer = cls(**options)
    return made
