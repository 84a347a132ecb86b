"""Plans for one fixed machine: what is chosen must not depend on how busy the one is that the tests run on."""

import warnings

import pytest

from holdall.testing.worlds import machine


@pytest.fixture(autouse=True)
def fixed_machine(monkeypatch):
    monkeypatch.setattr("holdall.problem._probed", lambda device: machine(read=5e9, write=5e9))


@pytest.fixture(autouse=True, scope="session")
def quiet():
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
