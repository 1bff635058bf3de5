"""The checkout's own virtual environment: made once, mended when broken, updated when a requirement file changes."""

import shutil
import subprocess
from pathlib import Path

import pytest

from launch import bootstrap


def test_an_environment_is_made_kept_mended_and_never_half_stamped(tmp_path: Path) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("# nothing\n")
    stamp = tmp_path / ".venv" / "requirements.txt.sha256"

    python = bootstrap.ensure(tmp_path, [requirements], [])
    assert python == tmp_path / ".venv" / "bin" / "python"
    prefix = subprocess.run([python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True)
    assert prefix.stdout.strip() == str(tmp_path / ".venv")

    shutil.rmtree(next((tmp_path / ".venv" / "lib").glob("python*/site-packages/pip")))
    first = stamp.read_text()
    bootstrap.ensure(tmp_path, [requirements], [])  # unchanged: pip is not needed
    requirements.write_text("# nothing else\n")
    bootstrap.ensure(tmp_path, [requirements], [])  # changed: the environment without pip is replaced
    assert stamp.read_text() != first

    absent = tmp_path / "absent.txt"
    absent.write_text("./no-such-package\n")
    with pytest.raises(SystemExit, match=r"failed with exit code 1: .*absent\.txt"):
        bootstrap.ensure(tmp_path, [requirements], [absent])
    assert not (tmp_path / ".venv" / "absent.txt.sha256").exists()
    assert stamp.exists()


def test_an_older_python_gets_one_line_that_names_what_is_needed() -> None:
    program = "import sys; sys.version_info = (3, 10, 13); import launch.demo"
    done = subprocess.run(["python3", "-c", program], cwd=bootstrap.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("headrace needs Python 3.11 or newer, found ")
    assert done.stderr.count("\n") == 1
