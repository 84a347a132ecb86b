"""A weight that a chunked head shares with the embedding; and heads that are chunked because nothing else fits."""

import pytest
import torch

import holdall
from holdall.errors import Infeasible
from holdall.runtime.head.lazy_logits import FEWEST, chunk_head
from holdall.types import Kind

pytest.importorskip("transformers")
VOCAB, WIDTH = 4096, 32


def tied(tie=True):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, tie_word_embeddings=tie, **shape)).train()


def text(tokens):
    ids = torch.randint(3, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def sums(model, batch):
    """Ops by which autograd adds two gradients of the shape of the shared weight; no dispatch mode is on."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as seen:
        model(**batch).loss.backward()
    model.zero_grad()
    return [e.name for e in seen.events() if e.name.startswith("aten::add") and e.input_shapes[:2] == [[VOCAB, WIDTH]] * 2]


def test_autograd_adds_to_the_gradient_of_a_chunked_head_in_place():
    """What the traces for a GPU say; under a mode, or with a whole head, it makes a third tensor."""
    model, batch = tied(), text(16)
    assert sums(model, batch) == ["aten::add"]
    chunk_head(model.lm_head, rows=8)
    assert sums(model, batch) == ["aten::add_"]


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_trace_for_a_gpu_has_one_gradient_of_the_shared_weight(precision):
    model, batch = tied(), text(16)
    traces = {d: holdall.trace(model, batch, optimizer="adamw", device=d, head=8, precision=precision) for d in ("cpu", "cuda")}
    size = VOCAB * WIDTH * (4 if precision is None else 2)
    made = {d: [t for t in trace.tensors.values() if t.nbytes == size and t.born >= 0] for d, trace in traces.items()}
    kinds = {d: {t.kind for t in found if t.kind is not Kind.TEMP} for d, found in made.items()}
    assert kinds == {"cpu": {Kind.ACTIVATION, Kind.GRAD}, "cuda": {Kind.GRAD}}
    trace = traces["cuda"]
    (gradient,) = (t for t in made["cuda"] if t.kind is Kind.GRAD)
    (unit,) = (u for u in trace.units if gradient.id in u.grads)
    assert unit.name == "model.embed_tokens"
    total = [op for op in trace.ops if op.site.op == "aten.add.Tensor" and gradient.id in op.mutates]
    assert [op.writes for op in total] == [()]
    assert gradient.id in {x for op in trace.ops[total[0].id + 1 :] for x in op.reads}  # the update reads it
    assert holdall.plan(trace, planner="nop", hardware="h200").predicted.peak["gpu"] > 2 * size


def test_an_untied_head_is_traced_as_before():
    model, batch = tied(tie=False), text(16)
    trace = holdall.trace(model, batch, device="cuda", head=8)
    assert all(op.writes for op in trace.ops if op.site.op == "aten.add.Tensor")


def need(model, batch, **given):
    """The least budget that `fit` names."""
    with pytest.raises(Infeasible) as refused:
        holdall.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, budget=1_000_000, **given)
    return refused.value.smallest


def test_a_head_is_chunked_where_nothing_else_fits():
    """Small logits stay whole as long as they fit, also if the loop keeps them until backward is over: the bits of the loss."""
    batch = text(2 * FEWEST)
    plain = tied()
    whole, least = need(tied(), batch, head="whole"), need(tied(), batch)
    assert least < 0.8 * whole
    assert need(tied(), batch, allow=["recompute", "offload", "place"]) == pytest.approx(whole, rel=0.05)  # it was not allowed
    expected = [step(plain, torch.optim.SGD(plain.parameters(), lr=0.1), batch) for _ in range(3)]
    for budget, is_chunked in ((int(1.02 * least), True), (int(1.02 * whole), True), (3 * whole, False)):
        model = tied()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with holdall.fit(model, optimizer, batch, budget=budget) as harness:
            got = [step(model, optimizer, batch) for _ in range(3)]
            assert max(harness.step_peaks) <= budget
        assert ("head" in harness.plan.count()) is is_chunked
        assert got == pytest.approx(expected, rel=1e-5) if is_chunked else got == expected


def step(model, optimizer, batch):
    out = model(**batch)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return out.loss.item()
