"""Where the options of planners begin to make no sense: the last value that is accepted, and the first that is refused."""

from contextlib import suppress

import pytest

from holdall.errors import Infeasible, InvalidInput
from holdall.registry import member_class
from holdall.simulator import simulate
from holdall.testing.placed import with_disk
from holdall.testing.worlds import chain
from holdall.types import Problem

SHARE = (0, 1), (-0.01, 1.01)
COUNT, NUMBER, FIRST = ((0, 1), (-1,)), ((1, 2), (0, -1)), ((1,), (0, -1))
LIMITS = {  # planner -> option -> (values that are accepted, values that are refused)
    "actnn": {"bits": ((1, 8), (0.99, 8.01)), "level": (("L0", "L5"), ("L6",))},
    "angel_ptm": {"page": COUNT},
    "autotm": {"mode": (("static", "synchronous"), ("sometimes",))},
    "capuchin": {"feedback": COUNT},
    "checkmate": {"method": (("lp",), ("guess",)), "scope": (("blocks",), ("some",))},
    "chen": {"k": NUMBER, "count": COUNT, "variant": (("greedy", "recursive"), ("cube",))},
    "delta": {"filter": (("knapsack",), ("none",)), "director": (("swap",), ("none",))},
    "dtr": {"score": (("lru",), ("none",))},
    "elixir": {"usable": ((0.01, 1), (0, 1.01)), "activations": ((1, 2), (0.99,)), "chunk": COUNT},
    "flashneuron": {"compress": (("none",), ("zip",)), "tier": (("nvme",), ("tape",))},
    "gemini": {
        "policy": (("static",), ("dynamic",)),
        "offload_optim_frac": SHARE,
        "offload_param_frac": SHARE,
        "gpu_margin_mem_ratio": SHARE,
        "min_chunk": COUNT,
        "search_range": COUNT,
        "max_prefetch": COUNT,
        "interval": NUMBER,
    },
    "l2l": {"stash": (("device", "host"), ("disk",))},
    "lohan": {"swap": COUNT},
    "memo": {"alpha": SHARE},
    "moccasin": {"copies": NUMBER, "scope": (("blocks",), ("some",))},
    "patrickstar": {"chunk": COUNT},
    "pofo": {"slots": NUMBER},
    "protrain": {"alpha": ((1, 2), (0.99,)), "chunk": COUNT},
    "ratel": {"swap": COUNT},
    "rockmate": {"menus": (("cut",), ("sliced",)), "options": FIRST, "peaks": FIRST, "slots": FIRST},
    "rotor": {"slots": ((2, 3), (1,))},
    "smart_infinity": {"drives": NUMBER, "keep": ((0.01, 1), (0, 1.01))},
    "str": {"nodes": ((3, 4), (2,)), "parts": NUMBER},
    "stronghold": {"window": COUNT},
    "superneurons": {"blocks": COUNT, "recompute": (("speed", "none"), ("often",))},
    "superoffload": {"ratio": SHARE},
    "swapadvisor": {"population": NUMBER, "generations": COUNT},
    "te_offload": {"elements": COUNT, "layers": ((0, 3), (-1, 4))},  # of four layers the last is never offloaded
    "tsplit": {"pieces": NUMBER},
    "vdnn": {"policy": (("none", "conv"), ("any",))},
    "yuan": {"alpha": SHARE, "grain": NUMBER, "checkpoint": (("full",), ("half",))},
    "zero_infinity": {"persistence_threshold": COUNT, "prefetch_bucket": COUNT, "max_live": COUNT, "sub_group": NUMBER},
    "zero_offload": {"warmup": COUNT},
}


def planned(planner, **options):
    trace, hardware = chain([30, 12, 45, 8], [1.3, 0.6, 2.1, 0.9]), with_disk(overlap=True, read=50.0, write=50.0)
    problem = Problem(trace=trace, hardware=hardware, budget={})
    limit = simulate(problem, []).peak["cpu"] * 9 // 10
    return member_class("planners", planner)(**options)(Problem(trace=trace, hardware=hardware, budget={"cpu": limit}))


@pytest.mark.parametrize("planner", LIMITS)
def test_options_are_accepted_to_their_limits_and_refused_beyond(planner):
    for option, (accepted, refused) in LIMITS[planner].items():
        for value in refused:
            with pytest.raises(InvalidInput):
                planned(planner, **{option: value})
        for value in accepted:
            with suppress(Infeasible):  # understood, and not enough
                planned(planner, **{option: value})


def test_options_that_contradict_each_other_are_refused():
    for planner, options in (
        ("gemini", {"policy": "static", "offload_param_frac": 0.5, "offload_optim_frac": 0.5}),
        ("zero_infinity", {"offload_checkpoints": True, "recompute": False}),
        ("zero_offload", {"delayed": True, "overlap": True}),
    ):
        with pytest.raises(InvalidInput):
            planned(planner, **options)
