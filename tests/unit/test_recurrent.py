"""Recurrent layers, traced for a GPU: cuDNN's ops and the bytes that they take, without one."""

import itertools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import holdall
from holdall.actions.recompute import obstacle
from holdall.testing.families.recurrent import Packed, Words
from holdall.tracing.recorder import Recorder
from holdall.tracing.timing.op_timing import Trials
from holdall.tracing.values.known import KnownValues
from holdall.tracing.values.packing import pack, pad
from holdall.tracing.values.recurrent import RecurrentOps
from holdall.types import Phase

FORWARD, BACKWARD = "aten._cudnn_rnn.default", "aten._cudnn_rnn_backward.default"
LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


def traced(layer, **options):
    torch.manual_seed(0)
    model = Words(layer)
    batch = torch.randint(0, 96, (4, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    loss = lambda m, b: m(b).float().logsumexp(-1).mean()  # noqa: E731
    return holdall.trace(model, batch, optimizer=optimizer, loss=loss, device="cuda", **options)


def op_of(trace, name):
    return next(op for op in trace.ops if op.site.op == name)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_the_buffer_of_weights_and_the_reserve_stay_for_backward(kind, both_ways, precision):
    layer = LAYERS[kind](64, 32, 2, batch_first=True, bidirectional=both_ways)
    trace = traced(layer, precision=precision)
    forward, backward = op_of(trace, FORWARD), op_of(trace, BACKWARD)
    assert (forward.site.phase, backward.site.phase) == (Phase.FORWARD, Phase.BACKWARD)
    assert not forward.random
    numel = sum(p.numel() for p in layer.parameters())
    element = 4 if precision is None else 2
    kept = [trace.tensors[i] for i in forward.writes if trace.tensors[i].saved]
    assert sum(t.nbytes == -(-numel * element // 512) * 512 for t in kept) == 1
    reserve = next(t for t in kept if t.dtype == "uint8")
    assert reserve.nbytes >= 4 * 16 * 32 * 2 * (2 if both_ways else 1) * element
    assert {s.tensor for s in trace.saves} >= {t.id for t in kept}
    grads = {trace.tensors[i].name for i in backward.writes}
    assert {f"layer.{name}.grad" for name, _ in layer.named_parameters()} <= grads or precision is not None
    assert forward.flops > 0
    assert backward.flops == 2 * forward.flops


@pytest.mark.parametrize(
    ("kind", "batch_first", "both_ways", "bias"), list(itertools.product(LAYERS, [False, True], [False, True], [False, True]))
)
def test_results_and_gradients_have_the_shapes_of_the_real_ones(kind, batch_first, both_ways, bias):
    layer = LAYERS[kind](6, 5, 2, batch_first=batch_first, bidirectional=both_ways, bias=bias)
    _alike(layer, torch.randn(3, 7, 6))


def test_a_projection_and_no_batch():
    _alike(nn.LSTM(6, 5, 2, proj_size=3), torch.randn(3, 7, 6))
    _alike(nn.LSTM(6, 5), torch.randn(7, 6))


def _alike(layer, x):
    real = [t.shape for t in torch.utils._pytree.tree_leaves(layer(x))]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    cpu = torch.device("cpu")
    recorder = Recorder(values=KnownValues(mode), real=False, trials=Trials(cpu))
    with mode:
        fakes = {name: nn.Parameter(torch.empty_like(p)) for name, p in layer.named_parameters()}
        given = torch.empty_like(x).requires_grad_()
        with RecurrentOps(layer, cpu), recorder:
            out = torch.func.functional_call(layer, fakes, (given,))
            sum(t.sum() for t in torch.utils._pytree.tree_leaves(out)).backward()
    assert [t.shape for t in torch.utils._pytree.tree_leaves(out)] == real
    assert any(op.site.op == FORWARD for op in recorder.ops)
    assert given.grad.shape == x.shape
    assert all(fakes[name].grad.shape == p.shape for name, p in layer.named_parameters())


def test_under_autocast_the_layer_computes_in_bfloat16_and_weights_are_copied_once():
    layer = nn.LSTM(64, 32, 1, batch_first=True)
    trace = traced(layer, autocast="bf16")
    forward = op_of(trace, FORWARD)
    assert forward.dtype == "bfloat16"
    numel = sum(p.numel() for p in layer.parameters())
    assert not any(trace.tensors[i].nbytes >= 2 * numel and trace.tensors[i].dtype != "uint8" for i in forward.writes)


def test_dropout_between_layers_is_cudnns_own_and_is_not_drawn_twice():
    trace = traced(nn.LSTM(64, 32, 2, batch_first=True, dropout=0.1))
    assert op_of(trace, FORWARD).random
    block = next(b for b in trace.blocks if b.module == "layer")
    assert "cuDNN's own random state" in obstacle(trace, [block])
    without = traced(nn.LSTM(64, 32, 2, batch_first=True))
    assert not obstacle(without, [next(b for b in without.blocks if b.module == "layer")])


def test_a_plan_for_a_gpu_of_a_recurrent_net():
    trace = traced(nn.GRU(64, 256, 2, batch_first=True))
    whole = holdall.plan(trace, planner="nop", hardware="h200")
    kept = max(t.nbytes for t in trace.tensors.values() if t.dtype == "uint8")
    budget = whole.predicted.peak["gpu"] - kept // 2
    plan = holdall.plan(trace, budget=budget, hardware="h200")
    assert plan.actions
    assert plan.predicted.peak["gpu"] <= budget


def test_packed_sequences_are_traced_by_their_lengths():
    model = Packed()
    batch = (torch.randint(0, 96, (4, 16)), torch.tensor([16, 3, 9, 1]), torch.randint(0, 10, (4,)))
    loss = lambda m, b: nn.functional.cross_entropy(m(b[0], b[1]), b[2])  # noqa: E731
    trace = holdall.trace(model, batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, device="cuda")
    assert trace.about.source == "fake"
    assert trace.about.looked_at == (1,)
    rows = trace.tensors[op_of(trace, FORWARD).writes[0]]
    assert rows.shape == (29, 64)


@pytest.mark.parametrize("batch_first", [False, True])
def test_packing_is_as_torch_does_it(batch_first):
    x = torch.randn((4, 5, 3) if batch_first else (5, 4, 3), requires_grad=True)
    lengths = torch.tensor([5, 3, 3, 1])
    real, ours = torch._pack_padded_sequence(x, lengths, batch_first), pack(x, lengths, batch_first)
    assert torch.equal(real[0], ours[0])
    assert torch.equal(real[1], ours[1])
    incoming = torch.randn_like(real[0])
    gradients = [torch.autograd.grad(t, x, incoming, retain_graph=True)[0] for t in (real[0], ours[0])]
    assert torch.equal(*gradients)
    real, ours = torch._pad_packed_sequence(*real, batch_first, 0.5, 6), pad(*ours, batch_first, 0.5, 6)
    assert torch.equal(real[0], ours[0])
    assert torch.equal(real[1], ours[1])
