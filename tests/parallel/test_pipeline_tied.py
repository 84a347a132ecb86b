"""Heads that are the embedding, over stages: gradients, clipped steps and checkpoints against one process."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import holdall
import holdall.pipelines
from holdall.errors import Unsupported
from holdall.testing.ranks import on_ranks

STEPS, N = 3, 4
CASES = {  # ranks, and arguments of `start`
    "two": (2, {"schedule": "1f1b"}),
    "same rank": (2, {"schedule": "zb_v"}),  # which has the first and the last stage
    "looped": (2, {"schedule": "interleaved", "recompute": True}),
    "placed": (2, {"schedule": "gpipe", "place": True}),
    "gpt2": (2, {"schedule": "1f1b"}),
    "data": (4, {"schedule": "1f1b", "mesh": {"pp": 2, "dp": 2}}),
    "context": (4, {"schedule": "1f1b", "mesh": {"pp": 2, "cp": 2}}),
}
REFUSED = {
    "chimera": ({"schedule": "chimera"}, "several versions or copies"),
    "shards": ({"mesh": {"pp": 2, "dp": 2}, "shard": "zero2"}, "which have it whole"),
    "tensors": ({"mesh": {"pp": 2, "tp": 2}}, "which have it whole"),
}


def build(case=""):
    torch.manual_seed(0)
    if case == "gpt2":
        dropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=3, n_head=4, **dropped)).double()
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True)).double()


def loss(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(replica, step):
    ids = torch.randint(0, 32, (2 * N, 9), generator=torch.Generator().manual_seed(100 * step + replica))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def trained(case, folder):
    """Losses, norms and first gradients by name, and the weights at the end."""
    pipe = holdall.pipelines.start(build(case), micro_batches=N, loss=loss, sample=batch(0, 0), **CASES[case][1])
    optimizer = pipe.optimizer(optimizer_of)
    seen, grads = [], {}
    for step in range(STEPS):
        value = pipe.step(*batch(pipe.replica, step)).item()
        grads = grads or {name: p.grad.clone() for name, p in pipe.named_parameters()}
        norm = pipe.clip_grad_norm_(0.5).item()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((value, norm))
    if case == "two":
        holdall.save_checkpoint(folder, pipe, optimizer, step=STEPS)
    weights = {name: p.detach() for name, p in pipe.named_parameters()}
    names = [name for name, _ in pipe.named_parameters()]
    assert len(names) == len(set(names)) == len(list(pipe.parameters()))
    return seen, grads, weights


def trained_all(cases, folder):
    return {case: trained(case, folder) for case in cases}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied")
    found = {}
    for ranks in (2, 4):
        cases = [case for case, (wanted, _) in CASES.items() if wanted == ranks]
        each = on_ranks(ranks, trained_all, cases, folder)
        found |= {case: [rank[case] for rank in each] for case in cases}
    return found, folder


def alone(case):
    model, replicas = build(case), 2 if case == "data" else 1
    optimizer = optimizer_of(model.parameters())
    seen, grads = [], {}
    for step in range(STEPS):
        value = sum(loss(model(input_ids=x).logits, y) for x, y in (batch(r, step) for r in range(replicas))) / replicas
        value.backward()
        grads = grads or {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((value.item(), norm))
    return seen, grads, model, optimizer


def near(a, b):
    return (a - b).abs().max() <= 1e-12 * b.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_one_process(ran, case):
    seen, grads, model, _ = alone(case)
    weights = dict(model.named_parameters())
    names = set()
    for rank in ran[0][case]:
        assert torch.allclose(torch.tensor(rank[0]), torch.tensor(seen), rtol=1e-6)
        assert all(near(grad, grads[name]) for name, grad in rank[1].items())
        assert all(near(p, weights[name]) for name, p in rank[2].items())
        names |= rank[2].keys()
    assert names == weights.keys()


@pytest.mark.parametrize("case", CASES)
def test_copies_stay_equal_to_the_bit(ran, case):
    """On the ranks that have the embedding or the head."""
    name = "transformer.wte.weight" if case == "gpt2" else "model.embed_tokens.weight"
    tied = [rank[2][name] for rank in ran[0][case] if name in rank[2]]
    assert len(tied) == {"same rank": 1, "data": 4, "context": 4}.get(case, 2)
    assert all(torch.equal(one, tied[0]) for one in tied)


def test_one_process_loads_the_checkpoint(ran):
    found, folder = ran
    model = build()
    optimizer = optimizer_of(model.parameters())
    assert holdall.load_checkpoint(folder, model, optimizer).step == STEPS
    weights = {name: p for rank in found["two"] for name, p in rank[2].items()}
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(optimizer.state[p]["step"] == STEPS for p in model.parameters())


def refused(cases):
    said = {}
    for name in cases:
        with pytest.raises(Unsupported) as error:
            holdall.pipelines.start(build(), micro_batches=N, loss=loss, sample=batch(0, 0), **REFUSED[name][0])
        said[name] = str(error.value)
        dist.barrier()
    return said


def test_what_does_not_work_is_refused_in_one_line():
    for ranks, cases in ((2, ["chimera"]), (4, ["shards", "tensors"])):
        for said in on_ranks(ranks, refused, cases):
            assert all(REFUSED[name][1] in said[name].splitlines()[0] for name in cases)
