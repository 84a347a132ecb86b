"""Alpa, Galvatron and FlexFlow over meshes, against trying all plans; the default against them."""

import random
from functools import cache
from itertools import product

import pytest

from holdall.errors import Infeasible
from holdall.pipelines.hybrid.decoders import decoder_model
from holdall.pipelines.hybrid.layers import HybridLayer, HybridModel, Work
from holdall.pipelines.hybrid.plans import HybridPlan, formula, judged, stage_cost
from holdall.pipelines.hybrid.stage_ways import StageWays
from holdall.pipelines.hybrid.strategies import Pricing, SearchSpace, Strategy
from holdall.pipelines.meshes import Cluster, DecoderShape
from holdall.pipelines.searches import search
from holdall.pipelines.searches.galvatron import branches_of, decision_tree
from holdall.types.mesh import Network

FAST, SLOW = Network(name="fast", rate=2e11, latency=5e-6), Network(name="slow", rate=1e10, latency=1e-5)
PUBLISHED = ("alpa", "galvatron", "flexflow")
SPACE = SearchSpace(ways=("ddp", "zero3"))


def setting(seed, layers=3):
    """Unequal layers on four devices, with less memory than they would like."""
    rng = random.Random(seed)

    def layer():
        seconds = rng.choice((1, 1, 2)) * rng.uniform(0.5, 1.5) * 1e-3
        held = int(rng.uniform(0.5, 2) * 6e7)
        return HybridLayer(
            forward=(Work(arithmetic=seconds), Work(moving=seconds / 10, divided=False)),
            backward=(Work(arithmetic=2 * seconds),),
            parameters=int(rng.choice((1, 4)) * 1e7 * rng.uniform(0.5, 2)),
            output=4_000_000,
            activations=held,
            divided=int(0.7 * held),
            most_tensor=4,
        )

    model = HybridModel(layers=tuple(layer() for _ in range(layers)), batch=rng.choice((4, 8)), update=1e-11, moving=1e-12)
    wanted = sum(16 * x.parameters + model.batch * x.activations for x in model.layers)
    per_node, memory = rng.choice((2, 4)), int(wanted * rng.choice((0.2, 0.3, 0.45, 0.7)))
    return model, Cluster(devices=4, per_node=per_node, memory=memory, rate=1, inside=FAST, between=SLOW)


@cache
def exhaustive(seed, *, equal=False):
    return search("exhaustive", *setting(seed), space=SPACE, equal=equal)


SEEDS = (5, 7, 18)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_search_is_within_5_percent_of_trying_all(seed):
    """Galvatron of all plans with equal groups of devices. The default is no slower than any of them."""
    model, cluster = setting(seed)
    found = {name: search(name, model, cluster, space=SPACE) for name in PUBLISHED}
    for name, plan in found.items():
        best = exhaustive(seed, equal=name == "galvatron")
        assert best.seconds * (1 - 1e-9) <= plan.seconds <= 1.05 * best.seconds
        assert plan.peak <= cluster.memory
    assert search("auto", model, cluster, space=SPACE).seconds <= min(plan.seconds for plan in found.values())


def test_the_settings_need_different_plans():
    """One stage and several, unequal groups, recomputed layers, several ways to divide."""
    plans = [exhaustive(seed) for seed in SEEDS]
    assert {plan.pipes for plan in plans} == {1, 2, 3}
    assert any(len(set(plan.devices)) > 1 for plan in plans)
    assert any(s.recompute for plan in plans for s in plan.strategies)
    assert len({s[:3] for plan in plans for s in plan.strategies}) >= 3


def decoder(batch=8, memory=2e10, devices=8, layers=6):
    shape = DecoderShape(layers=layers, hidden=2048, heads=16, seq=1024, batch=batch)
    cluster = Cluster(devices=devices, per_node=4, memory=int(memory), rate=1e14, inside=FAST, between=SLOW)
    return decoder_model(shape, rate=1e14, bandwidth=2e12, vocabulary=32768, flash=True), cluster


def test_the_default_is_never_slower_on_a_decoder():
    model, cluster = decoder(memory=6e9)
    found = [search(name, model, cluster).seconds for name in PUBLISHED]
    assert search("auto", model, cluster).seconds <= min(found)


def test_the_trees_of_8_gpus_have_the_papers_branches():
    """Galvatron counts 22 over all numbers of stages, twice as many with recomputation."""
    assert sum(len(decision_tree(8 // pipes)) for pipes in (1, 2, 4, 8)) == 22
    pricing = Pricing(*decoder(devices=8))
    assert set(branches_of(pricing, 8)) == set(pricing.strategies(8))  # tree and space agree; orders that cost the same are one


def test_layers_pick_what_trying_all_ways_finds():
    """Three layers in eight ways, with memory between the least and the most that they could use."""
    rng = random.Random(1)
    ways = [Strategy(1, 4, way, again) for way in ("ddp", "zero3") for again in (False, True)]
    ways += [Strategy(2, 2, "ddp"), Strategy(2, 2, "zero3"), Strategy(4, 1), Strategy(4, 1, "ddp", True)]
    tried = 0
    for seed in range(8):
        model, cluster = setting(seed)
        for share in (0.3, 0.6):
            memory = int(cluster.memory * share * rng.uniform(0.8, 1.2) * 2)
            pricing = Pricing(model, Cluster(**{**fields(cluster), "memory": memory}))
            size = model.batch
            best = float("inf")
            for picked in product(ways, repeat=3):
                cost = stage_cost(pricing, picked, 0, size)
                if cost is not None and cost.states + cost.held + cost.extra <= memory:
                    best = min(best, cost.forward + cost.backward + cost.lead + cost.tail + cost.update)
            found = StageWays(pricing, ways, 1).stage(0, 3, 1)
            assert (found is None) == (best == float("inf"))
            if found is not None:
                tried += 1
                assert best * (1 - 1e-9) <= found[0] <= 1.02 * best
    assert tried >= 8


def fields(cluster):
    return {name: getattr(cluster, name) for name in ("devices", "per_node", "memory", "rate", "inside", "between")}


def test_recomputation_helps_where_memory_binds_and_never_hurts():
    without = SearchSpace(ways=SPACE.ways, recompute=(False,))
    helped = []
    for seed in (3, 5, 18, 26):
        model, cluster = setting(seed)
        both = search("galvatron", model, cluster, space=SPACE).seconds
        try:
            plain = search("galvatron", model, cluster, space=without).seconds
        except Infeasible:
            plain = float("inf")
        assert both <= 1.01 * plain  # bytes are counted in steps
        helped.append(both < 0.99 * plain)
    assert any(helped) and not all(helped)


def test_the_formula_is_near_the_simulator_for_even_stages():
    model, cluster = decoder(memory=1e12, batch=64, devices=16, layers=12)
    pricing = Pricing(HybridModel(layers=model.layers[1:-1], batch=64), cluster)
    for pipes, way in product((2, 4), (Strategy(1, 8, "zero2"), Strategy(2, 4, "ddp"))):
        each = Strategy(way.tensor, 16 // pipes // way.tensor, way.way)
        cut = tuple(range(0, 13, 12 // pipes))
        plan = HybridPlan(cut=cut, devices=(16 // pipes,) * pipes, strategies=(each,) * 12, micro_batches=4)
        found = judged(pricing, plan)
        assert found.seconds == pytest.approx(formula(pricing, plan)[0], rel=0.05)
        assert found.peak == pytest.approx(formula(pricing, plan)[1], rel=1e-6)


def test_memory_in_which_no_plan_fits_is_refused():
    model, cluster = decoder(memory=1e7)
    for name in (*PUBLISHED, "auto"):
        with pytest.raises(Infeasible, match="no mesh of 8 devices"):
            search(name, model, cluster)
