"""Sound and series over time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from holdall.testing.families._registry import (
    HEADS,
    INNER,
    LAYERS,
    WIDTH,
    Made,
    classes_of,
    hugging_face,
    register,
    tokens,
    values_of,
)
from holdall.testing.families.translators import BART

SPEECH: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 3,
    "ctc_loss_reduction": "mean",
    "pad_token_id": 0,
}
CERTAIN: dict[str, Any] = {"mask_time_prob": 0.0, "layerdrop": 0.0}


def _speech(name: str, prefix: str, **settings: Any) -> None:
    @register("sound", name)
    def build() -> Made:
        made = hugging_face(f"{prefix}ForCTC", f"{prefix}Config", **{"num_hidden_layers": LAYERS, **SPEECH, **settings})
        return made, {"input_values": torch.randn(2, 1600), "labels": torch.randint(1, 32, (2, 8))}


_speech("wav2vec2", "Wav2Vec2", **CERTAIN)
_speech("wav2vec2-layerdrop", "Wav2Vec2", **{**CERTAIN, "layerdrop": 0.1}, num_hidden_layers=4)
_speech("wav2vec2-masked", "Wav2Vec2", **{**CERTAIN, "mask_time_prob": 0.2}, mask_time_length=3, num_hidden_layers=4)
_speech("wav2vec2-both", "Wav2Vec2", layerdrop=0.3, mask_time_prob=0.2, mask_time_length=3, num_hidden_layers=4)
_speech("hubert", "Hubert", **CERTAIN)


@register("sound", "whisper")
def _whisper() -> Made:
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "vocab_size", "d_model")
    sizes = {k: v for k, v in BART.items() if k in names or k.startswith(("encoder", "decoder"))}
    lengths = {"num_mel_bins": 20, "max_source_positions": 32, "max_target_positions": 32}
    made = hugging_face("WhisperForConditionalGeneration", "WhisperConfig", **sizes, **lengths)
    return made, {"input_features": torch.randn(2, 20, 64), "labels": tokens(2, 16)}


@register("sound", "spectrogram-transformer")
def _spectrogram() -> Made:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": INNER}
    where = {"patch_size": 8, "max_length": 64, "num_mel_bins": 32, "time_stride": 8, "frequency_stride": 8}
    made = hugging_face("ASTForAudioClassification", "ASTConfig", **sizes, **where, num_labels=3)
    return made, {"input_values": torch.randn(2, 64, 32), "labels": torch.randint(0, 3, (2,))}


class Separator(nn.Module):
    """As Conv-TasNet: an encoder of waves, dilated convolutions, masks, a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv1d(1, 32, 16, 8, 4), nn.ConvTranspose1d(32, 1, 16, 8, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(32, 64, 1), nn.PReLU(), nn.GroupNorm(1, 64), nn.Conv1d(64, 32, 3, padding=2**k, dilation=2**k)
            )
            for k in range(4)
        )

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        seen = x = self.enter(wave)
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.leave(seen * x.sigmoid())
        return out


@register("sound", "separator", loss=values_of)
def _separator() -> Made:
    return Separator(), (torch.randn(4, 1, 1024), torch.randn(4, 1, 1024))


@register("time", "patchtst")
def _patchtst() -> Made:
    made = hugging_face(
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        num_input_channels=3,
        context_length=64,
        patch_length=8,
        patch_stride=8,
        d_model=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        ffn_dim=INNER,
        prediction_length=16,
    )
    return made, {"past_values": torch.randn(8, 64, 3), "future_values": torch.randn(8, 16, 3)}


@register("time", "patchtsmixer")
def _patchtsmixer() -> Made:
    sizes = {"context_length": 64, "patch_length": 8, "patch_stride": 8, "num_input_channels": 3, "prediction_length": 16}
    made = hugging_face("PatchTSMixerForPrediction", "PatchTSMixerConfig", **sizes, d_model=32, num_layers=3)
    return made, {"past_values": torch.randn(8, 64, 3), "future_values": torch.randn(8, 16, 3)}


@register("time", "series-transformer")
def _series() -> Made:
    made = hugging_face(
        "TimeSeriesTransformerForPrediction",
        "TimeSeriesTransformerConfig",
        prediction_length=8,
        context_length=32,
        lags_sequence=[1, 2, 3],
        num_time_features=1,
        d_model=32,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
    )
    past = 32 + 3
    return made, {
        "past_values": torch.rand(8, past) + 0.5,
        "past_time_features": torch.randn(8, past, 1),
        "past_observed_mask": torch.ones(8, past),
        "future_values": torch.rand(8, 8) + 0.5,
        "future_time_features": torch.randn(8, 8, 1),
    }


class Waves(nn.Module):
    """Convolutions over time with group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *[nn.Sequential(nn.Conv1d(32, 32, 5, padding=2), nn.GroupNorm(4, 32), nn.GELU()) for _ in range(5)]
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.net(x).mean(-1))
        return out


@register("time", "conv1d", loss=classes_of)
def _conv1d() -> Made:
    return Waves(), (torch.randn(16, 32, 128), torch.randint(0, 10, (16,)))


class Spectral(nn.Module):
    """As a Fourier neural operator: multiplies a few frequencies by complex weights."""

    def __init__(self, width: int = 16, kept: int = 8) -> None:
        super().__init__()
        self.enter, self.leave, self.kept = nn.Conv1d(1, width, 1), nn.Conv1d(width, 1, 1), kept
        self.weights = nn.ParameterList(torch.randn(width, width, kept, 2) * 0.1 for _ in range(3))
        self.around = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for weight, around in zip(self.weights, self.around, strict=True):
            waves = torch.fft.rfft(x)
            mixed = torch.einsum("bik,iok->bok", waves[..., : self.kept], torch.view_as_complex(weight))
            x = nn.functional.gelu(torch.fft.irfft(mixed, n=x.shape[-1]) + around(x))
        out: torch.Tensor = self.leave(x)
        return out


@register("time", "fourier-operator", loss=values_of)
def _fourier() -> Made:
    return Spectral(), (torch.randn(16, 1, 128), torch.randn(16, 1, 128))
