"""Make the virtual environment of the checkout with nothing but Python's standard library.

    python3 -m launch.bootstrap docker/requirements-cpu.txt --no-deps docker/requirements-demo.txt

installs the requirement files that changed into `.venv` and prints the path of its Python. Exit code 1: the message of
the failed command stands before.
"""

from __future__ import annotations  # an older Python must get as far as the message below

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("headrace needs Python 3.11 or newer, found " + sys.version.split()[0] + " at " + sys.executable)

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def ensure(root: Path, requirements: list[Path], no_deps: list[Path]) -> Path:
    """Return the Python of `root`/.venv after installing the requirement files that it does not hold yet.

    A broken or half-made environment is replaced. The files of `no_deps` are installed without dependencies.

    Raises:
        SystemExit: the environment could not be made or pip failed; their own messages were shown.
    """
    venv = root / ".venv"
    python = venv / "bin" / "python"
    with _locked(root):
        missing = [file for file in requirements + no_deps if not _is_installed(venv, file)]
        if missing and not _works(python):
            _make(venv)
            missing = requirements + no_deps
        for file in missing:
            _install(python, file, no_deps=file in no_deps)
            _stamp(venv, file).write_text(_digest(file))  # last: an interrupted installation starts again
    return python


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Let one process install at a time; the lock is on the folder itself and ends with the process."""
    folder = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _stamp(venv: Path, file: Path) -> Path:
    return venv / f"{file.name}.sha256"


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _is_installed(venv: Path, file: Path) -> bool:
    stamp = _stamp(venv, file)
    return (venv / "bin" / "python").exists() and stamp.exists() and stamp.read_text() == _digest(file)


def _works(python: Path) -> bool:
    if not python.exists():
        return False
    return subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0


def _make(venv: Path) -> None:
    print(f"making {venv}", file=sys.stderr, flush=True)
    shutil.rmtree(venv, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(venv)])


def _install(python: Path, file: Path, *, no_deps: bool) -> None:
    print(f"installing {file.name}", file=sys.stderr, flush=True)
    options = ["--quiet", "--quiet", "--no-input", "--disable-pip-version-check"]  # twice: errors only
    if no_deps:
        options.append("--no-deps")
    _run([str(python), "-m", "pip", "install", *options, "--requirement", str(file)])


def _run(command: list[str]) -> None:
    code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False).returncode
    if code != 0:
        sys.exit(f"failed with exit code {code}: {' '.join(command)}")


def main() -> None:
    """Install from the command line."""
    parser = argparse.ArgumentParser(prog="python3 -m launch.bootstrap", description="Makes or updates .venv.")
    parser.add_argument("requirements", nargs="*", type=Path, help="requirement files")
    parser.add_argument("--no-deps", nargs="*", type=Path, default=[], help="requirement files installed without dependencies")
    arguments = parser.parse_args()
    print(ensure(ROOT, arguments.requirements, arguments.no_deps))


if __name__ == "__main__":
    main()
