"""NF4 weights on a GPU: the kernel against the plain ops, and adapters trained in a budget over a model that is on the host."""

import copy

import pytest
import torch

import holdall
from holdall.narrow import nf4_fused
from holdall.narrow.nf4 import NormalFloat4
from holdall.testing.worlds import family

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("block", [16, 64, 256])
@pytest.mark.parametrize("shape", [(64, 64), (7, 31), (1000, 1003)])
def test_the_kernel_expands_as_the_plain_ops_do(shape, block, double):
    form = NormalFloat4(block=block, double=double)
    torch.manual_seed(0)
    values = torch.randn(shape)
    packed = form.pack(values)
    pytest.importorskip("triton")
    assert nf4_fused.works_on(packed.cuda()), "the kernel passes its own check"
    for dtype in (torch.float32, torch.bfloat16):
        made = form.expand(packed.cuda(), values.shape, dtype)
        assert made.dtype == dtype
        torch.testing.assert_close(made.cpu(), form.expand(packed, values.shape, dtype))
    there = form.pack(values.cuda()).cpu()
    torch.testing.assert_close(
        form.expand(there, values.shape, torch.float32), form.expand(packed, values.shape, torch.float32)
    )


def test_adapters_train_in_a_budget_as_in_none():
    peft = pytest.importorskip("peft")
    base, batch = family("tiny-llama")
    torch.manual_seed(0)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear")).train()
    batch = {name: value.cuda() for name, value in batch.items()}
    seen = []
    for allow in (None, ["recompute", "offload", "place"]):
        mine = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-3, fused=True)
        with holdall.fit(mine, optimizer, batch, budget="2GiB", precision="nf4", allow=allow) as harness:
            losses = []
            for _ in range(3):
                loss = mine(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        assert not harness.notes
        seen.append(losses)
    assert seen[0] == seen[1] and seen[0][-1] < seen[0][0]


def test_packed_layers_run_on_pieces_of_a_long_sequence():
    """Adapters over 4-bit weights on 32,768 tokens: a block's backward alone is larger than the budget."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    given = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 512}
    config = transformers.LlamaConfig(max_position_embeddings=32768, **given)
    base = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear")).train()
    ids = torch.randint(0, 512, (1, 32768), device="cuda")
    batch = {"input_ids": ids, "labels": ids}
    seen = []
    for limit in ("40GiB", None):
        mine = copy.deepcopy(model)
        optimizer = torch.optim.AdamW([p for p in mine.parameters() if p.requires_grad], lr=1e-3, fused=True)
        if limit is None:
            with pytest.raises(holdall.errors.Infeasible) as refused:
                holdall.fit(mine, optimizer, batch, budget="100MiB", precision="nf4")
            limit = int(1.05 * refused.value.smallest)
        with holdall.fit(mine, optimizer, batch, budget=limit, precision="nf4") as harness:
            losses = []
            for _ in range(3):
                loss = mine(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                del loss
            seen.append(losses)
            counts, measured = harness.plan.count(), harness.measured()
            said = harness.plan.predicted.peak["gpu"]
        print(limit, counts, losses, f"{said / 2**20:.0f} MiB said, {measured.peak['gpu'] / 2**20:.0f} measured")
    assert counts["pieces"] == 1
    assert measured.peak["gpu"] <= limit
    assert measured.peak["gpu"] == pytest.approx(said, rel=0.03)
    assert seen[0] == pytest.approx(seen[1], rel=2e-3)
