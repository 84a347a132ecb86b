"""Bachlechner et al., ReZero (UAI 2021, arXiv 2003.04887): the identity at first, and what norms kept is not kept."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from holdall.errors import Unsupported
from holdall.layers.rezero import ReZero, ReZeroEncoderLayer, gate_groups, gated_linear, rezero_

WIDTH, HEADS, INNER = 16, 4, 32


def layer(**options):
    return nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, **{"batch_first": True, "dropout": 0.0, **options})


def stack(n=3, **options):
    torch.manual_seed(0)
    norm = nn.LayerNorm(WIDTH) if options.get("norm_first") else None
    return nn.TransformerEncoder(layer(**options), n, norm=norm, enable_nested_tensor=False)


def saved_bytes(run, model):
    """Bytes that autograd keeps, by storage, without parameters."""
    known = {p.untyped_storage()._cdata for p in model.parameters()}
    kept = {}

    def pack(t):
        if t.untyped_storage()._cdata not in known:
            kept[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = run()
    return sum(storage.nbytes() for storage in kept.values()), out


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("per_sublayer", [False, True])
def test_at_initialisation_the_network_is_the_identity_bit_for_bit(norm_first, training, per_sublayer):
    model = rezero_(stack(12, norm_first=norm_first, dropout=0.1), per_sublayer=per_sublayer).train(training)
    x = torch.randn(2, 5, WIDTH)
    assert torch.equal(model(x), x)
    assert not any(isinstance(m, nn.LayerNorm) for m in model.modules())


class Normed(nn.Module):
    """The same layer as ReZero's, op for op, with norms instead of gates."""

    def __init__(self, layer):
        super().__init__()
        self.inner, self.norm1, self.norm2 = ReZeroEncoderLayer(layer), layer.norm1, layer.norm2
        self.norm_first = layer.norm_first
        self.inner.gate.requires_grad_(False).fill_(1.0)  # a constant gate of one is no gate

    def feed(self, x):
        return gated_linear(F.relu(self.inner.linear1(x)), self.inner.linear2, self.inner.gate)

    def forward(self, x):
        if self.norm_first:
            x = x + self.inner._attend(self.norm1(x), None, None, False)
            return x + self.feed(self.norm2(x))
        x = self.norm1(x + self.inner._attend(x, None, None, False))
        return self.norm2(x + self.feed(x))


@pytest.mark.parametrize("norm_first", [False, True])
def test_what_is_no_longer_saved_is_the_norms_inputs_and_statistics(norm_first):
    """Claim: one tensor of the model's width for each norm; and its mean and deviation, two numbers a token."""
    torch.manual_seed(0)
    layers = [layer(norm_first=norm_first) for _ in range(4)]
    normed = nn.Sequential(*[Normed(copy.deepcopy(one)) for one in layers])
    ours = nn.Sequential(*[ReZeroEncoderLayer(one) for one in layers])
    first = nn.Linear(WIDTH, WIDTH)  # so that the stack's input is an activation
    x = torch.randn(3, 7, WIDTH)
    tokens = 3 * 7
    head = nn.Linear(WIDTH, 2)  # keeps the stack's output in both
    with_norms, _ = saved_bytes(lambda: head(normed(first(x))), nn.ModuleList([normed, first, head]))
    without, _ = saved_bytes(lambda: head(ours(first(x))), nn.ModuleList([ours, first, head]))
    assert with_norms - without == 2 * 4 * (tokens * WIDTH * 4 + 2 * tokens * 4)  # two norms in each of four layers


@pytest.mark.parametrize("norm_first", [False, True])
def test_torchs_own_layer_saves_at_least_so_much_more(norm_first):
    plain = stack(4, norm_first=norm_first)
    ours = rezero_(copy.deepcopy(plain))
    x = torch.randn(3, 7, WIDTH, requires_grad=True)
    theirs, _ = saved_bytes(lambda: plain(x), plain)
    mine, _ = saved_bytes(lambda: ours(x), ours)
    assert theirs - mine >= 2 * 4 * 3 * 7 * WIDTH * 4


def test_a_gated_linear_has_autograds_gradients_and_keeps_its_input_alone():
    torch.manual_seed(0)
    linear = nn.Linear(6, 5).double()
    h, gate = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True), nn.Parameter(torch.tensor(0.3).double())
    weight = torch.randn(3, 4, 5, dtype=torch.float64)
    found = []
    for compute in (lambda: gated_linear(h, linear, gate), lambda: gate * linear(h)):
        for t in (h, gate, *linear.parameters()):
            t.grad = None
        (compute() * weight).sum().backward()
        found.append([t.grad for t in (h, gate, *linear.parameters())])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    kept, _ = saved_bytes(lambda: gated_linear(h, linear, gate), nn.ParameterList([*linear.parameters(), gate]))
    assert kept == h.nbytes


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masked", ["none", "causal", "padding", "both"])
def test_with_gates_of_one_it_computes_what_torchs_layer_computes_without_norms(batch_first, masked):
    torch.manual_seed(0)
    plain = layer(batch_first=batch_first)
    plain.norm1, plain.norm2 = nn.Identity(), nn.Identity()
    ours = ReZeroEncoderLayer(copy.deepcopy(plain))
    with torch.no_grad():
        ours.gate.fill_(1.0)
    x = torch.randn(2, 5, WIDTH) if batch_first else torch.randn(5, 2, WIDTH)
    causal = nn.Transformer.generate_square_subsequent_mask(5) if masked in ("causal", "both") else None
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if masked in ("padding", "both") else None
    if padding is not None and causal is not None:
        padding = torch.zeros(2, 5).masked_fill_(padding, float("-inf"))
    options = {"src_mask": causal, "src_key_padding_mask": padding, "is_causal": causal is not None}
    torch.testing.assert_close(ours(x, **options), plain(x, **options), rtol=1e-5, atol=1e-5)


def test_one_gate_of_a_layer_scales_both_of_its_sublayers():
    """As in the authors' code: x + a F(x) twice with one a, whose gradient is the sum of both; `per_sublayer` has two."""
    torch.manual_seed(0)
    plain = layer().double()
    one, two = ReZeroEncoderLayer(copy.deepcopy(plain)), ReZeroEncoderLayer(copy.deepcopy(plain), per_sublayer=True)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for gate in (one.gate, two.attention_gate, two.feedforward_gate):
            gate.fill_(0.3)
    found = []
    for ours in (one, two):
        out = ours(x)
        out.square().sum().backward()
        found.append(out)
    assert torch.equal(*found)
    torch.testing.assert_close(one.gate.grad, two.attention_gate.grad + two.feedforward_gate.grad)
    h = x + 0.3 * plain.self_attn(x, x, x, need_weights=False)[0]
    torch.testing.assert_close(found[0], h + 0.3 * plain.linear2(F.relu(plain.linear1(h))))


def test_it_takes_its_place_in_an_encoder_in_both_modes():
    torch.manual_seed(0)
    model = rezero_(nn.TransformerEncoder(layer(), 2))
    x, padding = torch.randn(2, 5, WIDTH), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for training in (True, False):
        model.train(training)
        with torch.no_grad():
            assert torch.equal(model(x, src_key_padding_mask=padding), x)


def test_a_deep_stack_trains_at_once_where_the_plain_one_without_norms_does_not():
    """Claim: depth is no obstacle and no warm-up is needed; the gates move first."""
    losses = {}
    for name in ("rezero", "without norms"):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(30)]
        if name == "rezero":
            model = nn.Sequential(*[ReZero(block) for block in blocks])
            optimizer = torch.optim.SGD(gate_groups(model, lr=0.05, gate_lr=0.05))
        else:
            model = nn.Sequential(*blocks)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x, target = torch.randn(32, 8), torch.randn(8, 8)
        for _ in range(40):
            loss = (model(x) - x @ target).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[name] = loss.item()
        if name == "rezero":
            assert all(block.gate != 0 for block in model)
    assert losses["rezero"] < 0.5 * losses["without norms"]


def test_gates_are_found_and_names_stay_and_other_blocks_are_wrapped():
    before = stack(2)
    names = {n for n, _ in before.named_parameters() if "norm" not in n}
    for per_sublayer, kinds in ((False, ("gate",)), (True, ("attention_gate", "feedforward_gate"))):
        model = rezero_(copy.deepcopy(before), per_sublayer=per_sublayer)
        gates = {f"layers.{n}.{kind}" for n in range(2) for kind in kinds}
        assert {n for n, _ in model.named_parameters()} == names | gates
        rest, own = gate_groups(model, lr=1e-3, gate_lr=1e-1, weight_decay=0.1)
        assert len(own["params"]) == len(gates) and own["weight_decay"] == 0.0 and own["lr"] == 1e-1
        assert len(rest["params"]) == len(names)
    wrapped = ReZero(nn.Tanh())
    x = torch.randn(3)
    assert torch.equal(wrapped(x), x)
    with pytest.raises(Unsupported, match="TransformerEncoderLayer"):
        rezero_(nn.Linear(2, 2))
    with pytest.raises(Unsupported, match="decoder"):
        rezero_(nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2), 1))
