"""On a GPU autograd adds the embedding's gradient to that of a chunked head in place, as traces say."""

import pytest
import torch

pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from transformers import LlamaConfig, LlamaForCausalLM

import holdall
from holdall.problem import resolve_hardware

VOCAB, WIDTH = 65536, 512


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_shared_weight_has_two_gradients_at_the_peak(precision):
    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, tie_word_embeddings=True, **shape)).cuda().train()
    ids = torch.randint(3, VOCAB, (1, 512), device="cuda")
    batch = {"input_ids": ids, "labels": ids}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    hardware = resolve_hardware(holdall.probe("cuda", quick=True), "cuda")
    trace = holdall.trace(model, batch, optimizer=optimizer, device="cuda", head=128, precision=precision)
    plan = holdall.plan(trace, planner="nop", hardware=hardware)
    weight = VOCAB * WIDTH * (4 if precision is None else 2)
    with holdall.apply(plan, model, optimizer, enforce=False):
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(**batch).loss.backward()
            most = torch.cuda.max_memory_allocated() - before
            optimizer.step()
            optimizer.zero_grad()
    assert 2 * weight <= most < 2.6 * weight
