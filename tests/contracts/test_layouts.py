"""What every layout keeps: tensors that are alive together share no bytes, and nothing beats the lower bound."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall.packing import LaidOut
from holdall.packing.check import Overlap, check_layout
from holdall.packing.gaps import Gaps
from holdall.packing.skyline import Skyline
from holdall.registry import member_class, member_names
from holdall.testing.oracles import brute_force_height, random_lifetimes, training_lifetimes
from holdall.types.lifetimes import Lifetime, StepLifetimes

NAMES = member_names("layouts")
STATIC = [name for name in NAMES if member_class("layouts", name).is_static]

QUICK = {
    "imanishi": {"moves": 40},
    "minimalloc": {"nodes": 400},
    "roam": {"nodes": 400},
}  # searches are tried by the tests of their papers
SPANS = st.tuples(st.integers(0, 11), st.integers(1, 12), st.integers(1, 9))


@st.composite
def lifetimes(draw):
    """Any lifetimes, those that go on into the next step among them."""
    rows = draw(st.lists(SPANS, min_size=1, max_size=10))
    tensors = [Lifetime(key, begin, end, 512 * size) for key, (begin, end, size) in enumerate(rows)]
    return StepLifetimes(tuple(sorted(tensors, key=lambda t: t.begin)), 12, align=512)


@pytest.mark.parametrize("name", STATIC)
@settings(max_examples=30, deadline=None)
@given(lifetimes())
def test_tensors_that_are_alive_together_share_no_bytes(name, found):
    layout = member_class("layouts", name)(**QUICK.get(name, {}))(found)
    check_layout(found, layout)
    assert found.load <= layout.reserved <= sum(t.size for t in found.tensors)


@pytest.mark.parametrize("name", NAMES)
def test_no_layout_reserves_less_than_the_largest_load(name):
    for seed in range(3):
        found = training_lifetimes(random.Random(seed), 3, recompute=bool(seed % 2), unit=1 << 20)
        assert member_class("layouts", name)()(found).reserved >= found.load


@pytest.mark.parametrize("name", NAMES)
def test_the_same_lifetimes_give_the_same_layout(name):
    found = training_lifetimes(random.Random(1), 5, recompute=True)
    assert member_class("layouts", name)()(found) == member_class("layouts", name)()(found)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_without_tensors_needs_nothing(name):
    assert member_class("layouts", name)()(StepLifetimes((), 1)).reserved == 0


@pytest.mark.parametrize("name", STATIC)
def test_what_is_always_there_is_laid_end_to_end_at_the_bottom(name):
    tensors = (Lifetime(0, 0, 9, 5), Lifetime(1, 0, 4, 3), Lifetime(2, 0, 9, 7), Lifetime(3, 5, 9, 2))
    layout = member_class("layouts", name)()(StepLifetimes(tensors, 9))
    assert layout.offsets == (0, 12, 5, 12)
    assert layout.reserved == 15


@pytest.mark.parametrize("name", NAMES)
def test_a_member_says_whose_it_is(name):
    assert member_class("layouts", name).paper


def test_a_gap_of_just_the_size_is_filled_and_the_tightest_is_chosen():
    tensors = tuple(Lifetime(key, 0, 9, size) for key, size in enumerate((4, 2, 2, 3, 2)))
    for tight, expected in ((False, 4), (True, 9)):
        gaps = Gaps(StepLifetimes(tensors, 9))
        gaps.put_all({0: 0, 1: 7, 2: 11})  # gaps of 3 and of 2
        assert gaps.place(4, tight=tight) == expected
        assert gaps.place(3) == (13 if not tight else 4)


def test_a_level_that_nothing_fits_into_is_raised_to_its_lower_neighbour():
    skyline = Skyline(9, 0)
    skyline.fill(skyline.lowest(), 0, 3, 5)
    skyline.fill(skyline.lowest(), 6, 9, 2)
    assert skyline.lowest() == (0, 3, 6)
    skyline.raise_to_neighbour(skyline.lowest())
    assert skyline.lowest() == (2, 3, 9)
    assert (skyline.height(0, 4), skyline.height(4, 9)) == (5, 2)


# the checker and the oracle themselves


def two(offsets, reserved=8, **changes):
    tensors = (Lifetime(0, 0, 3, 4), Lifetime(1, 2, 5, 4))
    check_layout(StepLifetimes(tensors, 6, **changes), LaidOut(reserved=reserved, offsets=offsets))


def test_the_checker_finds_shared_bytes_bytes_outside_and_odd_offsets():
    two((0, 4))
    two((4, 0))
    for offsets, reserved, align in [((0, 3), 8, 1), ((0, 0), 8, 1), ((0, 5), 8, 1), ((-1, 4), 8, 1), ((0, 6), 10, 4)]:
        with pytest.raises(Overlap):
            two(offsets, reserved, align=align)


def test_the_checker_walks_on_into_the_next_step():
    tensors = (Lifetime(0, 1, 2, 4), Lifetime(1, 4, 2, 4))  # the second one is still there when the first comes again
    with pytest.raises(Overlap):
        check_layout(StepLifetimes(tensors, 6), LaidOut(reserved=8, offsets=(0, 2)))
    check_layout(StepLifetimes(tensors, 6), LaidOut(reserved=8, offsets=(0, 4)))


def test_lifetimes_that_follow_each_other_may_share_bytes():
    tensors = (Lifetime(0, 0, 2, 4), Lifetime(1, 2, 5, 4))
    check_layout(StepLifetimes(tensors, 6), LaidOut(reserved=4, offsets=(0, 0)))


def test_there_are_lifetimes_for_which_no_layout_reaches_the_bound():
    rows = [(0, 6, 2), (1, 1, 2), (1, 1, 4), (2, 7, 4), (2, 2, 2), (4, 8, 4), (6, 1, 4), (7, 8, 4)]
    found = StepLifetimes(tuple(Lifetime(k, *row) for k, row in enumerate(rows)), 8)
    assert (found.load, brute_force_height(found)) == (20, 22)
    assert all(member_class("layouts", name)()(found).reserved >= 22 for name in STATIC)


@pytest.mark.parametrize("seed", range(20))
def test_brute_force_is_below_every_member(seed):
    rng = random.Random(seed)
    found = random_lifetimes(rng, rng.randint(2, 6), wraps=bool(seed % 2))
    least = brute_force_height(found)
    assert found.load <= least <= min(member_class("layouts", name)()(found).reserved for name in STATIC)
