"""Plans for one fixed machine: what is chosen must not depend on how busy the one is that the tests run on."""

import warnings

import pytest

from holdall.testing.stand_ins import planned_for
from holdall.testing.worlds import machine


@pytest.fixture(autouse=True)
def fixed_machine():
    with planned_for(machine(read=5e9, write=5e9)):
        yield


@pytest.fixture(autouse=True, scope="session")
def quiet():
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
