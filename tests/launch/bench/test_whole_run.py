"""The measurements of whole runs, on CPUs and the tiny shape: real processes, every row of the tables."""

import argparse
import re
import threading
from pathlib import Path

import pytest

from launch.bench import scaling, threads
from launch.bench.harness.workload import SHAPES
from tests.builders.launched_runs import ROOT
from tests.builders.warm_start import WarmProcess


def read_table(text: str) -> dict[str, str]:
    return dict(re.findall(r"^(\S.*?)  +(\S.*)$", text, re.MULTILINE))


def bench(folder: Path, *words: str) -> tuple[int, str]:
    """Run `python -m launch.bench` with all its processes warm; return its exit code and all that it printed."""
    output = folder / "output"
    process = WarmProcess(list(words), ROOT, output, output, module="launch.bench")
    return process.wait(), output.read_text()


def test_a_run_is_measured_disturbed_and_each_side_alone(tmp_path: Path) -> None:
    arguments = ["--shape", "tiny", "--targets", "cpu", "--drafters", "cpu", "--samples", "1024", "--alone-s", "0.5"]
    code, text = bench(tmp_path, "river", *arguments, "--minutes", "0.05", "--kills", "exchange", "--steps", "40")
    assert code == 0, text
    table = read_table(text)
    rates = [int(value.split()[0]) for name, value in table.items() if name.startswith("tokens/s")]
    assert len(rates) == 3
    assert min(rates) > 0
    reached = [float(value) for name, value in table.items() if name.startswith("end to end over")]
    assert reached[2] == max(reached[:2])
    assert float(table["exchange killed: back at work after"].removesuffix(" s")) > 0
    steps = re.fullmatch(r"yes: (\d+) steps, 0 times back", table["every step once, in order"])
    assert steps is not None
    assert int(steps[1]) >= 40
    assert (table["steps that were not finite"], table["batches that arrived damaged"], table["restarts"]) == ("0", "0", "1")


def test_two_drafters_train_as_one_does_also_when_one_dies(tmp_path: Path) -> None:
    code, text = bench(tmp_path, "scaling", "--shape", "tiny", "--devices", "cpu", "cpu", "--samples", "256", "--kill")
    assert code == 0, text
    table = read_table(text)
    assert float(table["scaling (wanted 1.9), median over equal steps"]) > 0
    assert 0 < float(table["weights of one and two, relative difference"]) < 1e-3
    assert float(table["weights, killed against undisturbed, relative difference"]) == 0.0
    assert table["every step once, in order"] == "yes"


@pytest.mark.parametrize("shape", SHAPES)
def test_two_drafters_of_every_shape_need_no_target(shape: str, tmp_path: Path) -> None:
    options = argparse.Namespace(shape=shape, samples=16, overrides=[])
    config = scaling.make_workload(tmp_path, options, ["cuda:0", "cuda:1"]).config
    assert (config.targets.devices, config.targets.compile, config.num_drafters) == (["cpu"], False, 2)


def test_a_run_that_is_too_short_to_measure_is_an_error(tmp_path: Path) -> None:
    code, text = bench(tmp_path, "scaling", "--shape", "tiny", "--devices", "cpu", "cpu", "--samples", "32")
    assert code == 1 and "RuntimeError: --samples, --steps: needed a run of more than 5 steps, found 2" in text


def test_the_same_pipeline_in_one_process_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert threads.main(["--shape", "tiny", "--devices", "cpu", "cpu", "--samples", "128", "--seconds", "0.5"]) == 0
    table = read_table(capsys.readouterr().out)
    assert [name.partition(":")[0] for name in table] == ["target", "drafter"]
    rates = [float(value.partition(",")[0]) for value in table.values()]
    assert min(rates) > 0
    assert not any(thread.name.startswith("pipeline") for thread in threading.enumerate())
