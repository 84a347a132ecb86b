"""Vocabulary heads in chunks where ranks divide the sequence: losses, peaks, and no logits of the whole sequence anywhere."""

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import holdall
from holdall.runtime.budget.ledger import Ledger
from holdall.testing.ranks import by_default, on_ranks
from holdall.testing.worlds import machine

WORDS, ROWS, LENGTH, STEPS = 4096, 2, 512, 4
LOGITS = ROWS * LENGTH * WORDS * 4  # bytes
CASES = by_default(  # way, tied -> mesh
    {("ulysses", True): {"cp": 2}, ("zigzag", False): {"cp": 2}, ("zero3+ulysses", True): {"dp": 2, "cp": 2}},
    ("zigzag", False),
    ("zero3+ulysses", True),
)


def build(tied):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, tie_word_embeddings=tied, **sizes))


def batch(step, row=0):
    generator = torch.Generator().manual_seed(2 * step + row)
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, : LENGTH // 4] = -100  # so that the ranks have different numbers of them
    return {"input_ids": ids, "labels": labels}


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def steps(model, optimizer, rows):
    losses = []
    for step in range(STEPS):
        mean = sum(model(**batch(step, row)).loss / len(rows) for row in rows)
        mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean.item())
    return losses


def fitted(case, mesh, head, budget="1GiB"):
    model = build(case[1])
    optimizer, row = adam(model), dist.get_rank() // 2
    asked = {"budget": budget, "hardware": machine(), "mesh": mesh, "shard": case[0], "head": head}
    return model, optimizer, row, holdall.fit(model, optimizer, batch(0, row), **asked)


def trained(case, mesh, head, **given):
    model, optimizer, row, harness = fitted(case, mesh, head, **given)
    with harness:
        return {
            "losses": steps(model, optimizer, [row]),
            "peak": min(harness.step_peaks[1:]),  # a thread of gloo may hold a buffer for a moment after its collective
            "predicted": harness.plan.predicted.peak["cpu"],
            "head": harness.plan.count().get("head", 0),
        }


def taken_by_fit(case, mesh, head):
    with Ledger() as ledger:
        fitted(case, mesh, head)[-1].close()
    return ledger.peak


def both(case, mesh):
    found = {head: trained(case, mesh, head) for head in ("whole", 64)}
    between = (found["whole"]["predicted"] + found[64]["predicted"]) // 2
    in_fit = {head: taken_by_fit(case, mesh, head) for head in ("whole", 64)}
    return found | {"auto": trained(case, mesh, "auto", budget=between)}, in_fit


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}{'-tied' if case[1] else ''}")
def ran(request):
    mesh = CASES[request.param]
    found = on_ranks(4 if "dp" in mesh else 2, both, request.param, mesh, timeout=300)
    model = build(request.param[1])
    return found, steps(model, adam(model), range(mesh.get("dp", 1)))


def test_losses_are_those_of_one_process(ran):
    ranks, expected = ran
    first, last = ranks[0][0], ranks[-1][0]
    for head in ("whole", 64, "auto"):
        pairs = zip(first[head]["losses"], last[head]["losses"], strict=True)  # of one batch, or of the two there are
        assert [sum(pair) / 2 for pair in pairs] == pytest.approx(expected, rel=1e-5)


def test_the_peak_is_the_predicted_one_and_lower_in_chunks(ran):
    for rank, _ in ran[0]:
        for said in rank.values():
            assert said["peak"] == pytest.approx(said["predicted"], rel=0.01)
        assert rank[64]["peak"] < rank["whole"]["peak"] - LOGITS / 4
        assert (rank["whole"]["head"], rank[64]["head"]) == (0, 1)


def test_a_budget_that_is_too_small_for_logits_has_them_in_chunks(ran):
    for rank, _ in ran[0]:
        assert rank["auto"]["head"] == 1


def test_the_comparison_before_the_first_step_makes_no_logits_of_the_whole_sequence(ran):
    for _, taken in ran[0]:
        assert taken[64] < taken["whole"] - LOGITS / 2
