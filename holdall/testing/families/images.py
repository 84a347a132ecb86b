"""Images: attention, convolutions, segmentation, detection."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn

from holdall.testing.families._registry import HEADS, INNER, LAYERS, WIDTH, Made, hugging_face, register

TOWER: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "image_size": 32,
    "patch_size": 8,
}
FOUR: dict[str, Any] = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}


def _classifier(name: str, prefix: str, settings: dict[str, Any], *, side: int = 32) -> None:
    @register("image", name)
    def build() -> Made:
        made = hugging_face(f"{prefix}ForImageClassification", f"{prefix}Config", num_labels=3, **settings)
        return made, {"pixel_values": torch.randn(4, 3, side, side), "labels": torch.randint(0, 3, (4,))}


_classifier("vit", "ViT", TOWER)
_classifier("deit", "DeiT", TOWER)
_classifier("beit", "Beit", TOWER)
_classifier("dinov2", "Dinov2", {k: v for k, v in TOWER.items() if k != "intermediate_size"})
_classifier(
    "swin",
    "Swin",
    {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
)
_classifier("convnext", "ConvNext", {**FOUR, "depths": [1, 1, 2, 1]}, side=64)
_classifier("convnextv2", "ConvNextV2", {**FOUR, "depths": [1, 1, 2, 1]}, side=64)
_classifier("resnet", "ResNet", {**FOUR, "embedding_size": 16, "layer_type": "basic"}, side=64)
_classifier("regnet", "RegNet", {**FOUR, "embedding_size": 16, "groups_width": 16}, side=64)
_classifier("poolformer", "PoolFormer", FOUR, side=64)
_classifier("mobilenet-v2", "MobileNetV2", {"depth_multiplier": 0.25}, side=32)
_classifier("efficientnet", "EfficientNet", {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320}, side=64)


@register("image", "segformer")
def _segformer() -> Made:
    settings = {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]}
    made = hugging_face("SegformerForSemanticSegmentation", "SegformerConfig", **settings, decoder_hidden_size=32, num_labels=3)
    return made, {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.randint(0, 3, (2, 64, 64))}


@register("image", "vit-mae")
def _vit_mae() -> Made:
    decoder = {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    made = hugging_face("ViTMAEForPreTraining", "ViTMAEConfig", **TOWER, **decoder, decoder_intermediate_size=64)
    return made, {"pixel_values": torch.randn(2, 3, 32, 32)}


class Detector(nn.Module):
    """As DETR: a convolutional trunk, a transformer, queries that become boxes and classes; answers are taken in order."""

    def __init__(self, queries: int = 8, classes: int = 5) -> None:
        super().__init__()
        steps = [nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, WIDTH, 3, 2, 1), nn.ReLU()]
        self.trunk = nn.Sequential(*steps)
        self.transformer = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, INNER, batch_first=True)
        self.queries = nn.Parameter(torch.randn(queries, WIDTH))
        self.places = nn.Parameter(torch.randn(64, WIDTH) * 0.02)
        self.classes, self.boxes = nn.Linear(WIDTH, classes), nn.Linear(WIDTH, 4)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = self.trunk(image).flatten(2).transpose(1, 2) + self.places
        found = self.transformer(seen, self.queries.expand(len(image), -1, -1))
        return self.classes(found), self.boxes(found).sigmoid()


def _detected(model: nn.Module, batch: Any) -> torch.Tensor:
    classes, boxes = model(batch[0])
    right = nn.functional.cross_entropy(classes.flatten(0, 1), batch[1].flatten())
    return right + nn.functional.l1_loss(boxes, batch[2])


@register("image", "detector", loss=_detected)
def _detector() -> Made:
    return Detector(), (torch.randn(4, 3, 32, 32), torch.randint(0, 5, (4, 8)), torch.rand(4, 8, 4))


class Pyramid(nn.Module):
    """A feature pyramid: what the trunk made early is added to what comes back from above."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 64)
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.GroupNorm(4, b), nn.SiLU()) for a, b in pairs)
        self.side = nn.ModuleList(nn.Conv2d(b, 32, 1) for _, b in pairs)
        self.out = nn.Conv2d(32, 5, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = []
        for block in self.down:
            x = block(x)
            made.append(x)
        above = self.side[-1](made[-1])
        for k in (1, 0):
            above = nn.functional.interpolate(above, scale_factor=2.0, mode="nearest") + self.side[k](made[k])
        out: torch.Tensor = self.out(above)
        return out


@register("image", "pyramid", loss=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]))
def _pyramid() -> Made:
    return Pyramid(), (torch.randn(4, 3, 32, 32), torch.randint(0, 5, (4, 16, 16)))


class Capsules(nn.Module):
    """Capsules with routing by agreement, three rounds of it."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 32, 5, 2), nn.ReLU(), nn.Conv2d(32, 32, 3, 2))
        self.poses = nn.Parameter(torch.randn(1, 36, 5, 16, 8) * 0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = squash(self.trunk(x).reshape(len(x), -1, 8))
        votes = torch.einsum("bid,xijod->bijo", low, self.poses)
        routes = torch.zeros(*votes.shape[:3], device=x.device)
        for _ in range(3):
            high = squash((routes.softmax(2)[..., None] * votes).sum(1))
            routes = routes + (votes * high[:, None]).sum(-1)
        out: torch.Tensor = high.norm(dim=-1) * 4
        return out


def squash(x: torch.Tensor) -> torch.Tensor:
    size = x.square().sum(-1, keepdim=True)
    return x * size / (1 + size) / (size + 1e-7).sqrt()


@register("image", "capsules", loss=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]))
def _capsules() -> Made:
    return Capsules(), (torch.randn(8, 1, 18, 18), torch.randint(0, 5, (8,)))


class Mixer(nn.Module):
    """MLP-Mixer: layers over places, then over channels."""

    def __init__(self, places: int = 64) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, WIDTH, 4, 4)
        self.over_places = nn.ModuleList(
            nn.Sequential(nn.Linear(places, INNER), nn.GELU(), nn.Linear(INNER, places)) for _ in range(3)
        )
        self.over_width = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.enter(image).flatten(2).transpose(1, 2)
        for places, width in zip(self.over_places, self.over_width, strict=True):
            x = x + places(x.transpose(1, 2)).transpose(1, 2)
            x = x + width(x)
        out: torch.Tensor = self.head(x.mean(1))
        return out


@register("image", "mixer", loss=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]))
def _mixer() -> Made:
    return Mixer(), (torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,)))
