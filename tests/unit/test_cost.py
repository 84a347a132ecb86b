"""Seconds for copies and ops: hand-made numbers, a clock that ticks in tiny steps, and properties."""

import json
import math
import time
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall.cost.link import copy_seconds
from holdall.cost.roofline import cost_trace, families, family_of, op_seconds
from holdall.cost.table import build_curves, merge_tables, rate_at
from holdall.errors import InvalidInput
from holdall.simulator.clock import Clock
from holdall.types import Hardware, Link, Op, Phase, Rate, Site, Tier, Trace


def machine(**changes):
    """A round-number accelerator: 100 FLOP/s, 10 B/s, a link of 4 B/s out and 8 B/s in."""
    tiers = (
        Tier(name="gpu", capacity=1000, read=10.0, write=10.0),
        Tier(name="cpu", capacity=9000, read=8.0, write=4.0, latency=0.5),
        Tier(name="nvme", capacity=90000, read=2.0, write=1.0, latency=0.25),
    )
    known = {
        "name": "toy",
        "device": "cpu",
        "tiers": tiers,
        "flops": {"float32": 100.0},
        "bandwidth": 10.0,
        "overhead": 1.0,
        "duplex": 0.5,
        "efficiency": 0.5,
    }
    return Hardware(**{**known, **changes})


def op(name="aten.mm.default", flops=0, moved=0, dtype="float32", number=0):
    site = Site(phase=Phase.FORWARD, module="", op=name, nth=0)
    return Op(id=number, site=site, reads=(), writes=(), flops=flops, moved=moved, dtype=dtype)


# copies


def way(tier, direction):
    return ("gpu", tier) if direction == "out" else (tier, "gpu")


class Links:
    """Copies alone on the simulator's clock, each issued at a moment."""

    def __init__(self, hardware):
        self.clock, self.now = Clock(hardware), 0.0

    def start(self, now, tier, direction, nbytes):
        self.clock.compute(now - self.now)
        self.now = now
        return self.clock.copy(*way(tier, direction), nbytes)

    def span(self, ticket):
        self.clock.run()
        return self.clock.tasks[ticket].start, self.clock.tasks[ticket].end

    def finish(self, ticket):
        return self.span(ticket)[1]


def test_a_copy_takes_its_latency_and_its_bytes_at_the_rate_of_its_direction():
    hardware = machine()
    assert copy_seconds(16, hardware, "gpu", "cpu") == 0.5 + 4.0
    assert copy_seconds(16, hardware, "cpu", "gpu") == 0.5 + 2.0
    assert copy_seconds(16, hardware, "cpu", "gpu", both_busy=True) == 0.5 + 4.0


def test_a_tier_or_rate_that_does_not_exist_is_refused():
    with pytest.raises(InvalidInput, match="no way from `cpu` to `nvme`"):
        copy_seconds(1, replace(machine(), links=BEHIND[:1]), "cpu", "nvme")
    with pytest.raises(InvalidInput, match="unknown tier `disk`"):
        machine(links=(Link(source="gpu", destination="disk", rate=1.0),))
    with pytest.raises(InvalidInput, match="could not exist"):
        machine(links=(Link(source="gpu", destination="nvme", rate=0.0),))


BEHIND = (
    Link(source="nvme", destination="cpu", rate=3.0, latency=0.25),
    Link(source="cpu", destination="nvme", rate=2.0, latency=0.25),
)  # the nvme is behind the host


def test_a_tier_behind_another_is_reached_through_it_at_the_rate_of_the_slowest_link():
    hardware = machine(links=BEHIND)
    assert [(link.source, link.destination) for link in hardware.path("gpu", "nvme")] == [("gpu", "cpu"), ("cpu", "nvme")]
    assert copy_seconds(16, hardware, "gpu", "nvme") == 0.5 + 0.25 + 16 / 2
    assert copy_seconds(15, hardware, "nvme", "gpu") == 0.25 + 0.5 + 15 / 3
    assert copy_seconds(16, hardware, "cpu", "nvme") == 0.25 + 16 / 2
    assert copy_seconds(16, hardware, "gpu", "cpu") == copy_seconds(16, machine(), "gpu", "cpu")


def test_a_listed_link_goes_before_what_the_tier_says():
    hardware = machine(
        links=(Link(source="gpu", destination="nvme", rate=16.0), Link(source="nvme", destination="gpu", rate=8.0))
    )
    assert (copy_seconds(16, hardware, "gpu", "nvme"), copy_seconds(16, hardware, "nvme", "gpu")) == (1.0, 2.0)


def test_a_machine_of_an_older_file_has_the_links_that_its_tiers_say(tmp_path):
    machine().save(tmp_path / "old.json")
    data = json.loads((tmp_path / "old.json").read_text())
    del data["links"]
    (tmp_path / "old.json").write_text(json.dumps(data))
    assert Hardware.load(tmp_path / "old.json") == machine()
    machine(links=BEHIND).save(tmp_path / "new.json")
    assert Hardware.load(tmp_path / "new.json") == machine(links=BEHIND)


def test_copies_on_different_links_do_not_hinder_each_other():
    links = Links(machine())
    near, far, back = links.start(0.0, "cpu", "out", 16), links.start(0.0, "nvme", "out", 4), links.start(0.0, "nvme", "in", 4)
    assert links.finish(near) == 4.5
    # nvme: 0.25 of latency; then each way at half, 2 bytes/s in and 1 out: `in` is done after 4 s, two bytes of `out` are left
    assert (links.finish(back), links.finish(far)) == (4.25, 6.25)


def test_tiers_on_one_wire_share_it():
    shared = tuple(Link(source="gpu", destination=name, rate=4.0, wire="pcie") for name in ("cpu", "nvme"))
    links = Links(machine(links=shared))
    first, second = links.start(0.0, "cpu", "out", 8), links.start(0.0, "nvme", "out", 16)
    assert (links.finish(first), links.finish(second)) == (4.0, 6.0)


def test_a_copy_that_passes_through_the_host_leaves_the_rest_of_the_link_to_others():
    links = Links(machine(links=(replace(BEHIND[1], rate=1.0, latency=0.0),)))
    near, far = links.start(0.0, "cpu", "out", 12), links.start(0.0, "nvme", "out", 100)
    # both begin to flow at 0.5, over a link of 4 bytes/s: one takes 1 byte/s, all that the link behind carries
    assert links.span(near) == (0.0, 0.5 + 12 / 3)
    assert links.finish(far) == 100.5


def test_copies_that_pass_through_the_host_take_half_of_the_link_at_most():
    links = Links(machine(links=(replace(BEHIND[1], rate=9.0, latency=0.0),)))
    near, far = links.start(0.0, "cpu", "out", 12), links.start(0.0, "nvme", "out", 16)
    assert (links.finish(near), links.finish(far)) == (0.5 + 6.0, 0.5 + 6.0 + 1.0)


def test_copies_behind_the_host_do_not_slow_its_processors():
    """As far as is known: only those between device and host were measured."""
    clock = Clock(machine(updates=6.0, updates_beside=2.0, links=BEHIND))
    host, copied = clock.beside("host", 10.0), clock.copy("cpu", "nvme", 16)
    clock.run()
    assert (clock.tasks[host].end, clock.tasks[copied].lane) == (10.0, "copy cpu to nvme")


def test_copies_slow_no_host_of_which_that_is_not_known():
    clock = Clock(machine(updates=6.0, updates_beside=0.0))
    host, _ = clock.beside("host", 10.0), clock.copy("gpu", "cpu", 16)
    clock.run()
    assert clock.tasks[host].end == 10.0


def test_a_lone_copy_on_the_link_takes_what_copy_seconds_says():
    for hardware in (machine(), machine(links=BEHIND)):
        for tier in ("cpu", "nvme"):
            links = Links(hardware)
            assert links.finish(links.start(3.0, tier, "out", 16)) == 3.0 + copy_seconds(16, hardware, "gpu", tier)


def test_copies_of_one_direction_of_a_link_queue_in_order():
    links = Links(machine())
    first, second = links.start(0.0, "cpu", "out", 16), links.start(1.0, "cpu", "out", 4)
    assert links.span(first) == (0.0, 4.5)
    assert links.span(second) == (4.5, 6.0)


def test_a_later_copy_the_other_way_delays_the_one_under_way():
    links = Links(machine())
    out = links.start(0.0, "cpu", "out", 16)
    assert links.finish(out) == 4.5
    back = links.start(2.0, "cpu", "in", 8)
    # out: latency to 0.5, 8 of 16 bytes by 2.5; then both at half to 4.5, when `in` is done; the last 4 bytes at full rate
    assert links.finish(back) == 4.5
    assert links.finish(out) == 5.5


def test_a_copy_that_is_over_is_not_changed_by_later_ones():
    links = Links(machine())
    out = links.start(0.0, "cpu", "out", 16)
    links.start(4.5, "cpu", "in", 800)
    assert links.finish(out) == 4.5


def ticking(copies, hardware, step):
    """The same link, advanced in tiny steps of time; finish per copy."""
    queues = {(t, d): [i for i, c in enumerate(copies) if c[1:3] == (t, d)] for t in ("cpu", "nvme") for d in ("out", "in")}
    left = [[hardware.tier(c[1]).latency, c[3]] for c in copies]
    done, now = {}, 0.0
    while len(done) < len(copies):
        heads = {}
        for d, queue in queues.items():
            queue[:] = [i for i in queue if i not in done]
            if queue and copies[queue[0]][0] <= now + step / 2:
                heads[d] = queue[0]
        flowing = {key for key, i in heads.items() if left[i][0] <= 1e-9}
        for (name, d), i in heads.items():
            tier = hardware.tier(name)
            if (name, d) not in flowing:
                left[i][0] -= step
            else:
                both = {(name, "out"), (name, "in")} <= flowing
                left[i][1] -= step * (tier.write if d == "out" else tier.read) * (hardware.duplex if both else 1.0)
            if left[i][0] <= 1e-9 and left[i][1] <= 1e-9:
                done[i] = now + step
        now += step
    return [done[i] for i in range(len(copies))]


COPIES = st.lists(
    st.tuples(st.integers(0, 12), st.sampled_from(["cpu", "nvme"]), st.sampled_from(["out", "in"]), st.integers(1, 12)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(COPIES, st.sampled_from([0.5, 0.75, 1.0]))
def test_the_link_equals_a_clock_that_ticks_in_tiny_steps(copies, duplex):
    copies.sort(key=lambda c: c[0])
    hardware, links = machine(duplex=duplex), Links(machine(duplex=duplex))
    tickets = []
    for now, tier, direction, nbytes in copies:
        tickets.append(links.start(float(now), tier, direction, nbytes))
        links.finish(tickets[0])  # asking in between must not change the answer
    step = 1 / 512
    for ticket, expected in zip(tickets, ticking(copies, hardware, step), strict=True):
        assert links.finish(ticket) == pytest.approx(expected, abs=4 * len(copies) * step)


@settings(max_examples=40, deadline=None)
@given(COPIES)
def test_without_contention_both_directions_of_every_link_are_plain_queues(copies):
    copies.sort(key=lambda c: c[0])
    hardware, ends = machine(duplex=1.0), defaultdict(float)
    links = Links(hardware)
    for now, tier, direction, nbytes in copies:
        ticket = links.start(float(now), tier, direction, nbytes)
        key = way(tier, direction)
        ends[key] = max(ends[key], now) + copy_seconds(nbytes, hardware, *key)
        assert links.finish(ticket) == pytest.approx(ends[key], rel=1e-12)


def test_ten_thousand_copies_are_served_in_a_moment():
    clock, begun = Clock(machine()), time.process_time()
    for i in range(10_000):
        clock.compute(0.1)
        clock.copy(*way("cpu", "out" if i % 2 else "in"), 1)
    clock.run()
    assert time.process_time() - begun < 4.0


def test_copies_of_one_direction_on_two_lanes_share_its_rate():
    clock = Clock(machine())
    first, second = clock.copy("gpu", "cpu", 16), clock.copy("gpu", "cpu", 8, lane="update")
    clock.run()
    # latency to 0.5; both at 2 a second until 4.5, when 8 are through; the last 8 of the first at 4 a second
    assert (clock.tasks[second].end, clock.tasks[first].end) == (4.5, 6.5)


def test_computation_waits_for_what_it_awaits_and_for_nothing_else():
    clock = Clock(machine())
    clock.compute(1.0)
    host = clock.beside("host", 5.0)
    copied = clock.copy("cpu", "gpu", 8, after=[host])
    clock.compute(2.0)
    clock.wait([copied])
    last, _ = clock.compute(1.0)
    assert clock.run() == 7.5
    assert clock.tasks[last].start == 6.5


def test_the_host_is_slower_while_bytes_flow():
    """Copies go over the memory that it works on."""
    clock = Clock(machine(updates=6.0, updates_beside=2.0))
    host = clock.beside("host", 10.0)
    out, back = clock.copy("gpu", "cpu", 16), clock.copy("cpu", "gpu", 8)
    clock.run()
    assert (clock.tasks[back].end, clock.tasks[out].end) == (2.5, 5.5)
    # 0.5 of latency; two seconds both ways, three times as slow; three out, 2.5 times; the rest at full speed
    assert clock.tasks[host].end == pytest.approx(5.5 + 10 - 0.5 - 2 / 3 - 3 / 2.5)


def test_copies_to_the_device_are_slower_while_the_host_updates():
    """Those from it are not, as was measured."""
    clock = Clock(machine(duplex=1.0, read_beside=0.5))
    clock.beside("host", 1.5)
    out, back = clock.copy("gpu", "cpu", 4), clock.copy("cpu", "gpu", 8)
    clock.run()
    alone = Clock(machine(duplex=1.0))
    alone_out, alone_back = alone.copy("gpu", "cpu", 4), alone.copy("cpu", "gpu", 8)
    alone.run()
    assert clock.tasks[out].end == alone.tasks[alone_out].end
    assert clock.tasks[back].end == pytest.approx(alone.tasks[alone_back].end + 0.5)  # a second at half of the rate


def test_a_host_whose_rate_beside_copies_was_not_measured_is_as_fast_as_ever():
    clock = Clock(machine(updates=6.0))
    host = clock.beside("host", 10.0)
    clock.copy("gpu", "cpu", 16)
    clock.run()
    assert clock.tasks[host].end == 10.0


# measured tables


def test_between_two_points_the_rate_is_read_on_logarithmic_axes():
    curve = build_curves([Rate(family="matmul", dtype="float32", work=10.0, rate=4.0)])["matmul", "float32"]
    assert rate_at(curve, 1.0) == rate_at(curve, 1e9) == pytest.approx(4.0)
    points = [Rate(family="matmul", dtype="float32", work=w, rate=r) for w, r in ((1000.0, 16.0), (10.0, 4.0))]
    curve = build_curves(points)["matmul", "float32"]
    assert rate_at(curve, 100.0) == pytest.approx(8.0)
    assert (rate_at(curve, 10.0), rate_at(curve, 1000.0)) == (pytest.approx(4.0), pytest.approx(16.0))
    assert (rate_at(curve, 0.0), rate_at(curve, 1e12)) == (pytest.approx(4.0), pytest.approx(16.0))


@given(st.lists(st.tuples(st.floats(1, 1e15), st.floats(1, 1e15)), min_size=1, max_size=8), st.floats(1, 1e15), st.floats(1, 2))
def test_more_work_never_takes_less_time(points, work, factor):
    table = [Rate(family="f", dtype="d", work=w, rate=r) for w, r in points]
    curve = build_curves(table)["f", "d"]
    assert work / rate_at(curve, work) <= work * factor / rate_at(curve, work * factor) * (1 + 1e-9)


def test_a_later_table_replaces_the_points_it_measured_again():
    old = [Rate(family="matmul", dtype="float32", work=w, rate=1.0) for w in (1.0, 2.0)]
    new = [Rate(family="matmul", dtype="float32", work=2.0, rate=5.0)]
    assert [(p.work, p.rate) for p in merge_tables(old, new)] == [(1.0, 1.0), (2.0, 5.0)]


# ops


def test_an_op_takes_its_overhead_and_the_longer_of_arithmetic_and_bytes():
    hardware = machine()
    assert op_seconds(op(flops=100, moved=10), hardware) == 1.0 + 2.0  # 100 / (100 * 0.5)
    assert op_seconds(op(flops=100, moved=50), hardware) == 1.0 + 5.0
    assert op_seconds(op("aten.add.Tensor", moved=50), hardware) == 1.0 + 5.0


def test_on_a_gpu_the_start_of_an_op_hides_behind_the_op_before():
    hardware = machine(device="cuda")
    assert op_seconds(op(flops=100, moved=10), hardware) == 2.0
    assert op_seconds(op("aten.view.default"), hardware) == 0.0


def test_a_view_takes_at_most_half_of_an_overhead():
    assert op_seconds(op("aten.view.default"), machine()) <= 0.5


def test_measured_points_come_before_the_datasheet():
    table = tuple(Rate(family="matmul", dtype="float32", work=w, rate=r) for w, r in ((10.0, 4.0), (1000.0, 16.0)))
    assert op_seconds(op(flops=100), machine(table=table)) == pytest.approx(1.0 + 100 / 8.0)
    table = (Rate(family="memory", dtype="", work=1.0, rate=25.0),)
    assert op_seconds(op("aten.add.Tensor", moved=50), machine(table=table)) == pytest.approx(1.0 + 2.0)


def test_an_unmeasured_family_goes_by_the_products_of_its_dtype():
    table = (
        Rate(family="matmul", dtype="float32", work=1.0, rate=10.0),
        Rate(family="attention", dtype="float32", work=1.0, rate=5.0),
    )
    hardware = machine(table=table)
    assert op_seconds(op("aten.convolution.default", flops=100), hardware) == pytest.approx(1.0 + 10.0)
    assert op_seconds(op("aten._scaled_dot_product_flash_attention.default", flops=100), hardware) == pytest.approx(1.0 + 20.0)


@pytest.mark.parametrize(
    ("dtype", "rate"),
    [
        ("float16", 400.0),  # its sibling of the same width
        ("bfloat16", 400.0),
        ("float8_e4m3fn", 400.0),
        ("float64", 100.0),
        ("torch.float32", 100.0),
        ("", 100.0),
        ("int8", math.inf),  # only its bytes count
        ("bool", math.inf),
    ],
)
def test_a_dtype_without_a_rate_borrows_the_nearest(dtype, rate):
    hardware = machine(flops={"float32": 100.0, "bfloat16": 400.0}, efficiency=1.0)
    assert op_seconds(op(flops=800, moved=10, dtype=dtype), hardware) == pytest.approx(1.0 + max(800 / rate, 1.0))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("aten.mm.default", "matmul"),
        ("aten::addmm", "matmul"),
        ("bmm", "matmul"),
        ("aten._grouped_mm.default", "matmul"),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", "attention"),
        ("aten._scaled_dot_product_efficient_attention_backward.default", "attention"),
        ("aten.convolution_backward.default", "conv"),
        ("aten.mul.Tensor", "memory"),
    ],
)
def test_names_of_ops_fall_into_families(name, family):
    assert family_of(name) == family


def test_every_family_in_the_mapping_is_one_that_tables_use():
    assert set(families.values()) <= {"matmul", "attention", "conv"}


def test_costing_fills_in_every_op_and_changes_nothing_else():
    ops = tuple(op(flops=i % 7 * 100, moved=i % 5 * 10, number=i) for i in range(30_000))
    trace = Trace(ops=ops, tensors={}, blocks=(), saves=())
    begun = time.process_time()
    costed = cost_trace(trace, machine())
    assert time.process_time() - begun < 2.0
    assert [replace(o, seconds=0.0) for o in costed.ops[:50]] == list(ops[:50])
    assert all(o.seconds == op_seconds(o, machine()) for o in costed.ops[:50])
    assert costed.fingerprint == trace.fingerprint
