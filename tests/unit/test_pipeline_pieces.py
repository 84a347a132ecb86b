"""Decoders as pieces of pipelines: those whose layers are not all of the model are refused, and not trained otherwise."""

import pytest
import torch

from holdall.errors import Unsupported
from holdall.pipelines.running.pieces import check_whole, pieces_of

pytest.importorskip("transformers")
import transformers

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32}
SIZES |= {"num_key_value_heads": 2, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WHOLE = {
    "Llama": {},
    "Qwen3": {"head_dim": 4},
    "Gemma": {"head_dim": 4},
    "Olmo2": {},
    "Mistral": {"sliding_window": 16},
}
OTHERS = {
    "Llama": {"attn_implementation": "eager"},  # makes its mask outside the layers
    "Granite": {"logits_scaling": 2.0},
    "Cohere": {},
    "Gemma3": {"head_dim": 4},
}


def build(name, **given):
    torch.manual_seed(0)
    config = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, config)(**SIZES, **given))


@pytest.mark.parametrize("name", WHOLE)
def test_pieces_compute_what_the_model_does(name):
    model = build(name, **WHOLE[name]).eval()
    pieces = pieces_of(model)
    check_whole(model, pieces)
    ids = torch.randint(0, 32, (2, 16))
    with torch.no_grad():
        found = torch.nn.Sequential(*pieces)(ids)
        assert torch.allclose(found, model(ids).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_computes_more_is_refused_in_one_line(name):
    model = build(name, **OTHERS[name])
    with pytest.raises(Unsupported) as error:
        check_whole(model, pieces_of(model))
    assert "do not make up the model" in str(error.value).splitlines()[0]
    assert model.training


@pytest.mark.parametrize(("name", "given"), [("Mistral", {}), ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1})])
def test_a_sequence_longer_than_a_window_is_refused(name, given):
    model = build(name, sliding_window=12, **given)
    pieces = pieces_of(model)
    check_whole(model, pieces)
    whole = torch.nn.Sequential(*pieces)
    whole(torch.zeros(1, 12, dtype=torch.int64))
    with pytest.raises(Unsupported, match="13 positions is longer than the window of attention, 12"):
        whole(torch.zeros(1, 13, dtype=torch.int64))
