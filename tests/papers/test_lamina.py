"""Attention offloading: its partial attention and bytes for real, its turns and its rates simulated."""

import pytest
import torch
import torch.nn.functional as F

import holdall
from holdall.parallel.attention.lamina import Decoder, Devices, OffloadedAttention, apart_rate, decode_rate, rotated

HEADS, WIDTH, BATCH = 8, 16, 3


def drawn(seed, heads, tokens, dtype):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, heads, tokens, WIDTH, generator=draw, dtype=dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_partial_attention_merged_is_full_attention(group, dtype, tolerance):
    """Token after token, the first without a cache."""
    keys = HEADS // group
    away = OffloadedAttention()
    q, k, v = drawn(0, HEADS, 6, dtype), drawn(1, keys, 6, dtype), drawn(2, keys, 6, dtype)
    for t in range(6):
        found = away(0, *(x[:, :, t : t + 1] for x in (q, k, v)))
        whole = F.scaled_dot_product_attention(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], enable_gqa=True)
        torch.testing.assert_close(found, whole, rtol=0, atol=tolerance)


@pytest.mark.parametrize("group", [1, 4, 8])
def test_bytes_that_cross_are_those_of_the_formula(group):
    layers, keys = 3, HEADS // group
    away = OffloadedAttention()
    for layer in range(layers):
        away.fill(layer, drawn(3, keys, 5, torch.float16), drawn(4, keys, 5, torch.float16))
    for layer in range(layers):
        away(layer, *(drawn(n, heads, 1, torch.float16) for n, heads in ((5, HEADS), (6, keys), (7, keys))))
    model = Decoder(params=1, layers=layers, width=HEADS * WIDTH, group=group)
    assert away.sent == model.wire_bytes(BATCH) == (2 + 2 / group) * 2 * HEADS * WIDTH * BATCH * layers
    assert model.needed_rate(BATCH, 0.01, slowdown=0.1) == pytest.approx(model.wire_bytes(BATCH) / 0.001)


@pytest.mark.parametrize("batches", [2, 3, 4, 5])
def test_both_sides_are_busy_if_a_model_takes_as_long_as_the_others_attention(batches):
    """Simulated: t_model = (n - 1) t_attention, but for the beginning and the end."""
    model, pool = rotated(batches, batches - 1.0, 1.0, layers=200)
    assert min(model, pool) > 0.99
    assert rotated(batches, 0.5 * (batches - 1), 1.0, layers=200)[0] < 0.55  # models wait
    assert rotated(batches, 2.0 * (batches - 1), 1.0, layers=200)[1] < 0.55  # attention waits


STRONG = {"memory": 80 << 30, "bandwidth": 3.35e12, "flops": 989e12, "price": 11.06}  # a GPU for training, and one with more
CHEAP = {"memory": 96 << 30, "bandwidth": 4.0e12, "flops": 148e12, "price": 4.63}  # memory; prices are assumed
MODELS = {
    "70b, grouped": Decoder(params=70_600_000_000, layers=80, width=8192, group=8),
    "65b": Decoder(params=65_200_000_000, layers=80, width=8192),
    "33b": Decoder(params=32_500_000_000, layers=60, width=6656),
}


@pytest.mark.parametrize("length", [2048, 8192, 16384])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_attention_apart_decodes_faster_for_no_more_money(model, length):
    """Simulated; the paper says 16 to 90 %."""
    same = Devices(count=4, **STRONG)
    few, cheap = Devices(count=2, **STRONG), Devices(count=4, **CHEAP)
    assert few.cost + cheap.cost <= same.cost
    gain = apart_rate(model, few, cheap, length=length, rate=200e9) / decode_rate(model, same, length=length)
    assert 1.1 < gain < 1.9
    slow = apart_rate(model, few, cheap, length=length, rate=1e6) / decode_rate(model, same, length=length)
    assert slow < 0.1  # the link decides


def test_what_does_not_fit_is_refused():
    model, one = MODELS["65b"], Devices(count=1, **STRONG)
    with pytest.raises(holdall.Infeasible, match="do not fit the devices"):
        decode_rate(model, one, length=1)
    with pytest.raises(holdall.Infeasible, match="the model does not fit"):
        apart_rate(model, one, one, length=1, rate=1e9)
    with pytest.raises(holdall.Infeasible, match="two sequences do not fit"):
        apart_rate(model, Devices(count=2, **STRONG), one, length=1 << 24, rate=1e9)
    with pytest.raises(holdall.HoldallError, match="2 new tokens at once"):
        OffloadedAttention()(0, *(drawn(n, HEADS, 2, torch.float32) for n in range(3)))
    with pytest.raises(holdall.HoldallError, match="1 batches take no turns"):
        rotated(1, 1.0, 1.0, layers=2)
