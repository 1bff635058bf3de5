"""Samples of nvidia-smi, read from a program of that name, and none without it."""

import time
from pathlib import Path

import pytest

from launch.bench.harness.gpu_monitor import GpuMonitor, GpuSample, parse


def test_lines_of_every_gpu_arrive_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nwhile true; do printf '0, 50, 1000\\n1, [N/A], 7\\n1, 100, 2000\\n'; sleep 0.02; done\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    began = time.time()
    with GpuMonitor() as monitor:
        while len(monitor.samples) < 6:
            time.sleep(0.01)
    seen = monitor.between(began, time.time())
    assert {gpu: {(sample.busy, sample.memory_mib) for sample in samples} for gpu, samples in seen.items()} == {
        0: {(0.5, 1000.0)},
        1: {(1.0, 2000.0)},
    }
    assert monitor.between(0.0, began) == {}


def test_a_machine_without_it_has_no_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with GpuMonitor() as monitor:
        assert monitor.samples == []


def test_only_whole_lines_count() -> None:
    assert parse("3, 7, 42\n", 1.5) == GpuSample(1.5, 3, 0.07, 42.0)
    assert parse("3, 7", 1.5) is None
