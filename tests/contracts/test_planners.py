"""Every planner in the folder keeps the contract."""

from holdall.registry import member_class, member_names
from holdall.testing.contracts import PlannerContract

_SOLVERS = ("checkmate", "rockmate", "str")  # seconds for every graph: shorter chains
for _name in member_names("planners"):
    _class = member_class("planners", _name)
    _more = {"sizes": [[50] * 3, [10, 80, 20]]} if _name in _SOLVERS else {}
    globals()[f"Test{_class.__name__}"] = type(f"Test{_class.__name__}", (PlannerContract,), {"planner": _class, **_more})
del PlannerContract  # the contract itself has no planner
