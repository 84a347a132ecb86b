"""Set before cuBLAS is first used: tests that ask for deterministic algorithms are refused otherwise."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
