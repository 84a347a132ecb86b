"""Online eviction: device memory as a cache of storages that can be recomputed (DTR, MegTaiChi, Coop).

`storages`, `scores`, `arena` and `pool` decide, without torch; `replay` drives them over a recorded step; `handle`, `outlook`
and `evictor` drive the same pool over a running one.
"""
