"""Where the tensors of a step lie: static layouts, which know every lifetime, and allocators, which decide as they go.

A file is a member, found by its name. `tests/contracts/test_layouts.py` checks them all.
"""
