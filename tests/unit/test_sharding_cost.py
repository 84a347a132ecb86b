"""The closed form of sharded model states: published values, and what follows from it."""

import pytest

import holdall
from holdall.cost.collectives import collective_seconds
from holdall.cost.sharding import (
    ModelStates,
    NodeLinks,
    ShardFactors,
    ShardStep,
    check_factors,
    collectives_seconds,
    memory,
    nested_factors,
    presets,
    sendings,
    sent,
    sent_across,
    state_bytes,
    step_seconds,
    transient_bytes,
)
from holdall.types import MeshDim, Network

FAST, SLOW = Network(name="fast", rate=100e9, latency=1e-6), Network(name="slow", rate=10e9, latency=1e-5)
LINKS = NodeLinks(per_node=8, inside=FAST, across=SLOW)


def in_sizes(way, ranks, *, backwards=1, **given):
    """Bytes sent in multiples of the parameters', without the part (n - 1) / n."""
    model = ModelStates.mixed(64 * ranks)
    step = ShardStep(ranks=ranks, backwards=backwards, **given)
    return sent(presets(ranks, 8)[way], model, step) / (model.params * (ranks - 1) / ranks)


def test_bytes_sent_are_the_published_multiples():
    said = {way: in_sizes(way, 1024) for way in ("ddp", "zero1", "zero2", "zero3")}
    assert said == {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 3}
    assert in_sizes("zero3", 1024, stays=True) == 2


def test_memory_is_that_of_the_papers_table():
    """7.5 billion parameters on 64 ranks: 120, 31.4, 16.6 and 1.9 GB."""
    model, step = ModelStates.mixed(7_500_000_000), ShardStep(ranks=64)
    said = {way: state_bytes(f, model, step) / 1e9 for way, f in presets(64, 8).items()}
    assert [round(said[way], 1) for way in ("ddp", "zero1", "zero2", "zero3")] == [120.0, 31.4, 16.6, 1.9]


@pytest.mark.parametrize("backwards", [1, 2, 8])
def test_stage_one_reduces_once_and_stage_two_in_every_backward(backwards):
    assert in_sizes("zero1", 64, backwards=backwards) == 2
    assert in_sizes("ddp", 64, backwards=backwards) == 2
    assert in_sizes("zero2", 64, backwards=backwards) == backwards + 1
    assert in_sizes("zero3", 64, backwards=backwards) == 3 * backwards


@pytest.mark.parametrize("backwards", [1, 4])
def test_states_over_all_ranks_cost_no_bytes(backwards):
    """(k, k, d) sends what (k, k, k) sends: its all-reduce in two halves."""
    model, step = ModelStates.mixed(64 * 1000), ShardStep(ranks=64, backwards=backwards)
    near, wide = (presets(64, 8)[way] for way in ("mics", "iig"))
    assert sent(near, model, step) == sent(wide, model, step)
    assert state_bytes(near, model, step) - state_bytes(wide, model, step) == model.states // 8 - model.states // 64


def test_a_second_copy_in_the_node_and_codes_leave_a_quarter_of_the_bytes_between_nodes():
    """ZeRO++: int8 weights, int4 gradients, and backward gathers inside the node; scales left out."""
    count, factors = 64 * 1000, presets(64, 8)["zero3"]
    plain = sent_across(factors, ModelStates.mixed(count), ShardStep(ranks=64), 8)
    coded = ModelStates(params=2 * count, grads=2 * count, states=12 * count, params_sent=count, grads_sent=count // 2)
    second = ShardStep(ranks=64, second=8)
    assert sent_across(factors, coded, second, 8) == plain / 4
    assert memory(factors, coded, second) - memory(factors, coded, ShardStep(ranks=64)) == 2 * count / 8


def by_hand(factors, step, rates):
    """Seconds of all collectives of a step with 2 bytes for a parameter and a gradient, written once more; no latencies."""
    (p, g, o), d, a, size = factors, step.ranks, step.backwards, 2 * 64_000

    def rate(ranks, stride):
        return rates[ranks * stride > 8]

    seconds = 2 * a * size * (p - 1) / p / rate(p, 1) + a * size * (g - 1) / g / rate(g, 1)
    seconds += size / g * (1 - g / o) / rate(o // g, g) + 2 * size / o * (1 - o / d) / rate(d // o, o)
    return seconds + size / p * (1 - p / o) / rate(o // p, p)


def test_seconds_are_bytes_over_the_rate_of_the_slowest_link():
    links = NodeLinks(per_node=8, inside=Network(name="f", rate=7e9, latency=0), across=Network(name="s", rate=1e9, latency=0))
    model = ModelStates.mixed(64_000)
    for backwards in (1, 3):
        step = ShardStep(ranks=64, backwards=backwards)
        for factors in nested_factors(64):
            found = collectives_seconds(factors, model, step, links)
            assert found == pytest.approx(by_hand(factors, step, (7e9, 1e9)), rel=1e-3)


def test_every_unit_has_messages_of_its_own():
    step = ShardStep(ranks=16)
    one, ten = (collectives_seconds((16, 16, 16), ModelStates.mixed(16_000, units=u), step, LINKS) for u in (1, 10))
    assert ten - one == pytest.approx(9 * 3 * 15 * SLOW.latency)


def test_collectives_hide_behind_computation_but_for_the_first_unit():
    model, factors = ModelStates.mixed(10**9, units=10), ShardFactors(16, 16, 16)
    gather = 10 * LINKS.seconds("all_gather", 2 * 10**8, 16, 1)
    idle = step_seconds(factors, model, ShardStep(ranks=16), LINKS)
    assert idle == pytest.approx(3 * gather)
    busy = step_seconds(factors, model, ShardStep(ranks=16, forward=10.0, backward=20.0), LINKS)
    assert busy == pytest.approx(30 + 3 * gather / 10)
    halves = step_seconds(factors, model, ShardStep(ranks=16, forward=gather / 2, backward=20.0), LINKS)
    assert halves == pytest.approx(gather + 20 + 2 * gather / 10)


def test_hierarchical_collectives_spare_the_slow_network():
    links = NodeLinks(per_node=8, inside=FAST, across=SLOW, hierarchical=True)
    dims = [MeshDim(name="a", size=4, network=SLOW), MeshDim(name="b", size=8, network=FAST)]
    assert links.seconds("all_gather", 10**9, 32, 1) == collective_seconds("all_gather", 10**9, dims)
    assert links.seconds("all_gather", 10**9, 32, 1) < LINKS.seconds("all_gather", 10**9, 32, 1) / 3
    assert links.seconds("all_gather", 10**9, 8, 8) == LINKS.seconds("all_gather", 10**9, 8, 8)  # one rank of each node
    assert (links.near(4, 2), links.near(8, 2), links.near(8, 8)) == (4, 4, 1)


def test_gathered_units_take_memory_for_a_while():
    model, step = ModelStates.mixed(1000, units=10), ShardStep(ranks=4)
    assert transient_bytes(ShardFactors(1, 1, 4), model, step) == 0
    assert transient_bytes(ShardFactors(4, 4, 4), model, step) == 2 * 200 + 200
    assert transient_bytes(ShardFactors(4, 4, 4), model, ShardStep(ranks=4, stays=True)) == 2000 + 200


@pytest.mark.parametrize("wrong", [(2, 1, 4), (1, 3, 4), (1, 4, 2), (0, 1, 1), (1, 1, 8)])
def test_factors_that_are_not_nested_are_refused(wrong):
    with pytest.raises(holdall.HoldallError, match="each must divide the next"):
        check_factors(ShardFactors(*wrong), 4)
    with pytest.raises(holdall.HoldallError, match="each must divide the next"):
        sendings(ShardFactors(*wrong), ModelStates.mixed(100), ShardStep(ranks=4))
