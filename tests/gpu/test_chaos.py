"""Random models under random plans with delays on the GPU's streams and NaN in memory that is not valid: losses as plain."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from holdall.testing.chaos import main


@pytest.mark.parametrize("seed", [0, 1])
def test_draws_train_as_plain_training_does(seed):
    assert main(["--device", "cuda", "--draws", "100", "--seconds", "240", "--seed", str(seed)]) == 0
