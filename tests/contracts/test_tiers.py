"""Every tier in the folder keeps the contract, on the device it is for."""

import pytest
import torch

from holdall.registry import member_class, member_names
from holdall.testing.contracts import TierContract


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDALL_NVME", str(tmp_path))


_DEVICES = {"cpu": "cuda"}  # the host's memory serves a GPU; the others are tried on the CPU
for _name in member_names("tiers"):
    _device = _DEVICES.get(_name, "cpu")
    if _device == "cpu" or torch.cuda.is_available():
        _class = member_class("tiers", _name)
        globals()[f"Test{_class.__name__}"] = type(
            f"Test{_class.__name__}", (TierContract,), {"tier": _class, "device": _device, "keeps": _name != "null"}
        )
del TierContract  # the contract itself has no tier
