"""Values with which ops are timed alone, and the mixture in which they are timed together."""

from __future__ import annotations

import torch

from holdall.tracing.timing.op_inputs import describe, make_inputs
from holdall.tracing.timing.step_mixture import MixturePart, choose, interleave, slowdown

aten = torch.ops.aten


def _made(func, *args, **kwargs):
    return make_inputs(func, describe(args, kwargs), on_host=True)


def test_indices_are_spread_over_what_they_index():
    rows = torch.zeros(64, dtype=torch.long)
    (_, indices, _, _), _ = _made(aten.index_put.default, torch.zeros(16, 4), [rows], torch.zeros(64, 4), True)
    assert indices[0].bincount(minlength=16).tolist() == [4] * 16
    (_, _, index), _ = _made(aten.gather.default, torch.zeros(2, 8), 1, torch.zeros(2, 8, dtype=torch.long))
    assert index.unique().tolist() == list(range(8))
    (_, tokens), _ = _made(aten.embedding.default, torch.zeros(32, 4), torch.zeros(4, 8, dtype=torch.long))
    assert tokens.unique().numel() == 32
    (_, target, *_), _ = _made(
        aten.nll_loss_forward.default, torch.zeros(10, 5), torch.zeros(10, dtype=torch.long), None, 1, -100
    )
    assert target.unique().tolist() == [0, 1, 2, 3, 4]


def test_groups_of_a_grouped_product_are_equal():
    offs = torch.zeros(4, dtype=torch.int32)
    (_, _, ends), _ = _made(aten._grouped_mm.default, torch.zeros(64, 8), torch.zeros(4, 8, 8), offs)
    assert ends.tolist() == [16, 32, 48, 64]
    (_, _, ends), _ = _made(aten._grouped_mm.default, torch.zeros(8, 66), torch.zeros(66, 8), offs)
    assert ends.tolist() == [16, 32, 48, 66]


def test_expanded_tensors_can_be_made():
    (made, other), _ = _made(aten.add.Tensor, torch.zeros(4, 1).expand(4, 8), torch.zeros(4, 8))
    assert made.shape == (4, 8) and made.stride() == (1, 0) and made.abs().sum() > 0
    assert other.shape == (4, 8)


def test_the_time_beyond_the_sum_is_charged_to_arithmetic():
    described = describe((torch.zeros(4, 4), torch.zeros(4, 4)), {})
    product = MixturePart(aten.mm.default, described, 0.002, 20, 128, True, True)
    passes = MixturePart(aten.add.Tensor, described, 0.001, 20, 128, False, True)
    asked = []

    def time(call, count):
        call()
        asked.append(count)
        return 1.2 * expected

    expected = 0.002 * 17 + 0.001 * 17  # a round of 0.05 s
    assert abs(slowdown([product, passes], time) - (1 + 0.2 * expected / (0.002 * 17))) < 1e-9
    assert asked[0] > asked[1]  # the clock sinks before it is measured
    assert slowdown([passes], time) == 1.0


def test_the_mixture_is_interleaved_and_has_a_limit():
    assert interleave([1, 3]) == [1, 0, 1, 1] or interleave([1, 3]) == [1, 1, 0, 1]
    described = describe((torch.zeros(4),), {})
    parts = [MixturePart(aten.neg.default, described, 1e-3, n, 5 * 2**30, False, True) for n in (1, 2)]
    assert [p.times for p in choose(parts)] == [2]  # no room for both
    assert choose([MixturePart(aten.neg.default, described, 1e-6, 1, 16, False, True)]) == []
