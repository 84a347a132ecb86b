"""A chunked head: the loss and gradients of the whole one, its logits when asked for, and never a tensor of their size."""

import copy
import gc
import io
import types
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

import holdall
from holdall.actions.head import Head
from holdall.cost.roofline import cost_trace
from holdall.errors import InvalidInput, Unsupported
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.runtime.head import chunked_loss
from holdall.runtime.head.chunked_loss import Asked, chunked_cross_entropy
from holdall.runtime.head.lazy_logits import LazyLogits, chunk_head, head_of, rows_for
from holdall.simulator import lower
from holdall.testing.contracts import problem_for, train
from holdall.testing.worlds import chain, machine
from holdall.tracing import trace_step
from holdall.types import ChunkedHead

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul")
VOCAB, WIDTH = 211, 16
SMALL = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
FAMILIES = ["llama", "llama-tied", "qwen2", "gpt2", "mixtral", "gemma2"]


def build(name):
    """A tiny Hugging Face causal language model, in evaluation mode so that two runs can be compared."""
    import transformers as hf

    torch.manual_seed(0)
    rest = {**SMALL, **LAYERS, "num_key_value_heads": 2}
    model = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**rest)),
        "llama-tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**rest, tie_word_embeddings=True)),
        "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**rest)),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**SMALL, n_embd=WIDTH, n_layer=1, n_head=2)),
        "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**rest, num_local_experts=2)),
        "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**rest, head_dim=8, final_logit_softcapping=5.0)),
    }[name]()
    return model.eval()


def text(batch=3, length=11):
    torch.manual_seed(1)
    ids = torch.randint(3, VOCAB, (batch, length))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def chunked(model, rows=7):
    """A copy of the model with its head chunked."""
    mine = copy.deepcopy(model)
    chunk_head(mine.get_output_embeddings(), rows=rows)
    return mine


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def assert_close(mine, theirs, tolerance=2e-6):
    """Each gradient's error, by norm, is within the tolerance; and something was compared."""
    assert mine.keys() == theirs.keys()
    assert any(g is not None and g.any() for g in theirs.values())
    for name, g in theirs.items():
        assert (mine[name] is None) == (g is None), name
        if g is not None:
            assert mine[name].dtype == g.dtype
            assert (mine[name].double() - g.double()).norm() <= tolerance * g.double().norm(), name


def head_and_hidden(bias=False, dtype=torch.float32, tokens=(3, 11)):
    torch.manual_seed(2)
    head = torch.nn.Linear(WIDTH, VOCAB, bias=bias, dtype=dtype)
    hidden = torch.randn(*tokens, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, VOCAB, tokens)
    labels[0, :3] = -100
    return head, hidden, labels


def both(loss, *, bias=False, dtype=torch.float32, rows=7):
    """Loss and gradients of `loss(logits, labels)` with a chunked head, and with a plain one."""
    results = []
    for chunk in (True, False):
        head, hidden, labels = head_and_hidden(bias, dtype)
        if chunk:
            chunk_head(head, rows=rows)
        value = loss(head(hidden), labels)
        value.sum().backward()
        results.append((value.detach(), {"hidden": hidden.grad, **gradients(head)}))
    return results


class Largest(TorchDispatchMode):
    """The most elements that any op's result has, and the ops."""

    def __init__(self):
        super().__init__()
        self.numel, self.ops = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.ops.append(str(func))
        self.numel = max(self.numel, *(t.numel() for t in tree_iter(out) if isinstance(t, torch.Tensor)), 0)
        return out

    def products(self):
        return sum(op.split(".")[1] in ("mm", "addmm") for op in self.ops)


# models


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_gradients_and_logits_are_those_of_the_untouched_model(name):
    plain, batch = build(name), text()
    mine = chunked(plain)
    for more in ({}, {"num_items_in_batch": torch.tensor(17)}):
        plain.zero_grad()
        mine.zero_grad()
        expected, got = plain(**batch, **more), mine(**batch, **more)
        assert isinstance(got.logits, LazyLogits) and got.logits._call.whole is None
        torch.testing.assert_close(got.loss, expected.loss, rtol=1e-6, atol=0)
        expected.loss.backward()
        got.loss.backward()
        assert_close(gradients(mine), gradients(plain))
        assert torch.equal(got.logits, expected.logits)
        assert got.logits.requires_grad == expected.logits.requires_grad


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_no_tensor_of_the_size_of_the_logits_is_made_on_the_way_to_the_loss_and_back(name):
    plain, batch = build(name), text(8, 64)
    tokens = batch["input_ids"].numel()
    seen = []
    for model in (plain, chunked(plain, rows=128)):
        with Largest() as largest:
            model(**batch).loss.backward()
        seen.append(largest.numel)
    assert seen[0] == tokens * VOCAB
    assert seen[1] == (128 * VOCAB if name == "llama" else 8 * 2 * 64 * 64)  # the scores of Gemma's attention are larger


@pytest.mark.parametrize("name", ["llama-tied", "gemma2"])
def test_the_trace_of_a_chunked_head_predicts_its_peak(name):
    """The same ops fake and real, bytes and all; the flops are those of the whole head."""
    model, batch = build(name), text(4, 64)
    flops, peaks = [], []
    for rows in (None, 32):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        undo = chunk_head(model.lm_head, rows=rows) if rows else lambda: None
        trace = cost_trace(trace_step(model, batch, optimizer=optimizer), machine())
        plan = finish(Nop(), problem_for(trace), [])
        gc.collect()
        with holdall.apply(plan, model, optimizer) as harness:
            train(model, batch, optimizer)
        undo()
        assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]
        assert harness.notes == []
        flops.append(sum(op.flops for op in trace.ops))
        peaks.append(harness.step_peaks[-1])
    assert flops[0] == flops[1]
    assert peaks[1] < peaks[0] - batch["input_ids"].numel() * VOCAB * 4


def test_fake_tensors_see_the_ops_of_a_real_run():
    seen = []
    for mode in (None, FakeTensorMode()):
        head, hidden, labels = head_and_hidden(bias=True)
        if mode is not None:
            head.weight, head.bias = (torch.nn.Parameter(mode.from_tensor(p.detach())) for p in (head.weight, head.bias))
            hidden, labels = mode.from_tensor(hidden), mode.from_tensor(labels)
        chunk_head(head, rows=7)
        with Largest() as largest:
            F.cross_entropy(head(hidden).float().view(-1, VOCAB), labels.view(-1)).backward()
        seen.append([op for op in largest.ops if op.startswith("aten") and "detach" not in op])
    assert seen[0] == seen[1]
    assert head.weight.grad.shape == head.weight.shape


def test_generation_gives_the_same_tokens_during_and_after():
    plain, ids = build("llama"), text()["input_ids"]
    ask = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4}
    mine = copy.deepcopy(plain)
    undo = chunk_head(mine.lm_head, rows=7)
    results = []
    for model, sample in ((plain, False), (mine, False), (plain, True), (mine, True)):
        torch.manual_seed(3)
        results.append(model.generate(ids, do_sample=sample, **ask))
    undo()
    assert torch.equal(results[0], results[1]) and torch.equal(results[2], results[3])
    assert not torch.equal(results[0], results[2])
    assert torch.equal(mine.generate(ids, do_sample=False, **ask), results[0])
    assert type(mine(ids).logits) is torch.Tensor


def test_undo_restores_the_module():
    head, hidden, _ = head_and_hidden()
    before = dict(vars(head))
    undo = chunk_head(head, rows=7)
    assert isinstance(head(hidden), LazyLogits)
    undo()
    assert vars(head) == before
    assert "forward" not in head.__dict__
    assert type(head(hidden)) is torch.Tensor


# precision


@pytest.mark.parametrize("rows", [7, 16, 1000])
def test_autocast_gives_what_it_gives_to_a_whole_head(rows):
    """The weight's gradient is summed in float32, so it comes nearer to the truth than the whole, which is rounded."""
    plain, batch = build("llama"), text()
    mine = chunked(plain, rows)
    losses = []
    for model in (plain, mine):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(**batch)
        assert out.logits.dtype == torch.bfloat16
        out.loss.backward()
        losses.append(out.loss)
    assert losses[0].dtype == losses[1].dtype == torch.float32
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    assert_close(gradients(mine), gradients(plain), 5e-3)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(out.logits, plain(**batch).logits)  # `out` is read where autocast is on, and was made there


@pytest.mark.parametrize("then", [False, True])
def test_only_the_autocast_of_the_call_counts_for_the_logits(then):
    head, hidden, labels = head_and_hidden(bias=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=then):
        expected = head(hidden)
        chunk_head(head, rows=7)
        logits = head(hidden)
    with torch.autocast("cpu", torch.bfloat16, enabled=not then):
        assert logits.dtype == expected.dtype
        mine, theirs = (F.cross_entropy(z.view(-1, VOCAB), labels.view(-1)) for z in (logits, expected))
        assert mine.dtype == theirs.dtype == (torch.bfloat16 if then else torch.float32)
        torch.testing.assert_close(mine, theirs, rtol=1e-2 if then else 1e-6, atol=0)
        assert torch.equal(logits, expected)


def test_a_loss_under_autocast_is_float32():
    def loss(logits, labels):
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))

    (mine, got), (theirs, whole) = both(loss, dtype=torch.bfloat16)
    assert mine.dtype == theirs.dtype == torch.float32
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)
    assert_close(got, whole, 5e-3)


@pytest.mark.parametrize("upcast", [True, False])
def test_bfloat16_is_as_near_to_the_truth_as_stated(upcast):
    def loss(logits, labels):
        logits = logits.float() if upcast else logits
        return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))

    (mine, got), (theirs, whole) = both(loss, dtype=torch.bfloat16, rows=5)
    assert mine.dtype == theirs.dtype
    head, hidden, labels = (x.double() if x.is_floating_point() else x for x in _leaves(torch.bfloat16))
    head, hidden = head.detach().requires_grad_(), hidden.detach().requires_grad_()
    F.cross_entropy(F.linear(hidden, head).view(-1, VOCAB), labels.view(-1)).backward()
    truth = {"hidden": hidden.grad, "weight": head.grad}
    off = {
        k: {n: float((g[n].double() - truth[n]).norm() / truth[n].norm()) for n in truth}
        for k, g in (("it", got), ("whole", whole))
    }
    assert off["it"]["hidden"] <= off["whole"]["hidden"] + 1e-4
    assert 1e-4 < off["it"]["weight"] <= 6e-3
    torch.testing.assert_close(mine, theirs, rtol=1e-6 if upcast else 1e-2, atol=0)


def _leaves(dtype):
    head, hidden, labels = head_and_hidden(dtype=dtype)
    return head.weight, hidden, labels


def test_float16_gradients_do_not_vanish_before_they_are_scaled():
    def loss(logits, labels):  # the mean over very many rows, and a scaler's factor
        one = torch.full((VOCAB,), 2.0**-24)
        return F.cross_entropy(logits.float().view(-1, VOCAB), labels.view(-1), one, reduction="sum") * 2.0**24

    (mine, got), (theirs, whole) = both(loss, dtype=torch.float16)
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)
    assert_close(got, whole, 1e-3)


# losses of raw loops


LOSSES = {
    "flat": lambda z, y: F.cross_entropy(z.view(-1, z.size(-1)), y.view(-1)),
    "last dimension left open": lambda z, y: F.cross_entropy(z.view(z.shape[0] * z.shape[1], -1), y.view(-1)),
    "shifted": lambda z, y: F.cross_entropy(z[..., :-1, :].contiguous().view(-1, VOCAB), y[..., 1:].reshape(-1)),
    "shifted otherwise": lambda z, y: F.cross_entropy(z[:, :-1].float().flatten(0, 1), y[:, 1:].flatten()),
    "first row": lambda z, y: F.cross_entropy(z[1], y[1]),
    "last position": lambda z, y: F.cross_entropy(z[:, -1, :], y[:, -1]),
    "masked": lambda z, y: F.cross_entropy(z[y > 50], y[y > 50]),
    "picked": lambda z, y: F.cross_entropy(
        z[torch.tensor([0, 2]), 5:].reshape((-1, VOCAB)), y[torch.tensor([0, 2]), 5:].flatten()
    ),
    "module": lambda z, y: torch.nn.CrossEntropyLoss()(torch.flatten(z, end_dim=-2), y.flatten()),
    "sum": lambda z, y: F.cross_entropy(z.to(torch.float32).view(-1, VOCAB), y.view(-1), reduction="sum"),
    "none": lambda z, y: F.cross_entropy(z.view(-1, VOCAB), y.view(-1), reduction="none") * torch.arange(33),
    "another label ignored": lambda z, y: F.cross_entropy(z.view(-1, VOCAB), y.clamp(min=0).view(-1), ignore_index=0),
    "smoothed": lambda z, y: F.cross_entropy(z.view(-1, VOCAB), y.view(-1), label_smoothing=0.1),
    "smoothed, by row": lambda z, y: F.cross_entropy(z.view(-1, VOCAB), y.view(-1), label_smoothing=0.3, reduction="none"),
    "weighted": lambda z, y: F.cross_entropy(z.view(-1, VOCAB), y.view(-1), weight=torch.linspace(0.1, 2, VOCAB)),
    "weighted sum": lambda z, y: F.cross_entropy(z.view(-1, VOCAB), y.view(-1), torch.linspace(0.1, 2, VOCAB), reduction="sum"),
    "capped": lambda z, y: F.cross_entropy((torch.tanh(z / 3) * 3).view(-1, VOCAB), y.view(-1)),
    "capped, cast, shifted": lambda z, y: F.cross_entropy(
        (3 * (z / 3).tanh()).float()[:, :-1].reshape(-1, VOCAB), y[:, 1:].reshape(-1), reduction="sum"
    ),
    "capped after the cast": lambda z, y: F.cross_entropy(
        (torch.tanh(z.float().view(-1, VOCAB) / 3) * 3), y.view(-1), reduction="none"
    ),
    "capped twice, smoothed": lambda z, y: F.cross_entropy(
        (torch.tanh(torch.tanh(z / 3) * 3)).view(-1, VOCAB), y.view(-1), label_smoothing=0.1
    ),
    "scaled": lambda z, y: F.cross_entropy((z * 0.25).view(-1, VOCAB), y.view(-1)),
    "scaled by a tensor": lambda z, y: F.cross_entropy(
        (torch.tensor(0.25) * z / torch.tensor([3])).view(-1, VOCAB), y.view(-1)
    ),
    "a bias": lambda z, y: F.cross_entropy((z + torch.linspace(-1, 1, VOCAB)).view(-1, VOCAB), y.view(-1)),
    "a bias less, as a table": lambda z, y: F.cross_entropy(
        (torch.linspace(-1, 1, VOCAB).view(1, 1, -1) * (z - torch.ones(1, VOCAB))).view(-1, VOCAB), y.view(-1)
    ),
    "twice": lambda z, y: F.cross_entropy(z[0], y[0]) + 2 * F.cross_entropy(z[1:].reshape(-1, VOCAB), y[1:].reshape(-1)),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_taken_without_the_logits(name, bias):
    torch.manual_seed(4)
    calls = []

    def loss(logits, labels):
        value = LOSSES[name](logits, labels)
        if isinstance(logits, LazyLogits):
            calls.append(logits._call)
        return value

    (mine, got), (theirs, expected) = both(loss, bias=bias)
    assert calls[0].whole is None
    torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-6)
    assert_close(got, expected)


FALLBACKS = {
    "channels second": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "permuted": lambda z, y: F.cross_entropy(z.permute(0, 2, 1), y),
    "capped in place": lambda z, y: F.cross_entropy(((z / 3).tanh_() * 3).view(-1, VOCAB), y.view(-1)),
    "a temperature per row": lambda z, y: F.cross_entropy((z * torch.rand(3, 11, 1)).view(-1, VOCAB), y.view(-1)),
    "with itself": lambda z, y: F.cross_entropy((z * z).view(-1, VOCAB), y.view(-1)),
    "rounded": lambda z, y: F.cross_entropy(torch.div(z, 0.1, rounding_mode="floor").view(-1, VOCAB) * z[0, 0], y.view(-1)),
    "widened": lambda z, y: F.cross_entropy((z * torch.ones(VOCAB, dtype=torch.float64)).view(-1, VOCAB), y.view(-1)),
    "one more dimension": lambda z, y: F.cross_entropy((z + torch.ones(1, 1, 1, VOCAB)).view(-1, VOCAB), y.view(-1)),
    "own function, capped": lambda z, y: OwnLoss.apply(
        (torch.tanh(z / 3) * 3).float().view(-1, VOCAB) * 2, y.view(-1).clamp(min=0)
    ),
    "scaled in place": lambda z, y: F.cross_entropy(z.div_(2).view(-1, VOCAB), y.view(-1)),
    "scaled in place, by name": lambda z, y: (z.mul_(2), F.cross_entropy(z.view(-1, VOCAB), y.view(-1)))[1],
    "masked vocabulary": lambda z, y: (
        z.__setitem__((slice(None), slice(None), 7), -1e4),
        F.cross_entropy(z.view(-1, VOCAB), y.view(-1).masked_fill(y.view(-1) == 7, -100)),
    )[1],
    "part of the vocabulary": lambda z, y: F.cross_entropy(z[..., :100].reshape(-1, 100), y.clamp(max=99).view(-1)),
    "log-probabilities": lambda z, y: -z.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None]).mean(),
    "with a penalty": lambda z, y: F.cross_entropy(z.view(-1, VOCAB), y.view(-1)) + 0.1 * z.logsumexp(-1).square().mean(),
    "penalty first": lambda z, y: 0.1 * z.logsumexp(-1).square().mean() + F.cross_entropy(z.view(-1, VOCAB), y.view(-1)),
    "soft targets": lambda z, y: F.cross_entropy(z[0], torch.full((11, VOCAB), 1 / VOCAB)),
    "weighted and smoothed": lambda z, y: F.cross_entropy(
        z.view(-1, VOCAB), y.view(-1), weight=torch.linspace(0.1, 2, VOCAB), label_smoothing=0.1
    ),
    "narrowed": lambda z, y: F.cross_entropy(z.to(torch.bfloat16).float().view(-1, VOCAB), y.view(-1)),
    "own function": lambda z, y: OwnLoss.apply(z.view(-1, VOCAB), y.view(-1).clamp(min=0)),
    "joined": lambda z, y: F.cross_entropy(torch.cat([z[0], z[2]]), torch.cat([y[0], y[2]])),
    "nothing left": lambda z, y: (
        F.cross_entropy(z[:, :0].reshape(-1, VOCAB), y[:, :0].reshape(-1), reduction="sum") + F.cross_entropy(z[0], y[0])
    ),
}


class OwnLoss(torch.autograd.Function):
    """Somebody's fused loss: `__torch_function__` does not see it applied."""

    @staticmethod
    def forward(ctx, logits, labels):
        p = logits.softmax(-1)
        ctx.save_for_backward(p, labels)
        return -p.gather(1, labels[:, None]).log().sum()

    @staticmethod
    def backward(ctx, incoming):
        p, labels = ctx.saved_tensors
        return (p - F.one_hot(labels, p.shape[1])) * incoming, None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", FALLBACKS)
def test_a_loss_that_wants_the_logits_gets_them(name, bias):
    def loss(logits, labels):
        torch.manual_seed(4)
        return FALLBACKS[name](logits, labels)

    (mine, got), (theirs, expected) = both(loss, bias=bias)
    torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-6)
    assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_capped_logits_are_rounded_as_the_whole_ones_are(dtype):
    """In the head's dtype before the cast, in float32 after it; and a bias in float32 casts by itself."""

    def loss(logits, labels):
        logits = torch.tanh(logits / 3) * 3
        logits = (logits + torch.linspace(-1, 1, VOCAB)) * 2
        assert logits.dtype == torch.float32
        return F.cross_entropy(torch.tanh(logits.float()).view(-1, VOCAB), labels.view(-1))

    (mine, got), (theirs, expected) = both(loss, dtype=dtype, rows=5)
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)
    assert_close(got, expected, 8e-3 if dtype == torch.bfloat16 else 2e-3)


def test_an_operand_that_learns_gets_its_gradient():
    """From the whole logits; the scale of a plain run learns the same."""
    results = []
    for chunk in (True, False):
        head, hidden, labels = head_and_hidden()
        scale, bias = torch.nn.Parameter(torch.tensor(0.5)), torch.nn.Parameter(torch.linspace(-1, 1, VOCAB))
        if chunk:
            chunk_head(head, rows=7)
        F.cross_entropy((head(hidden) * scale.exp() + bias).view(-1, VOCAB), labels.view(-1)).backward()
        results.append({"hidden": hidden.grad, "scale": scale.grad, "bias": bias.grad, **gradients(head)})
    assert_close(*results)


def test_an_operand_that_has_changed_is_refused_not_used():
    head, hidden, labels = head_and_hidden()
    chunk_head(head, rows=7)
    bias = torch.zeros(VOCAB)
    logits = head(hidden)
    moved = logits + bias
    bias.add_(1)
    for use in (lambda: moved.sum(), lambda: F.cross_entropy(moved.view(-1, VOCAB), labels.view(-1))):
        with pytest.raises(Unsupported, match="operand of their `add`"):
            use()
    logits.sum()  # does not depend on it


def test_logits_that_leave_their_graph_keep_their_values_and_nothing_else():
    head, hidden, labels = head_and_hidden()
    expected = torch.tanh(head(hidden.sin()) / 3)
    chunk_head(head, rows=7)
    inner = hidden * 1
    logits = torch.tanh(head(inner.sin()) / 3)
    loss = F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))
    held = weakref.ref(inner.untyped_storage())
    del inner
    loss.detach_()
    gc.collect()
    assert held() is not None
    logits.leave_graph()
    gc.collect()
    assert held() is None
    assert not logits.requires_grad
    assert torch.equal(logits, expected.detach())


LOOKS = {
    "argmax": lambda z: z.argmax(-1),
    "softmax": lambda z: torch.softmax(z, -1),
    "detach": lambda z: z.detach(),
    "numpy": lambda z: torch.from_numpy(z.detach().numpy()),
    "list": lambda z: z.tolist(),
    "print": repr,
    "iterate": lambda z: torch.stack(list(z)),
    "a column": lambda z: z[:, :, 3],
    "a column from the end": lambda z: z[..., 3],
    "a new dimension": lambda z: z[None].shape,
    "arithmetic from the left": lambda z: 1 - z,
    "compare": lambda z: z == z.max(),
    "transpose": lambda z: z.transpose(0, 1).stride(),
    "strides of a part": lambda z: z[:, :-1].stride(),
    "top": lambda z: z.topk(3).indices,
    "half": lambda z: z.to(torch.float16),
    "double": lambda z: z.double(),
    "as another": lambda z: torch.zeros(1, dtype=torch.float64).to(z).dtype,
    "like": lambda z: torch.zeros_like(z).shape,
    "a part, cast, on top": lambda z: z[:, -1, :].to(copy=True, dtype=torch.float32, device="cpu").exp(),
    "saved": lambda z: _through_a_file(z),
    "facts": lambda z: (
        *(z.shape, z.size(-1), z.dim(), z.ndim, z.dtype, z.device, z.numel(), len(z), z.is_floating_point(), z.nbytes),
        *(z.requires_grad, z.is_leaf, z.layout, z.stride(), z.is_contiguous(), torch.is_tensor(z), z.itemsize),
    ),
}


def _through_a_file(tensor):
    file = io.BytesIO()
    torch.save(tensor.detach(), file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("name", LOOKS)
def test_whoever_looks_sees_the_logits(name):
    seen = []
    for chunk in (True, False):
        head, hidden, _ = head_and_hidden(bias=True)
        if chunk:
            chunk_head(head, rows=7)
        logits = head(hidden)
        assert isinstance(logits, LazyLogits) == chunk
        seen.append(LOOKS[name](logits))
    mine, theirs = seen
    assert type(mine) is type(theirs)
    assert torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs


def test_facts_and_hashes_do_not_compute_anything():
    head, hidden, _ = head_and_hidden()
    chunk_head(head, rows=7)
    with Largest() as largest:
        logits = head(hidden)
        LOOKS["facts"](logits)
        assert {logits: 1}[logits] == 1
        assert logits.untyped_storage()._cdata == hidden.untyped_storage()._cdata
        assert logits.grad_fn is hidden.grad_fn is None
    assert largest.numel == 0
    before = hash(logits)
    logits.sum()
    assert hash(logits) == before


def test_the_whole_is_computed_once():
    head, hidden, labels = head_and_hidden()
    chunk_head(head, rows=7)
    with Largest() as largest:
        logits = head(hidden)
        logits.argmax(-1)
        logits.view(-1, VOCAB).softmax(-1)
        F.cross_entropy(logits.float().view(-1, VOCAB), labels.view(-1))
    assert largest.products() == 1


def test_an_op_that_goes_past_torch_function_sees_the_values():
    head, hidden, _ = head_and_hidden()
    expected = head(hidden).exp()
    chunk_head(head, rows=7)
    logits = head(hidden)
    with torch._C.DisableTorchFunctionSubclass():
        got = torch.exp(logits)
        part = torch.exp(logits.__class__.view(logits, -1, VOCAB))
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(part, expected.view(-1, VOCAB))
    (theirs,) = torch.autograd.grad(expected.sum(), hidden)
    for mine in (got, part, logits.exp()):
        torch.testing.assert_close(torch.autograd.grad(mine.sum(), hidden)[0], theirs)


def test_function_transforms_and_compilers_get_the_whole():
    head, hidden, labels = head_and_hidden()
    weights = dict(head.named_parameters())

    def loss(weights):
        return F.cross_entropy(torch.func.functional_call(head, weights, (hidden,)).view(-1, VOCAB), labels.view(-1))

    expected = torch.func.grad(loss)(weights)["weight"]
    chunk_head(head, rows=7)
    assert torch.equal(torch.func.grad(loss)(weights)["weight"], expected)
    compiled = torch.compile(lambda hidden: head(hidden).relu(), backend="eager")
    assert torch.equal(compiled(hidden), F.linear(hidden, head.weight).relu())


# work done and memory held


def test_a_chunk_costs_three_products_and_backward_none():
    head, hidden, labels = head_and_hidden()
    chunk_head(head, rows=11)
    with Largest() as forward:
        loss = F.cross_entropy(head(hidden).view(-1, VOCAB), labels.view(-1))
    with Largest() as backward:
        loss.backward()
    assert (forward.products(), backward.products()) == (9, 0)


@pytest.mark.parametrize(("frozen", "products"), [("weight", 6), ("hidden", 6), ("both", 3)])
def test_what_is_frozen_costs_nothing(frozen, products):
    head, hidden, labels = head_and_hidden()
    head.weight.requires_grad_(frozen == "hidden")
    hidden.requires_grad_(frozen == "weight")
    chunk_head(head, rows=11)
    with Largest() as largest:
        loss = F.cross_entropy(head(hidden).view(-1, VOCAB), labels.view(-1))
        if frozen != "both":
            loss.backward()
    assert largest.products() == products
    assert loss.requires_grad == (frozen != "both")
    assert (head.weight.grad is None) == (frozen != "hidden")
    assert (hidden.grad is None) == (frozen != "weight")


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_computes_losses_only(context):
    plain, batch = build("llama"), text()
    mine = chunked(plain, rows=11)
    with context():
        expected = plain(**batch)
        with Largest() as largest:
            out = mine(**batch)
        torch.testing.assert_close(out.loss, expected.loss, rtol=1e-6, atol=0)
        assert not out.loss.requires_grad
        assert "aten.exp_.default" not in largest.ops
    assert not out.logits.requires_grad
    assert torch.equal(out.logits, expected.logits)


def test_a_part_taken_without_gradients_gives_none():
    head, hidden, labels = head_and_hidden()
    chunk_head(head, rows=7)
    logits = head(hidden)
    with torch.no_grad():
        part = logits[0]
        assert not F.cross_entropy(logits[1], labels[1]).requires_grad
    assert not part.requires_grad
    assert not F.cross_entropy(part, labels[0]).requires_grad
    assert F.cross_entropy(logits[0], labels[0]).requires_grad


def test_nothing_but_ignored_labels_is_nan_with_zero_gradients_as_in_torch():
    (mine, got), (theirs, expected) = both(lambda z, y: F.cross_entropy(z.view(-1, VOCAB), y.view(-1) * 0 - 100))
    assert mine.isnan() and theirs.isnan()
    for name, g in expected.items():
        assert not g.any() and torch.equal(got[name], g)


def test_saved_tensors_may_travel():
    """What autograd saves is copied away, and copied again when it is asked for."""
    saved = []

    def loss(logits, labels):
        def pack(tensor):
            saved.append(tensor.shape)
            return tensor.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, torch.clone):
            return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))

    (mine, got), (theirs, expected) = both(loss)
    torch.testing.assert_close(mine, theirs)
    assert_close(got, expected)
    assert saved[:2] == [(33, WIDTH), (VOCAB, WIDTH)]  # of the chunked loss: gradients, not logits


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_a_recomputed_head_gives_the_same_gradients(reentrant, early):
    """Reentrant checkpointing runs the head without a graph and makes its result the result of an autograd function."""
    results = []
    for chunk in (True, False):
        head, hidden, labels = head_and_hidden(bias=True)
        if chunk:
            chunk_head(head, rows=7)
        logits = checkpoint(head, hidden, use_reentrant=reentrant)
        loss = logits.logsumexp(-1).mean() if early else 0
        (F.cross_entropy(logits.float().view(-1, VOCAB), labels.view(-1)) + loss).backward()
        results.append({"hidden": hidden.grad, **gradients(head)})
    assert_close(*results)


@pytest.mark.parametrize("kind", ["layers", "head and loss"])
def test_recomputed_blocks_give_the_same_gradients(kind):
    if kind == "layers":
        plain, batch = build("llama").train(), text()
        mine = chunked(plain)
        mine.gradient_checkpointing_enable()
        for model in (plain, mine):
            model(**batch).loss.backward()
        assert_close(gradients(mine), gradients(plain))
        return
    results = []
    for chunk in (True, False):
        head, hidden, labels = head_and_hidden()
        if chunk:
            chunk_head(head, rows=7)

        def block(hidden, head=head, labels=labels):
            return F.cross_entropy(head(hidden).view(-1, VOCAB), labels.view(-1))

        checkpoint(block, hidden, use_reentrant=False).backward()
        results.append({"hidden": hidden.grad, **gradients(head)})
    assert_close(*results)


def test_a_graph_that_is_kept_may_be_walked_twice():
    for reduction in ("mean", "none"):
        head, hidden, labels = head_and_hidden()
        chunk_head(head, rows=7)
        loss = 3 * F.cross_entropy(head(hidden).view(-1, VOCAB), labels.view(-1), reduction=reduction).sum()
        loss.backward(retain_graph=True)
        once = head.weight.grad.clone()
        loss.backward()
        torch.testing.assert_close(head.weight.grad, 2 * once)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_letting_go_of_the_output_lets_go_of_everything():
    """No cycle waits for the garbage collector."""
    head, hidden, labels = head_and_hidden()
    chunk_head(head, rows=7)
    gc.collect()
    gc.disable()
    try:
        inner = hidden * 1
        logits = head(inner)
        loss = F.cross_entropy(logits.float().view(-1, VOCAB), labels.view(-1))
        logits.argmax(-1)
        alive = [weakref.ref(inner.untyped_storage()), weakref.ref(logits.whole().untyped_storage())]
        loss.backward()
        del loss, logits, inner
        assert [r() for r in alive] == [None, None]
    finally:
        gc.enable()


# what is refused


def test_logits_of_an_older_weight_are_refused_not_made_up():
    plain, batch = build("llama"), text()
    mine = chunked(plain)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    out = mine(**batch)
    out.loss.backward()
    optimizer.step()
    with pytest.raises(Unsupported, match="changed") as error:
        out.logits.argmax(-1)
    assert "optimizer.step" in error.value.hint


def test_weights_that_have_left_are_noticed():
    head, hidden, labels = head_and_hidden()
    chunk_head(head, rows=7)
    logits = head(hidden)
    head.weight.untyped_storage().resize_(0)
    with pytest.raises(Unsupported, match="left the device"):
        F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))


def test_the_parameters_of_the_call_are_used():
    """Somebody puts other parameters into the module and takes them out again."""
    head, hidden, labels = head_and_hidden()
    other = torch.nn.Parameter(torch.randn(VOCAB, WIDTH))
    chunk_head(head, rows=7)
    home = head._parameters["weight"]
    head._parameters["weight"] = other
    logits = head(hidden)
    head._parameters["weight"] = home
    loss = F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(hidden, other).view(-1, VOCAB), labels.view(-1)))
    loss.backward()
    assert home.grad is None and other.grad is not None


def test_the_gradient_of_the_logits_is_kept_if_asked_for_in_time():
    head, hidden, labels = head_and_hidden()
    chunk_head(head, rows=7)
    logits = head(hidden)
    logits.retain_grad()
    F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1)).backward()
    assert logits.grad.shape == (3, 11, VOCAB) and logits.grad.any()
    logits = head(hidden)
    F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))
    with pytest.raises(Unsupported, match="gradient of the logits"):
        logits.retain_grad()


def test_a_copy_of_logits_that_changed_since_is_refused():
    head, hidden, _ = head_and_hidden()
    chunk_head(head, rows=7)
    logits = head(hidden)
    copied = logits[:, :-1].contiguous()
    logits.mul_(2)
    with pytest.raises(Unsupported, match="in place"):
        copied.sum()


def test_only_plain_linear_heads_are_chunked():
    class Scaled(torch.nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden) * 2

    for module in (Scaled(4, 8), torch.nn.Embedding(8, 4), torch.nn.Conv1d(4, 8, 1)):
        before = dict(vars(module))
        with pytest.raises(Unsupported) as error:
            chunk_head(module, rows=4)
        assert error.value.hint and vars(module) == before
    head = torch.nn.Linear(4, 8)
    chunk_head(head, rows=4)
    with pytest.raises(Unsupported, match="replaced already"):
        chunk_head(head, rows=4)
    with pytest.raises(InvalidInput, match="rows"):
        chunk_head(torch.nn.Linear(4, 8), rows=0)


def test_wrong_calls_fail_as_they_do_in_torch():
    head, hidden, labels = head_and_hidden()
    chunk_head(head, rows=7)
    with pytest.raises(RuntimeError, match="shapes"):
        head(torch.randn(3, WIDTH + 1))
    with pytest.raises(RuntimeError, match="dtype"):
        head(hidden.double())
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(head(hidden).view(-1, VOCAB), labels.view(-1)[:5])
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        F.cross_entropy(head(hidden).view(-1, VOCAB), labels.view(-1) + VOCAB)


# finding and sizing


def test_the_head_of_a_model_is_found_by_path():
    for name in ("llama", "gpt2"):
        model = build(name)
        path, head = head_of(model)
        assert path == "lm_head" and head is model.lm_head
    assert head_of(torch.nn.Linear(4, 4)) is None
    model.lm_head = torch.nn.Sequential(torch.nn.Linear(WIDTH, VOCAB))
    assert head_of(model) is None


@pytest.mark.parametrize("vocab", [1000, 32_000, 128_256, 262_144])
def test_chunks_are_small_enough_even_and_tiled(vocab):
    for tokens in (1, 100, 256, 1000, 4096, 8191, 8192, 20_000, 131_072):
        rows = rows_for(tokens, vocab)
        assert rows % 128 == 0 and rows >= 256
        assert rows == 256 or rows * vocab * 4 <= 2**29
        chunks = -(-tokens // rows)
        assert chunks * rows - tokens < max(256, 128 * chunks), "no chunk is much smaller than the others"
        assert chunks == 1 or (rows + 128) * vocab * 4 > 2**29 or chunks == -(-tokens // (rows + 128)) or rows == 256


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_softmax_of_fewer_rows_at_once_gives_the_same_bits(dtype, smoothing, monkeypatch):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(40, 24), torch.randn(96, 24), torch.randn(96)
    labels = torch.randint(96, (40,)).masked_fill(torch.rand(40) < 0.2, -100)
    asked = Asked(rows=16, dtype=torch.float32, ignore_index=-100, reduction="mean", smoothing=smoothing)

    def of():
        given = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight, bias)]
        loss = chunked_cross_entropy(*given, labels, None, asked)
        loss.backward()
        return loss, *(x.grad for x in given)

    whole = of()
    monkeypatch.setattr(chunked_loss, "_WIDE", 5 * 4 * 96)  # 5, 5, 5 and 1 of 16 rows
    assert all(torch.equal(a, b) for a, b in zip(whole, of(), strict=True))


# the action


def test_the_action_agrees_with_the_trace_or_refuses():
    trace = chain([50] * 3)
    assert Head.samples(trace) == []
    action = Head(module="lm_head", rows=256)
    with pytest.raises(Unsupported, match="whole"):
        lower(problem_for(trace), [action])
    trace = replace(trace, about=replace(trace.about, head=ChunkedHead(module="lm_head", rows=256)))
    assert Head.samples(trace) == [action]
    alone, with_it = lower(problem_for(trace), []), lower(problem_for(trace), [action])
    assert with_it.runs == alone.runs
    with pytest.raises(Unsupported, match="512 rows"):
        lower(problem_for(trace), [Head(module="lm_head", rows=512)])


def test_the_action_chunks_the_model_until_it_is_closed():
    model, undo = build("llama"), []
    harness = types.SimpleNamespace(model=model, on_close=undo.append)
    Head(module="lm_head", rows=7).install(harness)
    assert isinstance(model(**text()).logits, LazyLogits)
    undo.pop()()
    assert "forward" not in model.lm_head.__dict__ and not undo
    with pytest.raises(Unsupported, match="no module"):
        Head(module="head", rows=7).install(harness)


# where kernels differ


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_gives_the_loss_and_gradients_of_the_whole_without_waiting(dtype):
    """Large rows: the softmax that writes where it reads takes another kernel than small ones."""
    torch.manual_seed(0)
    results = []
    for chunk in (True, False):
        torch.manual_seed(0)
        head = torch.nn.Linear(64, 151_936, bias=False, dtype=dtype, device="cuda")
        hidden = torch.randn(1024, 64, dtype=dtype, device="cuda", requires_grad=True)
        labels = torch.randint(0, 151_936, (1024,), device="cuda")
        labels[:100] = -100
        if chunk:
            chunk_head(head, rows=256)
        torch.cuda.set_sync_debug_mode("error" if chunk else "default")
        try:
            loss = F.cross_entropy(head(hidden).float(), labels)
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append((loss, {"hidden": hidden.grad, **gradients(head)}))
    (mine, got), (theirs, expected) = results
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)
    assert_close(got, expected, 2e-6 if dtype == torch.float32 else 5e-3)
