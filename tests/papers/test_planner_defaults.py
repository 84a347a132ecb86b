"""What a planner does when it is told nothing: a change of a default changes plans of everyone, and must be meant.

From papers or their authors' code: elixir's factors, zero_infinity's sizes, zero_offload's warmup, protrain's alpha,
te_offload's elements, autotm's mode. The others are ours: how long a solver may take, how large a program it is given, how
fine a grid is.
"""

import dataclasses

import pytest

from holdall.registry import member_class

_ONLINE = {"patience": 10.0, "always": False}
_SOLVED = {"time_limit": 60.0, "scope": "auto", "nodes": 300}
DEFAULTS = {
    "actnn": {"level": "L3", "bits": None},
    "angel_ptm": {"page": 0, "hoist": True, "recompute": None},
    "auto": {"via_device": None, "ahead": True},
    "autotm": {"mode": "asynchronous", "radius": 15, "time_limit": 30.0},
    "capuchin": {"feedback": 3},
    "checkmate": {"method": "milp", "gap": 0.01, **_SOLVED},
    "chen": {"variant": "sqrt", "last": False, "k": 1},
    "coop": {"small": None, **_ONLINE},
    "distflashattn": {"last": True},
    "dtr": {"score": "dtr_eq", "sample": False, **_ONLINE},
    "elixir": {"overlap": True, "usable": 0.95, "activations": 1.25, "chunk": 0, "recompute": None},
    "gemini": {"policy": "auto", "gpu_margin_mem_ratio": 0.0, "min_chunk": 0, "search_range": 0, "interval": 1024},
    "l2l": {"stash": None, "eager": True},
    "megtaichi": {"least": None, "sample": False, **_ONLINE},
    "memo": {"alpha": None, "addresses": False},
    "moccasin": {"copies": 2, "workers": 1, **_SOLVED},
    "patrickstar": {"chunk": 0, "prefetch": False, "recompute": None},
    "pofo": {"slots": 500},
    "protrain": {"alpha": 1.1, "chunk": None},
    "ratel": {"tier": "", "swap": None},
    "rockmate": {"menus": "checkmate", "options": 6, "peaks": 2, "nodes": 32, "time_limit": 1.0, "slots": 500},
    "rotor": {"slots": 500},
    "smart_infinity": {"drives": 1, "folders": "", "keep": 1.0, "streamed": True, "recompute": True},
    "str": {"nodes": 60, "parts": 2, "time_limit": 10.0, "gap": 0.02},
    "stronghold": {"window": 0, "recompute": None},
    "superneurons": {"recompute": "cost-aware", "blocks": None},
    "superoffload": {"ratio": None, "recompute": None},
    "te_offload": {"layers": None, "elements": 256 * 1024},
    "tsplit": {"pieces": 8},
    "vdnn": {"policy": "dyn"},
    "yuan": {"alpha": None, "checkpoint": "", "grain": 1 << 20},
    "zero_infinity": {
        "tier": "host",
        "persistence_threshold": 100_000,
        "prefetch_bucket": 50_000_000,
        "max_live": 1_000_000_000,
        "sub_group": 1_000_000_000,
        "recompute": True,
        "offload_checkpoints": False,
        "pipeline_read": True,
        "pipeline_write": True,
    },
    "zero_offload": {"recompute": True, "overlap": False, "delayed": False, "warmup": 40},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name):
    given = {field.name: field.default for field in dataclasses.fields(member_class("planners", name))}
    assert {key: given[key] for key in DEFAULTS[name]} == DEFAULTS[name]
