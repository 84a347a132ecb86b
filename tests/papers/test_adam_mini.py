"""Zhang et al., "Adam-mini" (arXiv 2406.16793): what the paper says."""

import pytest
import torch
from torch import nn

from holdall.optim.adam_mini import AdamMini
from holdall.testing.optimizers import allocated, refusal


def parameter(*shape, seed=0, dtype=torch.float32):
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype))


def gradients(shape, n, seed=7, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    for _ in range(n):
        yield torch.randn(shape, generator=random, dtype=dtype)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("shape", "block"), [((12, 20), "element"), ((17,), None), ((17,), "row"), ((17,), 1), ((5, 1), "row"), ((), None)]
)
def test_blocks_of_one_element_are_adamw_bit_for_bit(shape, block, weight_decay):
    """Claim: Adam-mini with blocks of one element is AdamW."""
    p, q = parameter(*shape), parameter(*shape)
    options = {"lr": 0.01, "weight_decay": weight_decay}
    ours, theirs = AdamMini([p], block=block, **options), torch.optim.AdamW([q], foreach=False, **options)
    for g in gradients(shape, 50):
        p.grad, q.grad = g, g.clone()
        ours.step()
        theirs.step()
    assert torch.equal(p, q)
    assert torch.equal(ours.state[p]["exp_avg_sq"].view(-1), theirs.state[q]["exp_avg_sq"].view(-1))


def naive(x, grads, blocks, *, lr=0.01, weight_decay=0.0, eps=1e-8):
    """Adam with v the mean over each block; `blocks` numbers the block of every element."""
    m, v = torch.zeros_like(x), torch.zeros(int(blocks.max()) + 1, dtype=x.dtype)
    for t, g in enumerate(grads, 1):
        for b in range(len(v)):
            v[b] = 0.999 * v[b] + 0.001 * g[blocks == b].square().mean()
        m = 0.9 * m + 0.1 * g
        denominator = (v[blocks] / (1 - 0.999**t)).sqrt() + eps
        x = x * (1 - lr * weight_decay) - lr * m / (1 - 0.9**t) / denominator
    return x


ROWS, COLUMNS = torch.arange(12)[:, None].expand(12, 8), torch.arange(8).expand(12, 8)
MIXED = torch.cat([torch.arange(8) // 4, 2 + torch.arange(4)])[:, None].expand(12, 8)


@pytest.mark.parametrize(
    ("block", "blocks"),
    [
        (None, ROWS),
        ("row", ROWS),
        ("column", COLUMNS),
        ("tensor", torch.zeros(12, 8, dtype=torch.long)),
        (4, ROWS // 4),
        (((8, 4), (4, 1)), MIXED),
    ],
    ids=str,
)
def test_each_block_has_one_second_moment(block, blocks):
    p = parameter(12, 8, dtype=torch.float64)
    start = p.detach().clone()
    optimizer = AdamMini([p], lr=0.01, block=block, weight_decay=0.1)
    for g in gradients((12, 8), 20, dtype=torch.float64):
        p.grad = g
        optimizer.step()
    expected = naive(start, gradients((12, 8), 20, dtype=torch.float64), blocks, weight_decay=0.1)
    assert torch.allclose(p.detach(), expected, rtol=1e-10, atol=1e-12)
    assert optimizer.state[p]["exp_avg_sq"].shape == (int(blocks.max()) + 1,)


class Attention(nn.Module):
    """Grouped queries: eight heads, two of them for keys and values."""

    def __init__(self, width=32, heads=8, shared=2):
        super().__init__()
        self.head_dim = width // heads
        self.q_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.k_proj, self.v_proj = (nn.Linear(width, self.head_dim * shared) for _ in range(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.attention, self.norm, self.mlp = Attention(), nn.LayerNorm(32), nn.Linear(32, 48)
        self.head = nn.Linear(32, 50, bias=False)


def moments(model, **options):
    """Name of a parameter -> elements of its second moment after a step."""
    optimizer = AdamMini(AdamMini.groups(model, **options))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p in model.parameters():
        assert allocated(optimizer.state[p]) == optimizer.state_bytes(p)
    return {name: optimizer.state[p]["exp_avg_sq"].numel() for name, p in model.named_parameters()}


def test_blocks_are_heads_rows_and_tensors():
    """Claim: queries and keys one a head; embedding, head, value, output and MLP one a row; norms one; biases all."""
    assert moments(Model()) == {
        "embed.weight": 50,
        "attention.q_proj.weight": 8,
        "attention.q_proj.bias": 32,
        "attention.k_proj.weight": 2,
        "attention.k_proj.bias": 8,
        "attention.v_proj.weight": 8,
        "attention.v_proj.bias": 8,
        "attention.o_proj.weight": 32,
        "attention.o_proj.bias": 32,
        "norm.weight": 1,
        "norm.bias": 1,
        "mlp.weight": 48,
        "mlp.bias": 48,
        "head.weight": 50,
    }


def test_norms_and_biases_do_not_decay_and_tied_weights_come_once():
    model = Model()
    model.head.weight = model.embed.weight
    groups = AdamMini.groups(model, weight_decay=0.1, lr=0.5)
    optimizer = AdamMini(groups)
    params = [p for group in groups for p in group["params"]]
    assert len(params) == len({id(p) for p in params}) == len(list(model.parameters()))
    for group in optimizer.param_groups:
        assert group["lr"] == 0.5
        assert all((p.dim() >= 2) == (group["weight_decay"] == 0.1) for p in group["params"])


def test_torchs_fused_attention_is_split():
    """Its rows are query, key and value in this order: heads for the first two, rows for the last."""
    counts = moments(nn.MultiheadAttention(32, 8))
    assert counts["in_proj_weight"] == 8 + 8 + 32
    assert counts["out_proj.weight"] == 32
    apart = moments(nn.MultiheadAttention(32, 8, kdim=16, vdim=16))
    assert (apart["q_proj_weight"], apart["k_proj_weight"], apart["v_proj_weight"]) == (8, 8, 32)


def test_other_fused_attention_is_refused_until_it_is_declared():
    model = nn.ModuleDict({"qkv": nn.Linear(32, 96), "mlp": nn.Linear(32, 32)})
    error = refusal(lambda: AdamMini.groups(model))
    assert "qkv.weight" in error.fact and "declare" in error.hint
    assert moments(model, declare={"qkv.weight": [[64, 4], [32, 1]]})["qkv.weight"] == 16 + 32
    groups = AdamMini.groups(model, declare={"qkv.weight": "row", "qkv.bias": "tensor"}, weight_decay=0.1)
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert (decays[id(model.qkv.weight)], decays[id(model.qkv.bias)]) == (0.1, 0.0)  # as they would be undeclared
    assert "divide" in refusal(lambda: moments(model, declare={"qkv.weight": ((64, 5), (32, 1))})).fact
    assert "all rows" in refusal(lambda: moments(model, declare={"qkv.weight": ((64, 4),)})).fact


def test_layers_stored_the_other_way_round_have_a_block_a_column():
    """Hugging Face's GPT-2 keeps its linear layers as (inputs, outputs)."""

    class Conv1D(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    assert moments(nn.ModuleDict({"c_fc": Conv1D(8, 32)})) == {"c_fc.weight": 32, "c_fc.bias": 32}
    model = nn.ModuleDict({"c_attn": Conv1D(8, 24)})
    assert "column" in refusal(lambda: AdamMini.groups(model)).hint
    assert moments(model, declare={"c_attn.weight": "column"})["c_attn.weight"] == 24


def test_a_head_of_unknown_size_is_refused():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Linear(8, 8)

    assert "head" in refusal(lambda: AdamMini.groups(Bare())).fact


def test_a_hugging_face_llama_is_read_from_its_modules():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
    )
    counts = moments(transformers.LlamaForCausalLM(config))
    layer = "model.layers.0."
    assert counts[layer + "self_attn.q_proj.weight"] == 4
    assert counts[layer + "self_attn.k_proj.weight"] == 2
    assert counts[layer + "self_attn.v_proj.weight"] == 16
    assert counts[layer + "mlp.down_proj.weight"] == 32
    assert counts[layer + "input_layernorm.weight"] == 1
    assert counts["lm_head.weight"] == 64


def test_the_state_is_about_half_of_adams():
    """Claim: 45 to 50 % less than AdamW: the second moment all but vanishes."""
    model = Model()
    ours = AdamMini(AdamMini.groups(model))
    share = sum(ours.state_bytes(p) for p in model.parameters()) / (8 * sum(p.numel() for p in model.parameters()))
    assert 0.5 < share < 0.55


class Experts(nn.Module):
    """A stack of experts' matrices in one parameter, as Hugging Face keeps them: (experts, outputs, inputs)."""

    def __init__(self, experts=2, width=32, inner=48, is_transposed=False):
        super().__init__()
        self.hidden_dim = width
        shapes = [(experts, 2 * inner, width), (experts, width, inner)]
        shapes = [(e, i, o) if is_transposed else (e, o, i) for e, o, i in shapes]
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.randn(shape)) for shape in shapes)
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(experts, 2 * inner))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_experts_have_a_second_moment_a_row_of_each(is_transposed):
    """Claim: MLP weights one a row; a stack of experts' matrices has the rows of all of them."""
    assert moments(Experts(is_transposed=is_transposed)) == {
        "gate_up_proj": 2 * 96,
        "down_proj": 2 * 32,
        "gate_up_proj_bias": 2 * 96,  # a bias, though it has two dimensions
    }


@pytest.mark.parametrize(("block", "dim"), [(None, -1), ("expert_row", -1), ("column", -2)])
def test_a_stack_of_experts_is_updated_as_its_matrices_are_one_by_one(block, dim):
    stack = parameter(3, 6, 4, dtype=torch.float64)
    alone = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    ours = AdamMini([stack], block=block, weight_decay=0.1)
    theirs = AdamMini(alone, block="row" if dim == -1 else "column", weight_decay=0.1)
    for g in gradients((3, 6, 4), 10, dtype=torch.float64):
        stack.grad = g
        for p, part in zip(alone, g, strict=True):
            p.grad = part
        ours.step()
        theirs.step()
    assert torch.allclose(stack.detach(), torch.stack([p.detach() for p in alone]), rtol=1e-12, atol=0)


def test_convolutions_have_a_block_an_output_channel():
    assert moments(nn.Conv1d(4, 6, 3)) == {"weight": 6, "bias": 6}
    assert moments(nn.Conv2d(4, 6, 3)) == {"weight": 6, "bias": 6}


def test_hugging_faces_experts_are_read_from_their_modules():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=2)
    counts = moments(transformers.MixtralForCausalLM(config))
    found = {name.rpartition(".")[2]: n for name, n in counts.items() if ".experts." in name}
    assert found == {"gate_up_proj": 2 * 96, "down_proj": 2 * 32}
    config = transformers.GptOssConfig(**sizes, num_key_value_heads=2, num_local_experts=2, head_dim=8)
    model = transformers.GptOssForCausalLM(config)
    counts = moments(model)
    found = {name.rpartition(".")[2]: n for name, n in counts.items() if ".experts." in name}
    assert found == {"gate_up_proj": 2 * 96, "down_proj": 2 * 32, "gate_up_proj_bias": 2 * 96, "down_proj_bias": 2 * 32}


def test_t5s_heads_are_as_large_as_its_own_setting_says():
    """Its heads' size is `d_kv`, which need not be the width over the number of heads."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=4, d_ff=48, num_layers=1, num_heads=2)
    counts = moments(transformers.T5ForConditionalGeneration(config))
    attention = "encoder.block.0.layer.0.SelfAttention."
    assert (counts[attention + "q.weight"], counts[attention + "k.weight"], counts[attention + "v.weight"]) == (2, 2, 8)
