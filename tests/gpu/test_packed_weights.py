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
