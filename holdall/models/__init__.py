"""Models by name: a preset, a local Hugging Face folder or a `config.json` becomes a model and a sample batch.

Presets of the families in this folder are made of torch's modules; all others need transformers.

Planning needs shapes, not weights, so a model is built on the meta device unless another one is given. Nothing is downloaded,
no pickle is read and no code from a model folder is run.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from holdall.errors import InvalidInput, MissingExtra, Unsupported, unknown_name
from holdall.models.bert import BertShape
from holdall.models.inception import InceptionConfig
from holdall.models.plain import PlainConfig
from holdall.models.resnet import ResNetConfig
from holdall.models.vgg import VGGConfig

AUTO_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

PLAIN: dict[str, type[PlainConfig]] = {c.model_type: c for c in (BertShape, InceptionConfig, ResNetConfig, VGGConfig)}
"""The families that need torch alone."""

_ENDINGS = {  # how the names of architectures end -> task
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForMaskedLM": "masked-lm",
    "ForPreTraining": "masked-lm",
    "ForConditionalGeneration": "seq2seq-lm",
    "ForImageClassification": "image-classification",
}
_HEADS = {  # task -> the table of families that have such a head
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
_IGNORED = -100  # the label that cross entropy ignores
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """The description of a model. `folder`: that of its weights; None: only its shape is known."""

    name: str
    config: Any  # a transformers config or a `PlainConfig`; do not change it in place
    task: str
    folder: Path | None = None


def model_names() -> tuple[str, ...]:
    """The presets, in the order of the table."""
    return tuple(_presets())


def family_names(source: ModelSource) -> tuple[str, ...]:
    """The presets of a model's type and task."""
    wanted = source.config.model_type, source.task
    return tuple(name for name, preset in _presets().items() if (preset["model_type"], preset["task"]) == wanted)


def describe(name_or_path: str | Path) -> ModelSource:
    """The model meant by a preset name, a folder with a `config.json`, or the path of a `config.json` (shape only).

    A preset wins over a folder of the same name; write `./gpt2` for the folder.
    """
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if name in _presets():
        preset = _presets()[name]
        plain = PLAIN.get(preset["model_type"])
        make = plain or partial(_transformers().AutoConfig.for_model, preset["model_type"])
        return ModelSource(name=name, config=_without_cache(make(**preset["config"])), task=preset["task"])
    if path.is_dir():
        config = _read_config(path / "config.json")
        return ModelSource(name=path.resolve().name, config=config, task=_task_of(config, path), folder=path)
    if path.is_file():
        config = _read_config(path)
        return ModelSource(name=path.resolve().parent.name, config=config, task=_task_of(config, path))
    if path.suffix == ".json" or name.startswith((".", "/", "~")):
        raise InvalidInput(f"there is no file or folder `{name}`", hint="give a model folder, a `config.json` or a preset name")
    # a name of the form owner/model is usually one from a hub: its last part finds the nearest preset
    raise unknown_name("model", name.rsplit("/", 1)[-1], _presets())


def override(source: ModelSource, changes: Mapping[str, Any]) -> ModelSource:
    """The same model with other config values, such as `{"num_hidden_layers": 2}`; draw its batches from the result."""
    if not changes:
        return source
    for key in changes:
        if not hasattr(source.config, key):
            raise unknown_name("config field", key, source.config.to_dict())
    own = getattr(source.config, "attribute_map", {})  # num_hidden_layers -> n_layer, where a family has its own names
    values = source.config.to_dict() | {own.get(key, key): value for key, value in changes.items()}
    if "layer_types" not in changes:
        values.pop("layer_types", None)  # one entry per layer, made from the number of layers
    try:
        return replace(source, config=_without_cache(type(source.config).from_dict(values)))
    except Exception as error:  # each family of configs checks its values with errors of its own
        raise InvalidInput(
            f"{source.name} cannot take {dict(changes)}: {_first_line(error)}",
            hint="change one field at a time",
        ) from error


def build(
    source: ModelSource,
    *,
    device: str = "meta",
    dtype: str = "float32",
    seed: int = 0,
    attention: str = "sdpa",
    overrides: Mapping[str, Any] = _NOTHING,
) -> torch.nn.Module:
    """The model in training mode: the folder's weights where there are some and the device is real, random ones otherwise.

    Random weights depend on the seed and on the kind of device; the caller's own random state is left as it was.
    """
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    _check_device(device)
    source = override(source, overrides)
    if isinstance(source.config, PlainConfig):
        return _build_plain(source.name, source.config, device, DTYPES[dtype], seed)
    auto = getattr(_transformers(), AUTO_CLASSES[source.task])
    config = copy.deepcopy(source.config)  # building writes the dtype and the attention into it
    options = {"dtype": DTYPES[dtype], "attn_implementation": attention, "trust_remote_code": False}
    try:
        with _seeded(seed, device):  # weights that a folder lacks are random too
            if source.folder is not None and device != "meta" and _has_weights(source.folder):
                # read on the host, then moved: loading straight onto a device would need a second library
                model = auto.from_pretrained(
                    source.folder, config=config, use_safetensors=True, local_files_only=True, **options
                )
                model = model.to(device)
            else:
                with torch.device(device):
                    model = auto.from_config(config, **options)
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        if isinstance(error, InvalidInput):
            raise
        hint = 'try `attention="eager"`, fewer overrides, or the folder as `save_pretrained` wrote it'
        raise InvalidInput(f"cannot build {source.name}: {_first_line(error)}", hint=hint) from error
    module: torch.nn.Module = model.train()
    return module


def _build_plain(name: str, config: PlainConfig, device: str, dtype: torch.dtype, seed: int) -> torch.nn.Module:
    try:
        with _seeded(seed, device), torch.device(device):
            return copy.deepcopy(config).make().to(dtype).train()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, ZeroDivisionError) as error:
        raise InvalidInput(f"cannot build {name}: {_first_line(error)}", hint="use fewer overrides") from error


def sample_batch(source: ModelSource, *, batch: int, seq: int, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
    """Inputs and labels of the right names and shapes, the same on every device. `seq` means nothing to an image model.

    Decoders get no attention mask: a mask of ones changes nothing, and flash kernels do not take one.
    """
    if batch < 1 or seq < 1:
        raise InvalidInput(
            f"`batch` is {batch} and `seq` is {seq}, but both must be at least 1", hint="use, for example, batch=8 and seq=512"
        )
    config, generator = source.config, torch.Generator().manual_seed(seed)
    if source.task == "image-classification":
        made = _images(config, batch, generator)
    else:
        _check_length(source, seq)
        ids = torch.randint(0, config.vocab_size, (batch, seq), generator=generator)
        made = _tokens(source.task, ids, config.vocab_size, generator)
    return {key: value.to(device) for key, value in made.items()}


def _tokens(task: str, ids: torch.Tensor, vocabulary: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    if task == "causal-lm":
        return {"input_ids": ids, "labels": ids.clone()}
    mask = torch.ones_like(ids)
    if task == "seq2seq-lm":
        labels = torch.randint(0, vocabulary, ids.shape, generator=generator)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}
    asked = torch.rand(ids.shape, generator=generator) < 0.15  # the share of BERT's pre-training
    asked[:, 0] = True  # a batch without any label has no loss
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~asked, _IGNORED)}


def _images(config: Any, batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    size = config.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return {
        "pixel_values": torch.randn(batch, config.num_channels, height, width, generator=generator),
        "labels": torch.randint(0, config.num_labels, (batch,), generator=generator),
    }


def _check_length(source: ModelSource, seq: int) -> None:
    """Raise if `seq` exceeds the learned positions: an index error on a CPU, and a device-side assertion on a GPU."""
    config = source.config
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None or hasattr(config, "rope_parameters"):
        return
    if "roberta" in config.model_type:
        limit -= config.pad_token_id + 1  # its positions begin after the padding token's
    if seq > limit:
        raise InvalidInput(f"`seq` is {seq}, but {source.name} has {limit} positions", hint=f"use at most {limit} tokens")


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise unknown_name("device", device, ("meta", "cpu", "cuda")) from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise Unsupported("no CUDA device is available here", hint='use `device="cpu"`, or "meta" to plan without memory')


@cache
def _presets() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((files("holdall") / "data" / "models.json").read_text(encoding="utf-8"))
    return found


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        hint = 'pip install "holdall[hf]"'
        raise MissingExtra("models by name or folder need the package `transformers`", hint=hint) from error
    return transformers


def _read_config(path: Path) -> Any:
    transformers = _transformers()
    hint = "give the `config.json` that `save_pretrained` writes beside the weights"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"cannot read `{path}`: {error.strerror or error}", hint=hint) from None
    except ValueError as error:  # not JSON, or not text
        raise InvalidInput(f"`{path}` is not JSON: {_first_line(error)}", hint=hint) from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise InvalidInput(f"`{path}` is not a model config: it has no `model_type`", hint=hint)
    known = transformers.CONFIG_MAPPING
    if values["model_type"] not in known:
        raise unknown_name("model type", values["model_type"], known)
    try:
        return _without_cache(known[values["model_type"]].from_dict(values))
    except Exception as error:  # each family of configs checks its values with errors of its own
        raise InvalidInput(f"`{path}` is not a usable config: {_first_line(error)}", hint=hint) from error


def _without_cache(config: Any) -> Any:
    """Switch off the cache of keys and values: training does not use it, and it would count as activations."""
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


def _task_of(config: Any, path: Path) -> str:
    """From the architecture that was saved; for a model without a head, the first task for which its family has one."""
    heads = _transformers().models.auto.modeling_auto
    saved: list[str] = config.architectures or []
    tasks = [task for name in saved for ending, task in _ENDINGS.items() if name.endswith(ending)]
    if not tasks and not any("For" in name for name in saved):
        tasks = ["image-classification", "seq2seq-lm", "masked-lm", "causal-lm"]
        if getattr(config, "is_decoder", False):
            tasks.reverse()  # BERT's family has heads of both kinds
    for task in tasks:
        if config.model_type in getattr(heads, _HEADS[task]):
            return task
    what = " ".join(saved) or config.model_type
    raise Unsupported(
        f"`{path}` holds a {what}, whose task is not supported", hint=f"supported tasks: {', '.join(AUTO_CLASSES)}"
    )


def _has_weights(folder: Path) -> bool:
    """Whether safetensors lie in the folder; weights of another form are refused rather than replaced by random ones."""
    if any(folder.glob("*.safetensors")):
        return True
    other = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(pattern))
    if other:
        raise InvalidInput(
            f"`{folder / other[0]}` is a pickle, which can run code when it is read",
            hint="save the model again with `save_pretrained`, which writes safetensors",
        )
    return False


@contextmanager
def _seeded(seed: int, device: str) -> Iterator[None]:
    """Inside, random numbers come from a seed; the caller's random state is restored on exit."""
    on_gpu = torch.device(device).type == "cuda" or torch.cuda.is_initialized()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if on_gpu else ()):
        torch.manual_seed(seed)
        yield


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
