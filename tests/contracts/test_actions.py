"""Every action in the folder keeps the contract."""

from holdall.registry import member_class, member_names
from holdall.testing.contracts import ActionContract

_classes = [member_class("actions", name) for name in member_names("actions")]
for _class in _classes:
    globals()[f"Test{_class.__name__}"] = type(
        f"Test{_class.__name__}", (ActionContract,), {"action": _class, "others": tuple(_classes)}
    )
del ActionContract  # the contract itself has no action
