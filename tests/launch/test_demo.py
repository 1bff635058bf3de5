"""The demo's stages: shown, skipped when done, stopped at the first failure, interrupted once."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch import bootstrap, demo

PYTHON = Path(sys.executable)


def copying(source: Path, result: Path) -> demo.Stage:
    """A stage of the standard library that reads one JSON file and writes another."""
    return demo.Stage("json.tool", ["--compact", str(source), str(result)], (result,))


def test_a_finished_stage_is_kept_until_it_changes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, result, marks = tmp_path / "in.json", tmp_path / "out.json", tmp_path / "marks"
    source.write_text("[1]")
    assert demo.run([copying(source, result)], PYTHON, marks) == 0
    assert f"-m json.tool --compact {source} {result}" in capfd.readouterr().out

    source.write_text("[2]")
    assert demo.run([copying(source, result)], PYTHON, marks) == 0
    assert result.read_text().strip() == "[1]"
    assert f"kept: {result}" in capfd.readouterr().out

    sorting = demo.Stage("json.tool", ["--sort-keys", *copying(source, result).arguments], (result,))
    assert demo.run([sorting], PYTHON, marks) == 0
    assert result.read_text().strip() == "[2]"

    source.write_text("[3]")
    result.unlink()
    assert demo.run([sorting], PYTHON, marks) == 0
    assert result.read_text().strip() == "[3]"


def test_what_follows_a_remade_stage_is_remade(tmp_path: Path) -> None:
    source, middle, last, marks = (tmp_path / name for name in ("in.json", "middle.json", "last.json", "marks"))
    second = demo.Stage("tokenize", [str(middle)], (last,))
    stages = [copying(source, middle), second]
    source.write_text("[1]")
    assert demo.run(stages, PYTHON, marks) == 0
    last.touch()
    middle.unlink()
    assert demo.run(stages, PYTHON, marks) == 0
    assert not last.exists()  # removed before its stage ran again


def test_the_first_failure_ends_the_demo_with_its_exit_code(tmp_path: Path) -> None:
    source, result, marks = tmp_path / "in.json", tmp_path / "out.json", tmp_path / "marks"
    source.write_text("[1]")
    failing = demo.Stage("json.tool", ["--no-such-option"])
    assert demo.run([failing, copying(source, result)], PYTHON, marks) == 2
    assert not result.exists()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_signal_is_passed_on_and_the_exit_code_is_the_stages(tmp_path: Path, signum: signal.Signals, code: int) -> None:
    statement = "import time; print('waiting', flush=True); time.sleep(100)"
    program = f"""
import sys
from pathlib import Path
from launch import demo
stages = [demo.Stage("timeit", ["-n1", "-r1", {statement!r}])]
sys.exit(demo.run(stages, Path(sys.executable), Path({str(tmp_path)!r})))
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=bootstrap.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        assert any(line == "waiting\n" for line in process.stdout)
        process.send_signal(signum)
        rest = process.stdout.read()
    assert process.returncode == code, rest
    assert "exit code" in rest


def test_the_plan_ends_with_a_run_and_its_sample(tmp_path: Path) -> None:
    stages = demo.plan(tmp_path, tmp_path / "run")
    modules = [stage.module for stage in stages]
    assert modules == ["launch.smollm2", "launch.regenerate", "launch.prepare", "launch.start_all", "launch.evaluate"]
    assert [bool(stage.results) for stage in stages] == [True, True, True, False, False]
