"""One thread: tests compare bits, not seconds, and small kernels only lose time by sharing cores."""

import torch

torch.set_num_threads(1)
