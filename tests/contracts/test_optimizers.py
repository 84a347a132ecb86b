"""Every optimizer in the folder keeps the contract."""

from holdall.registry import member_class, member_names
from holdall.testing.optimizers import OptimizerContract

_OPTIONS = {
    "adafactor": [{}, {"beta1": 0.9}, {"relative_step": False}, {"variant": "torch"}],
    "adam_mini": [{}, {"block": "element"}, {"block": "tensor"}, {"block": 4}, {"block": "column"}],
    "apollo": [{"rank": 4, "update_proj_gap": 3}, {"rank": 1, "scale_type": "tensor", "scale": 16.0}, {}],
    "compact": [{"rank": 4, "update_proj_gap": 3}, {}],
    "flora": [{"rank": 4, "kappa": 3}, {"rank": 100}],
    "muon": [{"orthogonalise": True}, {"orthogonalise": True, "adjust": "original", "nesterov": False}, {}],
    "galore": [
        {"rank": 4, "update_proj_gap": 3},
        {"rank": 4, "update_proj_gap": 2, "proj_type": "full", "projector_bits": 4, "lazy": True},
        {"rank": 4, "update_proj_gap": 3, "basis": "iteration", "rotate": True, "proj_type": "reverse_std"},
        {},
    ],
}
_COMMON = {"mezo": {"lr": 0.05}, "deepzero": {"lr": 0.05}}  # their own rates are for thousands of steps
_COMMON["muon"] = {"orthogonalise": False}  # what a group of vectors must say
_LARGE = [(48, 104), (104, 48), (20,)]  # enough for moments of 8 bits
_CODED = {  # members once more, with what only large matrices have
    "adam8bit": {"shapes": _LARGE, "options": [{}], "most": 8},
    "flora": {"shapes": _LARGE, "options": [{"rank": 40, "bits": 8, "kappa": 3}], "most": 8},
    "galore": {
        "shapes": _LARGE,
        "options": [{"rank": 40, "bits": 8, "update_proj_gap": 3}, {"rank": 40, "bits": 8, "projector_bits": 4, "lazy": True}],
        "most": 8,
    },
}
for _name in member_names("optim"):
    _class = member_class("optim", _name)
    _about = {"optimizer": _class, "options": _OPTIONS.get(_name, [{}]), "common": _COMMON.get(_name, {})}
    if _name == "zenflow":
        _about["decaying"] = [{"topk": 1.0}, {"update_interval": 1, "overlap": False}]  # the others decay when they are updated
    if getattr(_class, "forward_only", False):
        _about["shapes"] = [(3, 4), (4,)]  # a loss for every coordinate is dear
    globals()[f"Test{_class.__name__}"] = type(f"Test{_class.__name__}", (OptimizerContract,), _about)
    if _name in _CODED:
        _title = f"Test{_class.__name__}Coded"
        globals()[_title] = type(_title, (OptimizerContract,), {"optimizer": _class, **_CODED[_name]})
del OptimizerContract  # the contract itself has no optimizer
