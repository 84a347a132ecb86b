"""What an optimizer does when it is told nothing is what its paper, or its authors' code, does."""

import inspect

import pytest

from holdall.registry import member_class, member_names

_IN_BACKWARD = {"clip_grad_norm": None, "clip_grad_value": None, "clip_param_norm": None, "loss_scale": None, "clip": None}
DEFAULTS = {
    "adafactor": {"lr": 1e-2, "beta1": None, "beta2_decay": -0.8, "eps": (None, 1e-3), "d": 1.0, "relative_step": True},
    "adalomo": {"lr": 1e-3, "eps": (1e-30, 1e-3), "clip_threshold": 1.0, "decay_rate": 0.8, **_IN_BACKWARD},
    "adam8bit": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "bits": 8},
    "adam_mini": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8},
    "apollo": {"rank": None, "update_proj_gap": 200, "scale": 1.0, "scale_type": "channel", "eps": 1e-6, "scale_front": False},
    "came": {"lr": 2e-4, "betas": (0.9, 0.999, 0.9999), "eps": (1e-30, 1e-16), "clip_threshold": 1.0},
    "compact": {"update_proj_gap": 200, "scale": 1.0, "projection": "gaussian", "betas": (0.9, 0.999), "eps": 1e-8},
    "deepzero": {"lr": 0.1, "momentum": 0.9, "mu": 5e-3, "keep": 1.0, "shuffle_every": 100},
    "flora": {"rank": 256, "kappa": 1000, "beta1": 0.9, "decay_rate": -0.8, "eps": (1e-30, 1e-3), "clip_threshold": 1.0},
    "galore": {"update_proj_gap": 200, "scale": 0.25, "proj_type": "std", "basis": "svd", "eps": 1e-6, "rotate": False},
    "lomo": {"lr": 1e-3, **_IN_BACKWARD},
    "mezo": {"lr": 1e-6, "eps": 1e-3, "samples": 1},
    "muon": {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust": "match_rms_adamw", "betas": (0.9, 0.95)},
    "zenflow": {"topk": 0.1, "update_interval": 4, "select_interval": 100, "overlap": True, "betas": (0.9, 0.999)},
}


@pytest.mark.parametrize("name", member_names("optim"))
def test_defaults(name):
    given = inspect.signature(member_class("optim", name).__init__).parameters
    assert {key: given[key].default for key in DEFAULTS[name]} == DEFAULTS[name]
    assert given["weight_decay"].default == (0.01 if name == "zenflow" else 0.0)
