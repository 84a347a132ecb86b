"""Weights of 8 bits with stochastic rounding (Q-GaLore, arXiv 2407.08296): unbiased, small, and trained as they are."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import holdall
from holdall.codecs.levels import encode_levels
from holdall.errors import Unsupported
from holdall.layers.int8_weight import Int8Weight, int8_
from holdall.optim import in_backward
from holdall.optim.adam8bit import Adam8bit
from holdall.optim.galore import GaLore
from holdall.optim.mezo import Mezo
from holdall.runtime.budget.ledger import Ledger


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def nbytes(weight):
    return sum(kept.untyped_storage().nbytes() for kept in weight.coded)


def test_a_weight_takes_a_byte_an_element_and_five_a_block():
    """Claim: 8 bits, with a scale and a zero for each group of 256."""
    weight = Int8Weight.of(values(32, 24))
    assert nbytes(weight) == 32 * 24 * (1 + 5 / 256)
    assert all(kept.dtype == dtype for kept, dtype in zip(weight.coded, (torch.uint8, torch.float32, torch.uint8), strict=True))


def test_the_mean_of_many_writes_is_what_was_written():
    """Claim: E[requantise(x)] = x; 2,000 writes, within 4.5 standard errors, but for the ends of each block's range."""
    x = values(512)
    weight, total, square = Int8Weight.of(x), torch.zeros(512, dtype=torch.float64), torch.zeros(512, dtype=torch.float64)
    for _ in range(2000):
        weight.write(x)
        error = weight.decoded().double() - x.double()
        total += error
        square += error**2
    level = weight.coded[1].repeat_interleave(256)
    assert (error.abs() < 1.01 * level).all()  # a neighbouring level, never another
    blocks = x.view(2, 256)
    ends = torch.cat([(b == b.min()) | (b == b.max()) for b in blocks])
    deviation = (square / 2000).sqrt() / 2000**0.5
    assert ((total / 2000).abs() < 4.5 * deviation + 1e-4 * level)[~ends].all()
    assert (total / 2000).abs().div(level)[ends].max() < 0.51
    assert (square[~ends] > 0).all()  # it was by chance


def test_small_updates_move_weights_by_their_mean_where_the_nearest_level_does_not():
    """Claim: 1,000 updates of a hundredth of a level move by ten levels; to the nearest, every one of them is lost."""
    level = 1 / 32
    blocks = values(4, 256).clamp(-2, 2)
    blocks[:, 0], blocks[:, 1] = -127 * level, 128 * level  # the range does not move, nor does the level
    inner = torch.ones(4, 256, dtype=torch.bool)
    inner[:, :2] = False
    start, inner = blocks.view(-1), inner.view(-1)
    step = 0.01 * level
    random, nearest = Int8Weight.of(start), Int8Weight.of(start)
    first = random.decoded()
    for _ in range(1000):
        random.write(random.decoded() + step * inner)
        for kept, found in zip(nearest.coded, encode_levels(nearest.decoded() + step * inner, bits=8), strict=True):
            kept.copy_(found)
    assert torch.equal(nearest.decoded(), first)
    moved = (random.decoded() - first)[inner]
    assert moved.mean() == pytest.approx(1000 * step, rel=0.03)
    assert moved.std() == pytest.approx((1000 * 0.01 * 0.99) ** 0.5 * level, rel=0.15)  # a coin for each update


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 8))


def test_outputs_and_gradients_are_those_of_the_decoded_weights():
    coded = int8_(model())
    plain = copy.deepcopy(coded)
    for layer in plain:
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight.decoded())
    x, found = values(16, 24), []
    for one in (coded, plain):
        out = one(x.requires_grad_())
        out.square().mean().backward()
        found.append([out, x.grad.clone(), *(p.grad for p in one.parameters())])
        x.grad = None
    assert all(type(g) is torch.Tensor for g in found[0])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_what_is_decoded_lives_for_one_layer_at_a_time():
    """Claim: resident bytes are the codes'; forward and backward add one decoded layer, not all."""
    torch.manual_seed(0)
    one = int8_(nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(10)])).requires_grad_(False)
    x = values(1, 64).requires_grad_()
    kept = [t for layer in one for t in layer.weight.coded]
    assert sum(t.nbytes for t in kept) < 0.26 * 10 * 64 * 64 * 4
    with Ledger(seed=[*kept, x]) as ledger:
        before = ledger.live
        one(x).sum().backward()
    assert ledger.peak - before < 3 * 64 * 64 * 4  # of ten


def train(one, optimizer, steps):
    x, y = values(64, 24), values(64, 8, seed=1)
    for _ in range(steps):
        loss = (one(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def q_galore(one):
    return GaLore(GaLore.groups(one, rank=8, bits=8, projector_bits=4, lazy=True, update_proj_gap=20, scale=1.0), lr=1e-2)


def test_q_galore_trains_a_model_of_8_bits_nearly_as_far_as_one_of_32():
    losses = {}
    for name in ("wide", "coded"):
        one = model()
        if name == "coded":
            int8_(one)
        before = [p.decoded().clone() if isinstance(p, Int8Weight) else None for p in one.parameters()]
        losses[name] = train(one, q_galore(one), 60)
    assert sum(isinstance(p, Int8Weight) for p in one.parameters()) == 3
    assert all(not torch.equal(b, p.decoded()) for b, p in zip(before, one.parameters(), strict=True) if b is not None)
    assert losses["coded"] < 1.3 * losses["wide"] < 0.6


def test_updates_in_backward_are_those_of_the_step():
    """Claim: the gradient of a weight is consumed as backward makes it."""
    results = []
    for backward in (False, True):
        one = int8_(model())
        optimizer = q_galore(one)
        with in_backward(optimizer) if backward else torch.enable_grad():
            train(one, optimizer, 5)
        results.append([p.decoded() if isinstance(p, Int8Weight) else p.detach() for p in one.parameters()])
    assert all(map(torch.equal, *results))


def test_it_repeats_itself_and_leaves_the_global_generator_alone():
    results = []
    for seed in (1, 2):
        one = int8_(model())
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        train(one, q_galore(one), 4)
        assert torch.equal(state, torch.get_rng_state())
        results.append([p.detach().clone() for p in one.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_copies_and_saved_models_go_on_with_the_same_bits():
    one = int8_(model())
    train(one, q_galore(one), 2)
    copied, loaded = copy.deepcopy(one), int8_(model())
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True), assign=True)
    for other in (copied, loaded):
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q) and type(p) is type(q)
    ends = [train(other, q_galore(other), 2) for other in (one, copied, loaded)]
    assert ends[0] == ends[1] == ends[2]


def test_tied_weights_stay_wide_and_autocast_computes_in_16_bits():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.inner, self.head = nn.Embedding(8, 16), nn.Linear(16, 16), nn.Linear(16, 8, bias=False)
            self.head.weight = self.embed.weight

    one = int8_(Tied())
    assert isinstance(one.inner.weight, Int8Weight) and type(one.head.weight) is nn.Parameter
    with torch.autocast("cpu", torch.bfloat16):
        out = one.inner(values(4, 16))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert one.inner.weight.grad.dtype == torch.float32
    with pytest.raises(Unsupported, match="no linear layer"):
        int8_(nn.LayerNorm(4))


def test_what_would_lose_an_update_or_count_wrong_bytes_is_refused():
    one = int8_(model())
    with pytest.raises(Unsupported, match="`weight` of `0` is stored in 8 bits"):
        holdall.trace(one, values(2, 24))
    for cls in (Adam8bit, Mezo):
        with pytest.raises(Unsupported, match="8 bits"):
            cls(one.parameters())
    weight = one[0].weight
    with torch.no_grad(), pytest.raises(Unsupported, match="in place"):
        weight.mul_(0.5)
    F.linear(values(2, 24), weight).sum().backward()
    with pytest.raises(Unsupported, match="in place"):
        torch.optim.SGD([weight], lr=0.1, foreach=False).step()
