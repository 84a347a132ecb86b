"""ZeRO-R (SC 2020): contiguous buffers for long-lived tensors, so that lifetimes do not mix."""

from dataclasses import replace

import pytest

from holdall.layouts.caching import CachingLayout
from holdall.layouts.zero_r import ZeroR
from holdall.types.lifetimes import lifetimes_of
from holdall.units import MiB


def checkpointed(layers, scores, checkpoint=12 * MiB):
    """Layers with a large temporary, then a small one during which the checkpoint is made; both again in backward."""
    order = []
    for n in range(layers):
        order += [(("s", n), scores), (("s", n), -1), (("m", n), 30 * MiB), (("c", n), checkpoint), (("m", n), -1)]
    backward = len(order) + 1
    for n in reversed(range(layers)):
        order += [(("bs", n), scores), (("bs", n), -1), (("bm", n), 30 * MiB), (("bm", n), -1), (("c", n), -1)]
    keys = {key: number for number, key in enumerate(dict.fromkeys(key for key, _ in order))}
    return replace(lifetimes_of([(keys[key], size) for key, size in order], align=512), phases=(backward,))


def test_the_buffer_is_the_sum_of_the_checkpoints():
    assert ZeroR()(checkpointed(8, 100 * MiB)).notes["buffers"] == 8 * 12 * MiB


@pytest.mark.parametrize("layers", [8, 16, 24])
def test_checkpoints_that_would_lie_between_temporaries_cost_less_in_a_buffer(layers):
    found = checkpointed(layers, 100 * MiB)
    assert found.load <= ZeroR()(found).reserved < CachingLayout()(found).reserved


def test_where_no_temporary_is_large_a_buffer_saves_nothing():
    found = checkpointed(12, 30 * MiB)
    assert ZeroR()(found).reserved >= CachingLayout()(found).reserved


def test_what_is_always_there_or_small_has_no_slot():
    order = [(0, 8 * MiB), (1, 8 * MiB), (2, 1000), (3, 2 * MiB), (3, -1), (1, -1), (2, -1)]
    found = replace(lifetimes_of(order, 1, align=512), phases=(4,))
    assert ZeroR()(found).notes["buffers"] == 8 * MiB
