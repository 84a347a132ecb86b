"""Presets have the parameters they claim, folders load without pickle, and every task gets a batch that trains."""

import builtins
import json
from importlib.resources import files

import pytest
import torch

from holdall import models
from holdall.errors import InvalidInput, MissingExtra, Unsupported

PRESETS = json.loads((files("holdall") / "data" / "models.json").read_text(encoding="utf-8"))

PUBLISHED = {  # parameters as printed on the model's card or in its paper
    "gpt2": 124e6,
    "gpt2-medium": 355e6,
    "gpt2-large": 774e6,
    "gpt2-xl": 1.56e9,
    "gpt3-6.7b": 6.7e9,
    "llama-2-7b": 6.74e9,
    "llama-2-13b": 13.0e9,
    "llama-2-70b": 69.0e9,
    "llama-3-8b": 8.03e9,
    "llama-3.1-8b": 8.03e9,
    "llama-3.1-70b": 70.6e9,
    "llama-3.2-1b": 1.23e9,
    "llama-3.2-3b": 3.21e9,
    "tinyllama-1.1b": 1.1e9,
    "smollm2-135m": 135e6,
    "smollm2-360m": 362e6,
    "smollm2-1.7b": 1.71e9,
    "qwen2-0.5b": 494e6,
    "qwen2-1.5b": 1.54e9,
    "qwen2-7b": 7.62e9,
    "qwen2.5-0.5b": 494e6,
    "qwen2.5-1.5b": 1.54e9,
    "qwen2.5-3b": 3.09e9,
    "qwen2.5-7b": 7.61e9,
    "qwen2.5-14b": 14.7e9,
    "qwen2.5-32b": 32.8e9,
    "qwen3-0.6b": 0.6e9,
    "qwen3-1.7b": 1.72e9,
    "qwen3-4b": 4.02e9,
    "qwen3-8b": 8.2e9,
    "qwen3-14b": 14.8e9,
    "qwen3-32b": 32.8e9,
    "mistral-7b": 7.25e9,
    "mixtral-8x7b": 46.7e9,
    "gemma-2b": 2.51e9,
    "gemma-7b": 8.54e9,
    "phi-2": 2.78e9,
    "phi-3-mini": 3.82e9,
    "bert-base": 110e6,
    "bert-large": 336e6,
    "roberta-base": 125e6,
    "roberta-large": 355e6,
    "t5-small": 60.5e6,
    "t5-base": 223e6,
    "t5-large": 738e6,
    "vit-base": 86.6e6,
    "vit-large": 304e6,
    "vit-huge": 632e6,
    "gpt-neox-20b": 20.6e9,
    "pythia-160m": 162.3e6,
    "pythia-1.4b": 1.4147e9,
    "pythia-6.9b": 6.857e9,
    "opt-125m": 125e6,
    "opt-1.3b": 1.316e9,
    "opt-6.7b": 6.66e9,
    "opt-13b": 12.85e9,
    "vgg-16": 138357544,
    "resnet-50": 25557032,
    "inception-v3": 27161264,
    "bert-base-plain": 110e6,
}
NAMES = models.model_names()
TINY = [name for name in NAMES if name.startswith("tiny-")]
INPUTS = {
    "causal-lm": {"input_ids", "labels"},
    "masked-lm": {"input_ids", "attention_mask", "labels"},
    "seq2seq-lm": {"input_ids", "attention_mask", "labels"},
    "image-classification": {"pixel_values", "labels"},
}


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_built_on_meta_has_the_parameters_it_claims(name):
    model = models.build(models.describe(name))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert count(model) == PRESETS[name]["parameters"]


def test_the_presets_agree_with_the_published_counts_within_one_percent():
    assert set(PUBLISHED) == set(NAMES) - set(TINY)
    assert len(PUBLISHED) >= 30
    for name, published in PUBLISHED.items():
        assert PRESETS[name]["parameters"] == pytest.approx(published, rel=0.01), name


@pytest.mark.parametrize("name", NAMES)
def test_every_value_of_a_preset_is_a_field_that_its_config_knows(name):
    config = models.describe(name).config
    fresh = type(config)()
    for key, value in PRESETS[name]["config"].items():
        assert hasattr(fresh, key) or key == "decoder_start_token_id", key  # T5 reads it without declaring it
        assert getattr(config, key) == value or key == "rope_parameters"


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_model_of_every_family_trains_on_its_sample_batch(name):
    source = models.describe(name)
    model = models.build(source, device="cpu")
    batch = models.sample_batch(source, batch=2, seq=16)
    assert model.training
    assert set(batch) == INPUTS[source.task]
    loss = model(**batch).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # a CPU without bfloat16 units says so at length
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-vit"])
def test_a_bfloat16_model_takes_the_same_batch(name):
    source = models.describe(name)
    model = models.build(source, device="cpu", dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.isfinite(model(**models.sample_batch(source, batch=1, seq=8)).loss)


def test_the_seed_decides_the_weights_and_leaves_the_random_state_alone():
    source = models.describe("tiny-llama")
    before = torch.get_rng_state()
    first, again, other = (models.build(source, device="cpu", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_the_seed_decides_the_batch():
    source = models.describe("tiny-gpt2")
    first, again, other = (models.sample_batch(source, batch=2, seq=8, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first["input_ids"], again["input_ids"])
    assert not torch.equal(first["input_ids"], other["input_ids"])


def test_a_masked_batch_asks_for_some_tokens_of_every_row():
    batch = models.sample_batch(models.describe("tiny-bert"), batch=4, seq=64)
    asked = batch["labels"] != -100
    assert bool(batch["attention_mask"].all())
    assert torch.equal(batch["labels"][asked], batch["input_ids"][asked])
    assert bool(asked.any(dim=1).all()) and not bool(asked.all())


def test_decoders_are_built_without_a_cache_and_with_the_attention_asked_for():
    model = models.build(models.describe("tiny-qwen3"), attention="eager")
    assert model.config.use_cache is False
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-qwen3", "gemma-2b"])
@pytest.mark.parametrize("layers", [1, 30])
def test_overrides_change_the_number_of_layers_under_its_common_name(name, layers):
    source = models.describe(name)
    before = source.config.to_dict()
    model = models.build(source, overrides={"num_hidden_layers": layers})
    assert model.config.num_hidden_layers == layers
    assert source.config.to_dict() == before


def test_an_override_of_an_unknown_field_is_refused():
    with pytest.raises(InvalidInput, match=r"unknown config field `hiden_size`.*\n.*did you mean `hidden_size`"):
        models.build(models.describe("tiny-llama"), overrides={"hiden_size": 32})


def test_an_impossible_override_is_one_line_and_a_hint():
    with pytest.raises(InvalidInput, match="tiny-llama") as caught:
        models.build(models.describe("tiny-llama"), overrides={"num_attention_heads": 7})
    assert "\n" not in caught.value.fact and caught.value.hint


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-bert", "tiny-t5", "tiny-vit"])
def test_a_saved_folder_gives_its_own_weights_back(name, tmp_path):
    original = models.build(models.describe(name), device="cpu", seed=3)
    original.save_pretrained(tmp_path / "saved")
    source = models.describe(tmp_path / "saved")
    assert (source.name, source.task, source.folder) == ("saved", models.describe(name).task, tmp_path / "saved")
    loaded = models.build(source, device="cpu", dtype="bfloat16")
    assert loaded.training
    for (key, a), (_, b) in zip(original.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(a.to(torch.bfloat16), b), key
    assert {p.device.type for p in models.build(source).parameters()} == {"meta"}


def test_a_config_file_alone_gives_the_shape_with_random_weights(tmp_path):
    original = models.build(models.describe("tiny-llama"), device="cpu", seed=3)
    original.save_pretrained(tmp_path)
    source = models.describe(str(tmp_path / "config.json"))
    assert source.folder is None
    built = models.build(source, device="cpu")
    assert count(built) == count(original)
    assert not torch.equal(built.lm_head.weight, original.lm_head.weight)


def test_a_folder_with_a_config_but_no_weights_is_random(tmp_path):
    models.describe("tiny-llama").config.save_pretrained(tmp_path)
    source = models.describe(tmp_path)
    assert source.task == "causal-lm"
    assert count(models.build(source, device="cpu")) == PRESETS["tiny-llama"]["parameters"]


@pytest.mark.parametrize(
    ("name", "task"), [("tiny-bert", "masked-lm"), ("tiny-t5", "seq2seq-lm"), ("tiny-vit", "image-classification")]
)
def test_a_config_without_an_architecture_finds_its_task_by_family(name, task, tmp_path):
    models.describe(name).config.save_pretrained(tmp_path)
    assert models.describe(tmp_path).task == task


def test_a_pickle_is_never_read(tmp_path):
    class Trap:
        def __reduce__(self):
            return print, ("this must not run",)

    models.describe("tiny-llama").config.save_pretrained(tmp_path)
    torch.save(Trap(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InvalidInput, match="is a pickle"):
        models.build(models.describe(tmp_path), device="cpu")


def test_code_named_in_a_config_is_never_run(tmp_path):
    models.describe("tiny-llama").config.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "evil.py").write_text("raise SystemExit('this must not run')")
    model = models.build(models.describe(tmp_path), device="cpu")
    assert type(model).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    "text", ["{", "[1, 2]", "{}", '{"model_type": "lama"}', '{"model_type": "llama", "hidden_size": "wide"}', "\x00\xff"]
)
def test_a_bad_config_is_one_line_and_a_hint(text, tmp_path):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidInput) as caught:
        models.describe(tmp_path)
    assert "\n" not in caught.value.fact and caught.value.hint


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r"cannot read .*config\.json"):
        models.describe(tmp_path)


def test_a_head_that_no_task_fits_is_refused(tmp_path):
    config = models.describe("tiny-bert").config
    config.architectures = ["BertForTokenClassification"]
    config.save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="BertForTokenClassification"):
        models.describe(tmp_path)


@pytest.mark.parametrize(("name", "near"), [("lama-3.2-1b", "llama-3.2-1b"), ("meta-llama/Llama-3.2-1B", "llama-3.2-1b")])
def test_an_unknown_name_answers_with_the_nearest(name, near):
    with pytest.raises(InvalidInput, match=f"unknown model .*\n.*did you mean `{near}`"):
        models.describe(name)


def test_a_path_that_does_not_exist_is_called_a_path():
    with pytest.raises(InvalidInput, match=r"no file or folder `\./nowhere`"):
        models.describe("./nowhere")


@pytest.mark.parametrize(("name", "limit"), [("tiny-gpt2", 1024), ("roberta-base", 512), ("opt-125m", 2048)])
def test_a_sequence_longer_than_the_learned_positions_is_refused(name, limit):
    source = models.describe(name)
    models.sample_batch(source, batch=1, seq=limit)
    with pytest.raises(InvalidInput, match=f"has {limit} positions"):
        models.sample_batch(source, batch=1, seq=limit + 1)


def test_rotary_positions_have_no_end():
    assert models.sample_batch(models.describe("tiny-llama"), batch=1, seq=4096)["labels"].shape == (1, 4096)


def test_wrong_options_are_refused_with_the_known_ones():
    source = models.describe("tiny-llama")
    with pytest.raises(InvalidInput, match="unknown dtype `bf16`"):
        models.build(source, dtype="bf16")
    with pytest.raises(InvalidInput, match="unknown device `gpu`"):
        models.build(source, device="gpu")
    with pytest.raises(InvalidInput, match="cannot build tiny-llama"):
        models.build(source, attention="none-such")
    with pytest.raises(InvalidInput, match="`batch` is 0"):
        models.sample_batch(source, batch=0, seq=8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_gpu_is_said_plainly():
    with pytest.raises(Unsupported, match="no CUDA device"):
        models.build(models.describe("tiny-llama"), device="cuda")


def test_without_transformers_the_error_says_how_to_install_it(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "transformers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtra) as caught:
        models.describe("gpt2")
    assert caught.value.hint == 'pip install "holdall[hf]"'
