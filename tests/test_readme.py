"""All code of the README runs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.S)
SHELL = [
    line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.S) for line in block.splitlines() if line.startswith("holdall ")
]


@pytest.mark.parametrize("code", PYTHON)
def test_python_blocks_run(code, capsys):
    exec(compile(code, "README.md", "exec"), {})
    assert "peak CPU" in capsys.readouterr().out


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
