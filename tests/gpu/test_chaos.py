"""Random models under random plans with delays on the GPU's streams and NaN in memory that is not valid: losses as plain."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from holdall.testing.chaos import main


@pytest.mark.parametrize("seed", [0, 1])
def test_draws_train_as_plain_training_does(seed):
    assert main(["--device", "cuda", "--draws", "100", "--seconds", "240", "--seed", str(seed)]) == 0


def test_recurrent_layers_compute_with_the_weights_of_the_last_step():
    """cuDNN's `flatten_parameters` must not move streamed weights out of the memory that they are fetched into."""
    assert main(["--device", "cuda", "--only", "0/56"]) == 0
    assert main(["--device", "cuda", "--families", "recurrent", "--draws", "10"]) == 0
