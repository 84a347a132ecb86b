"""Generative models: U-Nets, diffusion, GANs, autoencoders, flows, fields."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from holdall.testing.families._registry import HEADS, INNER, WIDTH, Made, register, values_of


class Twice(nn.Sequential):
    """Convolution, batch norm, ReLU in place; twice."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(
            nn.Conv2d(inner, outer, 3, padding=1),
            nn.BatchNorm2d(outer),
            nn.ReLU(inplace=True),
            nn.Conv2d(outer, outer, 3, padding=1),
            nn.BatchNorm2d(outer),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    def __init__(self, *, timed: bool = False) -> None:
        super().__init__()
        self.down = nn.ModuleList([Twice(3, 16), Twice(16, 32), Twice(32, 64)])
        self.grow = nn.ModuleList([nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)])
        self.up = nn.ModuleList([Twice(64, 32), Twice(32, 16)])
        self.out, self.pool = nn.Conv2d(16, 3, 1), nn.MaxPool2d(2)
        self.time = nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 64)) if timed else None

    def forward(self, x: torch.Tensor, when: torch.Tensor | None = None) -> torch.Tensor:
        first = self.down[0](x)
        second = self.down[1](self.pool(first))
        lowest = self.down[2](self.pool(second))
        if self.time is not None and when is not None:
            lowest = lowest + self.time(when[:, None].float() / 100)[:, :, None, None]
        x = self.up[0](torch.cat([self.grow[0](lowest), second], 1))
        x = self.up[1](torch.cat([self.grow[1](x), first], 1))
        out: torch.Tensor = self.out(x)
        return out


@register("generative", "unet", loss=values_of)
def _unet() -> Made:
    return UNet(), (torch.randn(4, 3, 16, 16), torch.randn(4, 3, 16, 16))


def _noise_in(model: nn.Module, batch: Any) -> torch.Tensor:
    """Times and noise are drawn in the loss, as most loops do."""
    (clean,) = batch
    when, noise = torch.randint(0, 100, (len(clean),)), torch.randn_like(clean)
    share = (when.float() / 100)[:, None, None, None]
    return nn.functional.mse_loss(model((1 - share) * clean + share * noise, when), noise)


@register("generative", "diffusion", loss=_noise_in)
def _diffusion() -> Made:
    return UNet(timed=True), (torch.randn(4, 3, 16, 16),)


class Modulated(nn.Module):
    """A block of DiT: scales and shifts come from the time."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(approximate="tanh"), nn.Linear(INNER, WIDTH))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.from_time = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.from_time(time)[:, None].chunk(6, -1)
        seen = self.norm(x) * (1 + scale) + shift
        x = x + gate * self.attention(seen, seen, seen, need_weights=False)[0]
        out: torch.Tensor = x + gate2 * self.inner(self.norm(x) * (1 + scale2) + shift2)
        return out


class DiffusionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, WIDTH, 4, 4), nn.Linear(WIDTH, 48)
        self.times, self.blocks = nn.Embedding(100, WIDTH), nn.ModuleList(Modulated() for _ in range(3))

    def forward(self, x: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
        seen, time = self.enter(x).flatten(2).transpose(1, 2), self.times(when)
        for block in self.blocks:
            seen = block(seen, time)
        return nn.functional.fold(self.leave(seen).transpose(1, 2), x.shape[-2:], 4, stride=4)


@register("generative", "diffusion-transformer", loss=_noise_in)
def _dit() -> Made:
    return DiffusionTransformer(), (torch.randn(4, 3, 32, 32),)


def _layers(inner: int, outer: int, depth: int = 4) -> nn.Sequential:
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(inner, inner), nn.LeakyReLU(0.2)) for _ in range(depth)], nn.Linear(inner, outer)
    )


class Adversaries(nn.Module):
    """A generator and a critic in one module; the loop calls them, and not the module."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = _layers(WIDTH, WIDTH), _layers(WIDTH, 1)


def _fooled(model: nn.Module, batch: Any) -> torch.Tensor:
    made = model.generator(batch[0])  # type: ignore[operator]
    return nn.functional.softplus(-model.critic(made)).mean() + nn.functional.softplus(model.critic(batch[1])).mean()  # type: ignore[operator]


@register("generative", "gan-one-module", loss=_fooled)
def _gan() -> Made:
    return Adversaries(), (torch.randn(256, WIDTH), torch.randn(256, WIDTH))


class DeepGenerator(nn.Module):
    """As DCGAN's generator, with batch norms, and its critic; the forward returns the generator's loss."""

    def __init__(self) -> None:
        super().__init__()
        grow = [(32, 32, 4, 1, 0), (32, 16, 4, 2, 1), (16, 8, 4, 2, 1)]
        steps = [nn.Sequential(nn.ConvTranspose2d(*size), nn.BatchNorm2d(size[1]), nn.ReLU(True)) for size in grow]
        self.generator = nn.Sequential(*steps, nn.Conv2d(8, 3, 3, padding=1), nn.Tanh())
        shrink = [nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), nn.LeakyReLU(0.2, True)) for a, b in ((3, 16), (16, 32))]
        self.critic = nn.Sequential(*shrink, nn.Flatten(), nn.Linear(512, 1))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return nn.functional.softplus(-self.critic(self.generator(z))).mean()


@register("generative", "dcgan")
def _dcgan() -> Made:
    return DeepGenerator(), (torch.randn(8, 32, 1, 1),)


class Variational(nn.Module):
    """A variational autoencoder; the noise is drawn in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (
            _layers(WIDTH, 32),
            nn.Sequential(nn.Linear(16, WIDTH), nn.GELU(), _layers(WIDTH, WIDTH, 2)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, spread = self.encoder(x).chunk(2, -1)
        made = self.decoder(mean + torch.randn_like(mean) * (0.5 * spread).exp())
        apart = -0.5 * (1 + spread - mean.square() - spread.exp()).mean()
        out: torch.Tensor = nn.functional.mse_loss(made, x) + 0.1 * apart
        return out


@register("generative", "vae")
def _vae() -> Made:
    return Variational(), (torch.randn(512, WIDTH),)


class Quantized(nn.Module):
    """A VQ-VAE: the nearest code, a gradient straight through, counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, 32))
        self.codes = nn.Embedding(64, 32)
        self.decoder = nn.Sequential(nn.Linear(32, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))
        self.register_buffer("used", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encoder(x)
        nearest = torch.cdist(z.detach(), self.codes.weight.detach()).argmin(-1)
        code = self.codes(nearest)
        self.used.mul_(0.9).add_(torch.bincount(nearest, minlength=64).float(), alpha=0.1)  # type: ignore[operator, union-attr]
        apart = nn.functional.mse_loss(code, z.detach()) + 0.25 * nn.functional.mse_loss(z, code.detach())
        return nn.functional.mse_loss(self.decoder(z + (code - z).detach()), x) + apart


@register("generative", "vqvae")
def _vqvae() -> Made:
    return Quantized(), (torch.randn(512, WIDTH),)


class Coupling(nn.Module):
    """One coupling layer of RealNVP: returns what it made, and the logarithm of the determinant so far."""

    def __init__(self, flip: bool) -> None:
        super().__init__()
        self.net, self.flip = nn.Sequential(nn.Linear(32, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH)), flip

    def forward(self, state: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, total = state
        a, b = x.chunk(2, -1)
        a, b = (b, a) if self.flip else (a, b)
        scale, shift = self.net(a).chunk(2, -1)
        scale = scale.tanh()
        b = b * scale.exp() + shift
        return torch.cat([b, a] if self.flip else [a, b], -1), total + scale.sum(-1)


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Coupling(k % 2 == 1) for k in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = (x, torch.zeros(len(x)))
        for step in self.steps:
            state = step(state)
        return (0.5 * state[0].square().sum(-1) - state[1]).mean()


@register("generative", "flow")
def _flow() -> Made:
    return Flow(), (torch.randn(256, WIDTH),)


class Field(nn.Module):
    """As NeRF: waves of a position, layers with the input given again half way, colours summed along rays."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(39, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(WIDTH + 39, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        angles = points[..., None] * (2.0 ** torch.arange(6)) * math.pi
        waves = torch.cat([points, angles.sin().flatten(-2), angles.cos().flatten(-2)], -1)
        out = self.second(torch.cat([self.first(waves), waves], -1))
        opaque = 1 - torch.exp(-out[..., 3].relu())
        through = torch.cumprod(torch.cat([torch.ones_like(opaque[..., :1]), 1 - opaque + 1e-6], -1), -1)[..., :-1]
        colours: torch.Tensor = ((opaque * through)[..., None] * out[..., :3].sigmoid()).sum(-2)
        return colours


@register("generative", "nerf", loss=values_of)
def _nerf() -> Made:
    return Field(), (torch.rand(64, 16, 3), torch.rand(64, 3))
