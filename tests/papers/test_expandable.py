"""Expandable segments (PyTorch, 2023) beside the caching allocator without them."""

import random

import pytest

from holdall.layouts.caching import CachingLayout
from holdall.layouts.expandable import ExpandableLayout
from holdall.simulator.pages import Pages
from holdall.testing.oracles import training_lifetimes
from holdall.units import PAGE, MiB, TiB


def test_a_growing_batch_reuses_its_pages():
    pages, reserved = Pages(TiB), []
    for n in range(100, 105):
        for key, share in enumerate((40, 10, 40, 10, 20)):
            pages.alloc(key, n * share * MiB // 4)
        for key in range(5):
            pages.free(key)
        reserved.append(pages.reserved)
    live = [30 * n * MiB for n in range(100, 105)]
    assert reserved == [-(-size // PAGE) * PAGE for size in live]  # the caching allocator ends with 11200 MiB


@pytest.mark.parametrize("seed", range(5))
def test_reserved_bytes_are_pages_and_fewer_than_without_it(seed):
    found = training_lifetimes(random.Random(seed), 8, recompute=True, unit=2 * MiB)
    reserved = ExpandableLayout()(found).reserved
    assert reserved % PAGE == 0
    assert found.load <= reserved <= CachingLayout()(found).reserved
