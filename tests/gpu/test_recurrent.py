"""Recurrent layers on a real GPU through `fit`: cuDNN's sizes as traced, and losses as in plain training."""

import copy
import gc

import pytest
import torch
from torch import nn

import holdall
from holdall.runtime.budget.meter import device_context
from holdall.testing.families.recurrent import Packed, Words

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STEPS = 8
LAYERS = {
    "lstm": lambda: nn.LSTM(64, 256, 2, batch_first=True),
    "lstm-both-ways": lambda: nn.LSTM(64, 128, 2, bidirectional=True, batch_first=True),
    "lstm-projected": lambda: nn.LSTM(64, 256, 1, proj_size=64, batch_first=True),
    "gru": lambda: nn.GRU(64, 256, 2, batch_first=True),
    "rnn": lambda: nn.RNN(64, 256, 2, batch_first=True),
    "no-bias": lambda: nn.LSTM(64, 256, 2, batch_first=True, bias=False),
}


def made(name, rows=32):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    model = Words(layer)
    width = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)
    model.head = nn.Linear(width, model.head.out_features)
    ids = torch.randint(0, model.words.num_embeddings, (rows, 128))
    return model.train(), (ids, ids.roll(-1, 1))


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten())


def train(model, batch, optimizer, loss):
    losses = []
    for _ in range(STEPS):
        value = loss(model, batch)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("share", [1.5, 0.8])
def test_losses_are_those_of_plain_training(name, share):
    """Of the tensors of plain training, which are large beside what kernels take: that grows as kernels are loaded."""
    model, batch = made(name, rows=512)
    model, batch = model.cuda(), tuple(t.cuda() for t in batch)
    plain = copy.deepcopy(model)
    expected = train(plain, batch, optimizer_of(plain), loss_of)
    del plain
    gc.collect()
    torch.cuda.empty_cache()
    optimizer = optimizer_of(model)
    trace = holdall.trace(model, batch, optimizer=optimizer, loss=loss_of, device="cuda")
    assert trace.about.source == "fake"
    fixed = sum(t.nbytes for t in trace.tensors.values() if t.born < 0)
    peak = holdall.plan(trace, planner="nop").predicted.peak["gpu"]
    budget = device_context(batch[0].device) + fixed + int((peak - fixed) * share)
    with holdall.fit(model, optimizer, batch, budget=budget, loss=loss_of) as harness:
        losses = train(model, batch, optimizer, loss_of)
        assert harness.report().fits
    assert losses == pytest.approx(expected, rel=5e-3, abs=5e-3)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", LAYERS)
def test_the_reserve_and_the_buffer_of_weights_are_cudnns_own(name):
    model, batch = made(name)
    trace = holdall.trace(model, batch, loss=loss_of, device="cuda")
    op = next(op for op in trace.ops if op.site.op == "aten._cudnn_rnn.default")
    said = sorted(trace.tensors[i].nbytes for i in op.writes)
    layer = model.layer.cuda()
    x = torch.zeros(32, 128, 64, device="cuda", requires_grad=True)
    weights = [w.detach().clone().requires_grad_() for w in layer._flat_weights]  # apart from each other, as copies are
    depth = layer.num_layers * (2 if layer.bidirectional else 1)
    hx = torch.zeros(depth, 32, layer.proj_size or layer.hidden_size, device="cuda")
    cx = torch.zeros(depth, 32, layer.hidden_size, device="cuda") if isinstance(layer, nn.LSTM) else None
    stride = (4 if layer.bias else 2) + (layer.proj_size > 0)
    mode = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}[layer.mode]
    real = torch.ops.aten._cudnn_rnn.default(
        x,
        weights,
        stride,
        None,
        hx,
        cx,
        mode,
        layer.hidden_size,
        layer.proj_size,
        layer.num_layers,
        True,
        0.0,
        True,
        layer.bidirectional,
        [],
        None,
    )
    got = sorted(-(-t.untyped_storage().nbytes() // 512) * 512 for t in real)
    assert [n for n in said if n] == [n for n in got if n]


def test_dropout_trains_and_the_random_state_is_left_by_the_trace():
    torch.manual_seed(0)
    model = Words(nn.LSTM(64, 256, 2, batch_first=True, dropout=0.1)).train().cuda()
    ids = torch.randint(0, model.words.num_embeddings, (32, 128), device="cuda")
    optimizer = optimizer_of(model)
    before = torch.cuda.get_rng_state()
    holdall.trace(model, (ids, ids), optimizer=optimizer, loss=loss_of)
    assert torch.equal(before, torch.cuda.get_rng_state())
    with holdall.fit(model, optimizer, (ids, ids), budget="20GiB", loss=loss_of):
        losses = train(model, (ids, ids), optimizer, loss_of)
    assert losses[-1] < losses[0]


def test_packed_sequences():
    torch.manual_seed(0)
    model = Packed().train().cuda()
    lengths = torch.tensor([32, 30, 7, 12, 25, 1, 18, 9])
    batch = (torch.randint(0, 64, (8, 32), device="cuda"), lengths, torch.randint(0, 10, (8,), device="cuda"))

    def loss(m, b):
        return nn.functional.cross_entropy(m(b[0], b[1]), b[2])

    plain = copy.deepcopy(model)
    expected = train(plain, batch, optimizer_of(plain), loss)
    optimizer = optimizer_of(model)
    trace = holdall.trace(model, batch, optimizer=optimizer, loss=loss, device="cuda")
    assert trace.about.source == "fake"
    with holdall.fit(model, optimizer, batch, budget="20GiB", loss=loss):
        losses = train(model, batch, optimizer, loss)
    assert losses == pytest.approx(expected, rel=5e-3, abs=5e-3)
