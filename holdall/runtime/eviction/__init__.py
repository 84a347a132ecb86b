"""Eviction at run time: device memory as a cache of storages that can be computed again (DTR, MegTaiChi, Coop).

`storages`, `scores`, `arena`, `pool` decide and know nothing of torch; `replay` drives them over a written-down step;
`handle`, `outlook`, `evictor` drive the same pool over a running one.
"""
