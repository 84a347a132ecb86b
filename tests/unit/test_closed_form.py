"""The closed forms give the published numbers, and agree with a count of the tensors that a real block keeps."""

import json
from importlib.resources import files

import pytest
import torch

from holdall import models
from holdall.cost import closed_form
from holdall.cost.closed_form import BERT_LARGE, GPT3_6_7B, Shape
from holdall.errors import InvalidInput
from holdall.units import GiB

PRESETS = json.loads((files("holdall") / "data" / "models.json").read_text(encoding="utf-8"))

SMALL = Shape(layers=1, hidden=128, heads=4)


def classic_block(shape, x, weights):
    """One layer as Korthikanti draws it: unfused attention, dropout that keeps one-byte masks, GELU, two layer norms."""
    b, s, h = x.shape
    qkv, out, up, down = weights

    def heads(y):
        return y.view(b, s, shape.heads, -1).transpose(1, 2)

    q, k, v = (heads(y) for y in torch.split(torch.layer_norm(x, (h,)) @ qkv, h, dim=-1))
    scores = torch.softmax((q @ k.transpose(-1, -2)) * (h // shape.heads) ** -0.5, dim=-1)
    mixed = (torch.native_dropout(scores, 0.1, True)[0] @ v).transpose(1, 2).reshape(b, s, h)
    x = x + torch.native_dropout(mixed @ out, 0.1, True)[0]
    inner = torch.nn.functional.gelu(torch.layer_norm(x, (h,)) @ up)
    return x + torch.native_dropout(inner @ down, 0.1, True)[0]


def kept_bytes(shape, batch, seq, dtype):
    """Bytes of the distinct storages that autograd holds after the block's forward, weights not counted."""
    h = shape.hidden
    x = torch.randn(batch, seq, h, dtype=dtype, requires_grad=True)
    weights = [torch.randn(h, n, dtype=dtype) for n in (3 * h, h, 4 * h)] + [torch.randn(4 * h, h, dtype=dtype)]
    for w in weights:
        w.requires_grad_()
    own = {w.untyped_storage().data_ptr() for w in weights}
    kept = {}

    def pack(t):
        storage = t.untyped_storage()
        kept[storage.data_ptr()] = (storage.nbytes(), t)  # the tensor is held so that its address is not used again
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        classic_block(shape, x, weights)
    return sum(size for address, (size, _) in kept.items() if address not in own)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
@pytest.mark.parametrize(("dtype", "element"), [(torch.bfloat16, 2), (torch.float32, 4)])
@pytest.mark.parametrize(("batch", "seq"), [(2, 64), (1, 256)])
def test_a_real_block_keeps_what_the_formula_says(dtype, element, batch, seq):
    formula = closed_form.activation_bytes(SMALL, batch=batch, seq=seq, element=element)
    assert kept_bytes(SMALL, batch, seq, dtype) == pytest.approx(formula, rel=0.005)  # the excess: statistics of the norms


@pytest.mark.parametrize(("shape", "gib"), [(BERT_LARGE, 8.25), (GPT3_6_7B, 39.0)])
def test_the_surveys_activations_are_reproduced_by_its_convention(shape, gib):
    assert closed_form.survey_activation_bytes(shape, batch=16, seq=128) == gib * GiB


@pytest.mark.parametrize("shape", [BERT_LARGE, GPT3_6_7B])
def test_the_surveys_convention_is_over_twice_a_real_single_precision_block(shape):
    real = closed_form.activation_bytes(shape, batch=16, seq=128, element=4)
    assert 2.0 < closed_form.survey_activation_bytes(shape, batch=16, seq=128) / real < 2.2


def test_half_precision_activations_are_the_classic_sum():
    b, s, h, a, layers = 3, 7, 32, 4, 5
    shape = Shape(layers=layers, hidden=h, heads=a)
    assert closed_form.activation_bytes(shape, batch=b, seq=s) == (34 * b * s * h + 5 * b * s * s * a) * layers
    assert closed_form.selective_bytes(shape, batch=b, seq=s) == 34 * b * s * h * layers
    assert closed_form.full_recompute_bytes(shape, batch=b, seq=s) == 2 * b * s * h * layers


def test_single_precision_keeps_one_byte_masks():
    b, s, h, a = 3, 7, 32, 4
    shape = Shape(layers=1, hidden=h, heads=a)
    assert closed_form.activation_bytes(shape, batch=b, seq=s, element=4) == 66 * b * s * h + 9 * b * s * s * a


def test_one_rank_keeps_everything_and_sequence_parallelism_splits_it_evenly():
    whole = closed_form.activation_bytes(BERT_LARGE, batch=4, seq=512)
    split = {"shape": BERT_LARGE, "batch": 4, "seq": 512}
    assert closed_form.parallel_activation_bytes(**split, ranks=1) == whole
    assert closed_form.parallel_activation_bytes(**split, ranks=8, sequence=True) == whole / 8
    assert closed_form.parallel_activation_bytes(**split, ranks=8) > whole / 8
    selective = closed_form.selective_bytes(BERT_LARGE, batch=4, seq=512)
    assert closed_form.parallel_activation_bytes(**split, ranks=8, sequence=True, selective=True) == selective / 8


@pytest.mark.parametrize("name", ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt3-6.7b", "bert-large", "opt-1.3b"])
def test_the_parameters_of_real_models_are_within_a_percent_of_the_formula(name):
    config = models.describe(name).config
    shape = Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        vocabulary=config.vocab_size,
    )
    assert closed_form.parameters(shape) == pytest.approx(PRESETS[name]["parameters"], rel=0.01)


def test_the_states_of_the_common_recipes():
    assert closed_form.state_bytes(10, "adam-fp32") == 160
    assert closed_form.state_bytes(10) == 160
    assert closed_form.state_bytes(10, "adam-mixed-fp32-grad") == 180
    with pytest.raises(InvalidInput, match="unknown recipe `adam`"):
        closed_form.state_bytes(10, "adam")
