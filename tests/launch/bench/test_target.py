"""The measurement of the target's half, on a CPU and the tiny shape."""

import re
import time
from typing import Any

import pytest
import torch

from launch.bench import target
from launch.bench.shapes import random_run
from launch.decoding.full_target import load_full_target
from services.target.model import TargetModel

CPU = torch.device("cpu")


def test_the_table_has_every_rate(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shape", "tiny", "--rows", "2", "--length", "16", "--steps", "2", "--repetitions", "1", "--plain"]
    assert target.main(arguments) == 0
    rates = dict(re.findall(r"^tokens/s, (.*?)  +(\d+)$", capsys.readouterr().out, re.MULTILINE))
    assert list(rates) == [
        "plain transformers",
        "plain transformers without logits",
        "published",
        "the same forward alone",
    ]
    assert all(int(rate) > 0 for rate in rates.values())


def test_a_split_target_is_measured_beside_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shape", "tiny", "--rows", "2", "--length", "16", "--steps", "2", "--repetitions", "1"]
    assert target.main([*arguments, "--devices", "cpu+cpu"]) == 0
    table = capsys.readouterr().out
    assert re.search(r"^published over one device +\d+\.\d{3}$", table, re.MULTILINE)
    assert re.search(r"^taps equal to those of one device +yes$", table, re.MULTILINE)


def test_the_plain_model_is_the_target_with_all_its_layers() -> None:
    config = random_run("tiny", 16)
    input_ids = torch.arange(2 * 16).view(2, 16) % config.shape.vocab_size
    taps = TargetModel.load(config, CPU).forward(input_ids)
    plain: Any = load_full_target(config, CPU)
    with torch.inference_mode():
        hidden_states = plain(input_ids=input_ids, output_hidden_states=True, use_cache=False).hidden_states
    assert len(hidden_states) == config.shape.num_hidden_layers + 1
    for layer, tap in zip(config.draft.tap_layers, taps, strict=True):
        assert torch.equal(hidden_states[layer + 1], tap)


def test_a_batch_that_finds_the_device_idle_is_not_timed() -> None:
    durations_s = iter([0.5, 0.01, 0.02, 0.03])
    periods_s = target.measure_periods_s(lambda: time.sleep(next(durations_s)), 3, CPU)
    assert len(periods_s) == 3
    assert max(periods_s) < 0.5
