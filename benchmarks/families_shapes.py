"""Mid-size shapes of many families, for `families_on_gpu.py`: how to build each, and a batch for it.

Each has a tiny twin of the same architecture, so that the same code can be tried on a CPU. Settings that are not named are the
library's defaults (`use_cache`, dropout and the like).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Shape:
    name: str
    build: Callable[[bool], nn.Module]  # tiny or not; on the current default device
    batch: Callable[[bool, Any], Batch]  # tiny or not, and the model's config
    norm: float = 1.0  # gradients are clipped to it
    tight: float = 0.25  # the tight budget, as a share of plain's peak
    rate: float = 1e-4  # small enough for the loss to fall: where it jumps, plain training differs from itself
    block: str = ""  # the class to checkpoint, where the library has no switch for that


SHAPES: dict[str, Shape] = {}


def _add(name: str, build: Callable[[bool], nn.Module], batch: Callable[[bool, Any], Batch], **other: Any) -> None:
    SHAPES[name] = Shape(name=name, build=build, batch=batch, **other)


def _hf(config: str, kind: str, full: dict[str, Any], tiny: dict[str, Any]) -> Callable[[bool], nn.Module]:
    def build(small: bool) -> nn.Module:
        import transformers

        settings = {**full, **tiny} if small else full
        made: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**settings))
        return made

    return build


def _ids(rows: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(3, vocabulary, (rows, length))


def _tokens(rows: int, length: int) -> Callable[[bool, Any], Batch]:
    def batch(small: bool, config: Any) -> Batch:
        ids = _ids(2, 32, config.vocab_size) if small else _ids(rows, length, config.vocab_size)
        return {"input_ids": ids, "labels": ids.clone()}

    return batch


def _sentences(rows: int, length: int) -> Callable[[bool, Any], Batch]:
    def batch(small: bool, config: Any) -> Batch:
        ids = _ids(2, 32, config.vocab_size) if small else _ids(rows, length, config.vocab_size)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(0, 2, ids.shape[:1])}

    return batch


def _images(rows: int, size: int) -> Callable[[bool, Any], Batch]:
    def batch(small: bool, config: Any) -> Batch:
        n, side = (2, 64) if small else (rows, size)
        return {"pixel_values": torch.randn(n, 3, side, side), "labels": torch.randint(0, config.num_labels, (n,))}

    return batch


# -- language models -------------------------------------------------------------------------------------------------------

_TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_TINY_GROUPED = {**_TINY, "num_key_value_heads": 2}


def _llama(**shape: Any) -> dict[str, Any]:
    return {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072, **shape}


_add(
    "llama-3.2-3b",
    _hf(
        "LlamaConfig",
        "LlamaForCausalLM",
        _llama(
            hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24, tie_word_embeddings=True
        ),
        _TINY_GROUPED,
    ),
    _tokens(4, 4096),
    tight=0.18,
)
_add(
    "llama-untied",
    _hf(
        "LlamaConfig",
        "LlamaForCausalLM",
        _llama(hidden_size=4096, intermediate_size=14336, num_hidden_layers=10, num_attention_heads=32),
        _TINY_GROUPED,
    ),
    _tokens(2, 4096),
    norm=1e-3,
)
_add(
    "llama-3.1-8b",
    _hf(
        "LlamaConfig",
        "LlamaForCausalLM",
        _llama(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
        _TINY_GROUPED,
    ),
    _tokens(2, 2048),
)
_add(
    "qwen2-1.5b",
    _hf(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        _TINY_GROUPED,
    ),
    _tokens(4, 2048),
    tight=0.2,
)
_add(
    "gpt-neox-2.8b",
    _hf(
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {
            "vocab_size": 50304,
            "hidden_size": 2560,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 10240,
            "max_position_embeddings": 2048,
        },
        _TINY,
    ),
    _tokens(4, 2048),
    norm=1e-3,
)
_add(
    "gemma-2-2b",
    _hf(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "vocab_size": 256000,
            "hidden_size": 2304,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "intermediate_size": 9216,
        },
        {**_TINY_GROUPED, "head_dim": 16},
    ),
    _tokens(2, 2048),
)
_add(
    "mixtral-2.7b",
    _hf(
        "MixtralConfig",
        "MixtralForCausalLM",
        {
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 4096,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        {**_TINY_GROUPED, "num_local_experts": 4},
    ),
    _tokens(4, 2048),
    norm=1e-3,
)
_add(
    "mamba2-0.5b",
    _hf(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            "vocab_size": 50288,
            "hidden_size": 1536,
            "num_hidden_layers": 24,
            "num_heads": 48,
            "head_dim": 64,
            "state_size": 64,
            "n_groups": 1,
            "chunk_size": 128,
        },
        {**_TINY, "num_heads": 8, "head_dim": 16, "state_size": 8, "chunk_size": 16},
    ),
    _tokens(2, 1024),
)
_add(
    "gpt2-xl",
    _hf(
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": 50257, "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024},
        {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4},
    ),
    _tokens(8, 1024),
)


# -- encoders, and encoders with decoders ----------------------------------------------------------------------------------


def _pairs(small: bool, config: Any) -> Batch:
    source = _ids(2, 32, config.vocab_size) if small else _ids(16, 512, config.vocab_size)
    target = _ids(2, 16, config.vocab_size) if small else _ids(16, 128, config.vocab_size)
    return {"input_ids": source, "labels": target}


_add(
    "t5-large",
    _hf(
        "T5Config",
        "T5ForConditionalGeneration",
        {"vocab_size": 32128, "d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16}
        | {"decoder_start_token_id": 0},
        {"vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
    ),
    _pairs,
)
_add(
    "bert-large",
    _hf(
        "BertConfig",
        "BertForSequenceClassification",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
        _TINY,
    ),
    _sentences(32, 512),
    rate=1e-5,
)
_add(
    "deberta-v2-xl",
    _hf(
        "DebertaV2Config",
        "DebertaV2ForSequenceClassification",
        {
            "vocab_size": 128100,
            "hidden_size": 1536,
            "num_hidden_layers": 24,
            "num_attention_heads": 24,
            "intermediate_size": 6144,
            "relative_attention": True,
            "position_buckets": 256,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "max_position_embeddings": 512,
        },
        {**_TINY, "position_buckets": 16},
    ),
    _sentences(8, 512),
    rate=1e-5,
)


# -- images ----------------------------------------------------------------------------------------------------------------

_add(
    "vit-h-14",
    _hf(
        "ViTConfig",
        "ViTForImageClassification",
        {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16}
        | {"image_size": 224, "patch_size": 14, "num_labels": 1000},
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"image_size": 64, "patch_size": 16},
    ),
    _images(64, 224),
)
_add(
    "convnextv2-l",
    _hf(
        "ConvNextV2Config",
        "ConvNextV2ForImageClassification",
        {"depths": [3, 3, 27, 3], "hidden_sizes": [192, 384, 768, 1536], "num_labels": 1000},
        {"depths": [1, 1, 2, 1], "hidden_sizes": [16, 32, 48, 64], "num_labels": 10},
    ),
    _images(64, 224),
    block="ConvNextV2Layer",
)
_add(
    "resnet-152",
    _hf(
        "ResNetConfig",
        "ResNetForImageClassification",
        {"depths": [3, 8, 36, 3], "num_labels": 1000},
        {"depths": [1, 1, 1, 1], "embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "num_labels": 10},
    ),
    _images(128, 224),
    block="ResNetBottleNeckLayer",
)


def _captions(small: bool, config: Any) -> Batch:
    rows, side = (2, 32) if small else (64, 224)
    ids = _ids(rows, 16 if small else 77, config.text_config.vocab_size)
    ids[:, -1] = config.text_config.eos_token_id
    return {"input_ids": ids, "pixel_values": torch.randn(rows, 3, side, side), "return_loss": True}  # type: ignore[dict-item]


_SMALL_TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_add(
    "clip-l-14",
    _hf(
        "CLIPConfig",
        "CLIPModel",
        {
            "text_config": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
            "vision_config": {
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "image_size": 224,
                "patch_size": 14,
            },
            "projection_dim": 768,
        },
        {
            "text_config": {**_SMALL_TOWER, "vocab_size": 512, "eos_token_id": 1, "bos_token_id": 0},
            "vision_config": {**_SMALL_TOWER, "image_size": 32, "patch_size": 8},
            "projection_dim": 32,
        },
    ),
    _captions,
    norm=1e-3,
    rate=1e-5,
)


class Stage(nn.Module):
    """Two convolutions with the time added between them, and a way around."""

    def __init__(self, inner: int, outer: int, times: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, inner), nn.SiLU(), nn.Conv2d(inner, outer, 3, padding=1))
        self.time = nn.Linear(times, outer)
        self.second = nn.Sequential(nn.GroupNorm(8, outer), nn.SiLU(), nn.Conv2d(outer, outer, 3, padding=1))
        self.around = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        inside = self.first(x) + self.time(time)[:, :, None, None]
        out: torch.Tensor = self.around(x) + self.second(inside)
        return out


class DiffusionUNet(nn.Module):
    """A U-Net that predicts the noise in an image; returns the loss."""

    def __init__(self, width: int, depth: int, levels: tuple[int, ...] = (1, 2, 4, 4)) -> None:
        super().__init__()
        times, sizes = width * 4, [width * k for k in levels]
        self.times = nn.Sequential(nn.Linear(width, times), nn.SiLU(), nn.Linear(times, times))
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down, self.up, self.shrink, self.grow = nn.ModuleList(), nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        now, passed = width, [width]
        for size in sizes:
            for _ in range(depth):
                self.down.append(Stage(now, size, times))
                now = size
                passed.append(now)
            self.shrink.append(nn.Conv2d(now, now, 3, stride=2, padding=1))
        self.middle = nn.ModuleList(Stage(now, now, times) for _ in range(2))
        for size in reversed(sizes):
            self.grow.append(nn.ConvTranspose2d(now, now, 2, stride=2))
            for _ in range(depth):
                self.up.append(Stage(now + passed.pop(), size, times))
                now = size
        self.depth, self.width = depth, width

    def forward(self, noisy: torch.Tensor, when: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        waves = torch.exp(-torch.arange(self.width // 2, device=when.device) / self.width * 9.0)
        angles = when[:, None].float() * waves[None]
        time = self.times(torch.cat([angles.sin(), angles.cos()], 1).to(self.times[0].weight.dtype))
        x = self.enter(noisy)
        passed = []
        for i, block in enumerate(self.down):
            x = block(x, time)
            passed.append(x)
            if (i + 1) % self.depth == 0:
                x = self.shrink[i // self.depth](x)
        for block in self.middle:
            x = block(x, time)
        for i, block in enumerate(self.up):
            if i % self.depth == 0:
                x = self.grow[i // self.depth](x)
            x = block(torch.cat([x, passed.pop()], 1), time)
        return nn.functional.mse_loss(self.leave(x).float(), noise.float())


def _noisy(small: bool, config: Any) -> Batch:  # noqa: ARG001
    rows, side = (2, 16) if small else (32, 64)
    noise = torch.randn(rows, 3, side, side)
    return {"noisy": torch.randn(rows, 3, side, side) + noise, "when": torch.randint(0, 1000, (rows,)), "noise": noise}


_add("diffusion-unet", lambda small: DiffusionUNet(16, 1) if small else DiffusionUNet(256, 3), _noisy, block="Stage")


# -- sound -----------------------------------------------------------------------------------------------------------------


def _speech(small: bool, config: Any) -> Batch:
    frames, rows = 2 * config.max_source_positions, 2 if small else 8
    labels = _ids(rows, 16 if small else 256, config.vocab_size)
    return {"input_features": torch.randn(rows, config.num_mel_bins, frames), "labels": labels}


_add(
    "whisper-large",
    _hf(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            "d_model": 1280,
            "encoder_layers": 32,
            "decoder_layers": 32,
            "encoder_attention_heads": 20,
            "decoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "decoder_ffn_dim": 5120,
            "vocab_size": 51866,
            "num_mel_bins": 128,
        },
        {
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "vocab_size": 512,
            "num_mel_bins": 20,
            "max_source_positions": 32,
            "max_target_positions": 32,
            "pad_token_id": 2,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "decoder_start_token_id": 0,
        },
    ),
    _speech,
)


def _waves(small: bool, config: Any) -> Batch:
    rows, samples, letters = (2, 1600, 4) if small else (8, 160000, 100)
    return {"input_values": torch.randn(rows, samples), "labels": torch.randint(1, config.vocab_size, (rows, letters))}


_add(
    "wav2vec2-large",
    _hf(
        "Wav2Vec2Config",
        "Wav2Vec2ForCTC",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "feat_extract_norm": "layer",
            "do_stable_layer_norm": True,
            "ctc_loss_reduction": "mean",
            "layerdrop": 0.0,
        },
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "conv_dim": (32, 32, 32),
            "conv_stride": (5, 2, 2),
            "conv_kernel": (10, 3, 3),
            "num_feat_extract_layers": 3,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "mask_time_length": 3,
        },
    ),
    _waves,
    rate=1e-5,
)
