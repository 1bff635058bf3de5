"""The demo, whole: a real model, real slots, and a drafter that has learned from the hidden states it was sent."""

import sys
from pathlib import Path

import pytest

from launch import demo
from launch.summary import read_series


@pytest.mark.real_model
@pytest.mark.timeout(1500)
def test_the_demo_trains_a_drafter_that_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where ~/.cache/headrace is
    run_dir = tmp_path / "run"
    stages = demo.plan(tmp_path / ".cache" / "headrace", run_dir)
    assert demo.run(stages, Path(sys.executable), tmp_path / "marks") == 0, capfd.readouterr()
    _, evaluations = read_series(run_dir, num_drafters=2)
    untrained, trained = evaluations[min(evaluations)], evaluations[max(evaluations)]
    assert untrained["acceptance"] <= 1.05
    assert trained["acceptance"] >= 1.2
    assert trained["acceptance"] - trained["acceptance_other_prompt"] >= 0.15
    assert "same tokens        yes" in capfd.readouterr().out  # launch.evaluate: real decoding equals plain greedy decoding
    assert (run_dir / "export" / "model.safetensors").exists()
