"""Models of more than one input: images with text, pairs, latents that look at anything."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from holdall.testing.families._registry import (
    HEADS,
    INNER,
    LAYERS,
    VOCABULARY,
    WIDTH,
    Made,
    classes_of,
    hugging_face,
    register,
    tokens,
)
from holdall.testing.families.decoders import USUAL

TOWER: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
SEEING: dict[str, Any] = {**TOWER, "image_size": 32, "patch_size": 8}
READING: dict[str, Any] = {
    **TOWER,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


@register("several inputs", "clip")
def _clip() -> Made:
    made = hugging_face("CLIPModel", "CLIPConfig", text_config=READING, vision_config=SEEING, projection_dim=32)
    ids = tokens(4, 16)
    ids[:, -1] = 1
    return made, {"input_ids": ids, "pixel_values": torch.randn(4, 3, 32, 32), "return_loss": True}


@register("several inputs", "siglip")
def _siglip() -> Made:
    made = hugging_face("SiglipModel", "SiglipConfig", text_config=READING, vision_config=SEEING)
    return made, {"input_ids": tokens(4, 16), "pixel_values": torch.randn(4, 3, 32, 32), "return_loss": True}


@register("several inputs", "llava")
def _llava() -> Made:
    from transformers import CLIPVisionConfig, LlamaConfig

    made = hugging_face(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        vision_config=CLIPVisionConfig(**SEEING),
        text_config=LlamaConfig(**USUAL),
        image_token_id=5,
        vision_feature_layer=-1,
    )
    ids = tokens(2, 40, least=6)
    ids[:, 2:18] = 5
    return made, {"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32), "labels": ids.clone()}


@register("several inputs", "paligemma")
def _paligemma() -> Made:
    made = hugging_face(
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        vision_config={"model_type": "siglip_vision_model", **SEEING, "projection_dim": WIDTH},
        text_config={"model_type": "gemma", **USUAL, "num_key_value_heads": 2, "head_dim": 16},
        image_token_id=5,
        projection_dim=WIDTH,
    )
    ids = tokens(2, 40, least=6)
    ids[:, :16] = 5
    kinds = torch.zeros_like(ids)
    kinds[:, 20:] = 1
    batch = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32), "token_type_ids": kinds, "labels": ids.clone()}
    return made, {**batch, "attention_mask": torch.ones_like(ids)}


class Latents(nn.Module):
    """As Perceiver: a few latents look at a long input, then at each other, several times with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(16, WIDTH) * 0.1)
        self.enter = nn.Linear(8, WIDTH)
        self.look = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.think = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.enter(x)
        now = self.latents.expand(len(x), -1, -1)
        for _ in range(3):
            now = now + self.look(now, seen, seen, need_weights=False)[0]
            now = self.think(now)
        out: torch.Tensor = self.head(now.mean(1))
        return out


@register("several inputs", "perceiver", loss=classes_of)
def _perceiver() -> Made:
    return Latents(), (torch.randn(4, 200, 8), torch.randint(0, 10, (4,)))


class Twin(nn.Module):
    """One net that is called once for each side of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        return out


def _apart(model: nn.Module, batch: Any) -> torch.Tensor:
    one, two = model(batch[0]), model(batch[1])
    scores = nn.functional.normalize(one, dim=-1) @ nn.functional.normalize(two, dim=-1).T
    return nn.functional.cross_entropy(scores * 5, torch.arange(len(one)))


@register("several inputs", "siamese", loss=_apart)
def _siamese() -> Made:
    return Twin(), (torch.randn(256, WIDTH), torch.randn(256, WIDTH))
