"""Every planner in the folder keeps the contract."""

from holdall.registry import member_class, member_names
from holdall.testing.contracts import PlannerContract

for _name in member_names("planners"):
    _class = member_class("planners", _name)
    globals()[f"Test{_class.__name__}"] = type(f"Test{_class.__name__}", (PlannerContract,), {"planner": _class})
del PlannerContract  # the contract itself has no planner
