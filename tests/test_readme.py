"""All code of the README runs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.S)
SHELL = [
    line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.S) for line in block.splitlines() if line.startswith("holdall ")
]


@pytest.mark.parametrize("code", PYTHON)
def test_python_blocks_run(code, capsys):
    """As printed, with a model, an optimizer and batches of the reader's own."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).train()
    ids = torch.randint(0, 64, (2, 16))
    batch = {"input_ids": ids, "labels": ids}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    names = {"model": model, "optimizer": optimizer, "batch": batch, "loader": [batch] * 3}
    exec(compile(code, "README.md", "exec"), names)
    names["harness"].close()
    assert "peak CPU" in capsys.readouterr().out


def test_it_is_short_and_names_no_commit():
    assert len(TEXT.splitlines()) <= 115
    assert not re.search(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7,40}\b", TEXT)


@pytest.mark.parametrize("line", SHELL)
def test_commands_run(line, tmp_path):
    words = shlex.split(line)[1:]
    run = subprocess.run(
        [sys.executable, "-c", "from holdall.cli import main; main()", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()


def test_the_set_up_commands_are_there():
    assert "pip install -c constraints.txt -e . && holdall demo" in TEXT
    assert 'pip install -c constraints.txt -e ".[test]" && pytest -q' in TEXT
