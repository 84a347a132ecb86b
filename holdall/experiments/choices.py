"""Planners and peers as they are typed: `rotor,checkmate:method=lp,compile:ratios=[1,0.5]`, names with options."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_origin

from holdall.errors import InvalidInput, unknown_name
from holdall.experiments.peers import PEERS, Peer
from holdall.experiments.request import read_options
from holdall.types import _json

_COMMA = re.compile(r",(?![^\[]*\])")  # not those of a list


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A planner with options; `label` is what was typed."""

    label: str
    name: str
    options: Mapping[str, Any]


def read_planners(text: str) -> list[Choice]:
    """Planners with their options; what they do not have is refused with what they have."""
    found = [_parts(part) for part in _split(text)]
    return [Choice(label=label, name=name, options=read_options(name, pairs)) for label, name, pairs in found]


def read_peers(text: str) -> list[Peer]:
    """Peers with their options."""
    return [_peer(name, pairs) for _, name, pairs in map(_parts, _split(text))]


def _split(text: str) -> list[str]:
    return [part.strip() for part in _COMMA.split(text) if part.strip()]


def _parts(typed: str) -> tuple[str, str, list[str]]:
    """(as typed, name, KEY=VALUE pairs)"""
    name, *pairs = typed.split(":")
    for pair in pairs:
        if "=" not in pair:
            raise InvalidInput(f"`{typed}` gives `{pair}` no value", hint="write options as `rockmate:menus=cut:slots=200`")
    return typed, name, pairs


def _peer(name: str, pairs: list[str]) -> Peer:
    if name not in PEERS:
        raise unknown_name("peer", name, PEERS)
    cls = PEERS[name]
    known = [field.name for field in dataclasses.fields(cls)]
    options: dict[str, Any] = {}
    for key, _, value in (pair.partition("=") for pair in pairs):
        if key not in known:
            raise unknown_name(f"option of {name}", key, known)
        kind = _json._hints(cls)[key]
        read = _read(value)
        given = [read] if get_origin(kind) is tuple and not isinstance(read, list) else read
        try:
            options[key] = _json.unpack(kind, given, f"{name}:{key}")
        except InvalidInput as error:
            raise InvalidInput(error.fact, hint="write a list as `compile:ratios=[1,0.5]`") from error
    made: Peer = cls(**options)
    return made


def _read(value: str) -> Any:
    """JSON where it can be read so, else text, or a list of texts."""
    try:
        return json.loads(value)
    except ValueError:
        is_list = value.startswith("[") and value.endswith("]")
        return [part.strip() for part in value[1:-1].split(",")] if is_list else value
