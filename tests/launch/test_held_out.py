"""Runs with several evaluation sets: all that is kept tells sets and categories apart, and the best checkpoint stays."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from common import config as configuration
from common.acceptance import find_best
from common.data.dataset import Dataset
from common.metrics import read_metrics
from launch import evaluate, prepare
from launch.data.writer import DatasetWriter
from launch.decoding.held_out import count_acceptance
from services.drafter.folder.checkpoint import checkpoint_folder, draft_identity, load_weights
from services.drafter.model.model import DraftModel
from tests.builders.launched_runs import CONFIG, ROOT, LaunchedRun
from tests.builders.tiny_chat_model import save_chat_model

SETTINGS: tuple[str, ...] = ("plan.epochs=8", "checkpoint.every_steps=9", "checkpoint.keep=1", "evaluation.every_steps=6")
SETTINGS += ("train.learning_rate=0.02", 'targets.devices=["cpu"]', 'drafters.devices=["cpu"]')
DFLASH2 = ("draft.kind=dflash2", "draft.conv_group_size=8", "draft.selector_rank=8", "draft.selector_top_k=4")
CYCLES = {"up": 1, "down": -1}


def write_set(folder: Path, seed: int, count: int, categories: list[str]) -> str:
    """Cycles of eight ids, upwards or downwards, from a random phase; the first quarter is the prompt."""
    random = np.random.default_rng(seed)
    with DatasetWriter(folder, {}) as writer:
        for number in range(count):
            category = categories[number % len(categories)]
            offsets = np.arange(random.integers(12, 40)) * CYCLES.get(category, 1) + random.integers(8)
            writer.add(offsets % 8 + (8 if category == "down" else 0), np.arange(len(offsets)) >= len(offsets) // 4, category)
    return str(folder)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The tiny configuration with a training set and two evaluation sets, one of them with categories."""
    train = write_set(tmp_path / "train", 0, 48, ["up", "down"])
    mixed, plain = write_set(tmp_path / "mixed", 1, 6, ["up", "down"]), write_set(tmp_path / "plain", 2, 5, [""])
    data = f'[data]\npath = "{train}"\neval_paths = {{ mixed = "{mixed}", plain = "{plain}" }}\n\n'
    text = re.sub(r"\[data\.synthetic\].*?\n\n", data, CONFIG.read_text(), flags=re.DOTALL)
    (tmp_path / "held_out.toml").write_text(text)
    return tmp_path / "held_out.toml"


def evaluations(run: LaunchedRun) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run.directory, "drafter-0") if "acceptance" in line]


def test_sets_and_categories_in_metrics_report_and_summary(config: Path, run: LaunchedRun, tmp_path: Path) -> None:
    assert run.start(*SETTINGS, config=config).end() == 0, run.log_tails()
    measured = evaluations(run)
    assert len(measured) > 3
    for line in measured:
        assert list(line["sets"]) == ["mixed", "plain"]
        assert list(line["sets"]["mixed"]["categories"]) == ["down", "up"] and line["sets"]["plain"]["categories"] == {}
        assert sum(found["num_rounds"] for found in line["sets"].values()) == line["num_rounds"]
        assert len(line["acceptance_per_position"]) == 3
        assert 1 + sum(line["acceptance_per_position"]) == pytest.approx(line["acceptance"])
    last = measured[-1]
    report = json.loads((run.directory / "report.json").read_text())
    assert report["evaluation_last"] == last
    best = max(measured, key=lambda line: line["acceptance"])
    assert report["evaluation_best"] == best
    for name, found in (("mixed/up", last["sets"]["mixed"]["categories"]["up"]), ("plain", last["sets"]["plain"])):
        assert f"  {name:<37}{found['acceptance']:.3f} in {found['num_rounds']:,} rounds\n" in run.stdout
    assert f"best checkpoint                        step {best['step']}: {best['acceptance']:.3f}\n" in run.stdout

    record = find_best(run.directory)
    assert record is not None and record.step == best["step"]
    kept = {path.name for path in (run.directory / "checkpoints").iterdir()}
    assert kept == {f"step-{step:08d}" for step in (best["step"], last["step"])}

    config_of_run = configuration.read(run.directory)
    _, weights = load_weights(checkpoint_folder(run.directory, last["step"]), draft_identity(config_of_run))
    model = DraftModel(config_of_run)
    model.load_state_dict(weights)
    counted = count_acceptance(config_of_run, model, torch.device("cpu"))
    assert msgspec.to_builtins(counted) | {"step": last["step"]} == last  # outside of the run, bit for bit

    two = LaunchedRun(tmp_path / "two").start(*SETTINGS, 'drafters.devices=["cpu", "cpu"]', config=config)
    try:
        assert two.end() == 0, two.log_tails()
    finally:
        two.kill_what_is_left()
    assert evaluations(two) == measured
    assert {path.name for path in (two.directory / "checkpoints").iterdir()} == kept


def test_evaluate_counts_what_the_last_evaluation_did(
    config: Path, run: LaunchedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (*SETTINGS, "plan.epochs=2", "draft.dtype=bfloat16")  # an export holds the very weights of the last step
    assert run.start(*settings, config=config).end() == 0, run.log_tails()
    last = evaluations(run)[-1]
    assert evaluate.main([str(run.directory), "--max-new-tokens", "4"]) == 0
    said = capsys.readouterr().out
    assert f"acceptance length             {last['acceptance']:.3f} in {last['num_rounds']:,} rounds\n" in said
    assert f"  with another prompt's hidden states  {last['acceptance_other_prompt']:.3f}\n" in said
    assert "  mixed/down  " in said
    assert evaluate.main([str(run.directory), "--draft", str(run.directory / "nowhere")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_evaluations_of_dflash2_say_what_the_selector_adds(
    config: Path, run: LaunchedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In metrics, report, summary and `launch.evaluate`, the same on two ranks and outside of the run."""
    settings = (*SETTINGS, "draft.dtype=bfloat16", *DFLASH2)
    assert run.start(*settings, config=config).end() == 0, run.log_tails()
    measured = evaluations(run)
    for line in measured:
        found = line["selector"]
        assert found["acceptance_oracle"] >= max(line["acceptance"], found["acceptance_unary"])
        assert len(found["recall_per_position"]) == 3 and min(found["recall_per_position"]) >= 0
    assert measured[0]["selector"]["acceptance_unary"] == measured[0]["acceptance"]  # fresh, it changes nothing
    assert any(line["selector"]["acceptance_unary"] != line["acceptance"] for line in measured)
    last = measured[-1]
    assert json.loads((run.directory / "report.json").read_text())["evaluation_last"] == last
    shares = " ".join(f"{share:.2f}" for share in last["selector"]["recall_per_position"])
    bounds = "{acceptance_unary:.3f}, {acceptance_oracle:.3f}".format(**last["selector"])
    shown = f"  unary, oracle; recall by position    {bounds}; {shares}\n"
    assert shown in run.stdout
    steps = [line for line in read_metrics(run.directory, "drafter-0") if "loss" in line]
    assert all(line["block_acceptance_oracle"] >= line["block_acceptance"] for line in steps)
    assert any(line["selector_loss"] > 0 for line in steps)

    assert evaluate.main([str(run.directory), "--max-new-tokens", "6", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert f"acceptance length             {last['acceptance']:.3f} in {last['num_rounds']:,} rounds\n" in said
    assert shown in said
    report = json.loads((tmp_path / "out/evaluation.json").read_text())
    assert report["held_out"] | {"step": last["step"]} == last  # bit for bit

    two = LaunchedRun(tmp_path / "two").start(*settings, 'drafters.devices=["cpu", "cpu"]', config=config)
    try:
        assert two.end() == 0, two.log_tails()
    finally:
        two.kill_what_is_left()
    assert evaluations(two) == measured


def test_both_forms_of_evaluation_sets_at_once_are_refused(config: Path, run: LaunchedRun) -> None:
    assert run.start(f"data.eval_path={config.parent}/plain", config=config).end() == 2
    assert run.stderr == ("error: data: needed one of data.eval_path, data.eval_paths and data.synthetic, found 2 of them\n")


def test_prepare_keeps_what_a_row_says_of_its_kind(tmp_path: Path) -> None:
    save_chat_model(tmp_path / "model")
    kinds: list[dict[str, Any]] = [{"category": "maths"}, {"task": "code"}, {"source": "web", "task": ""}, {}, {"category": 7}]
    rows: list[dict[str, Any]] = [
        {**kind, "prompt_ids": [1, 2], "answer_ids": [3, 4 + number]} for number, kind in enumerate(kinds)
    ]
    chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer answer"}]
    rows += [{"messages": chat, "category": "chat"}, {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "category": "\ud800x"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--model", str(tmp_path / "model"), "--input", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "set")]
    assert prepare.main(arguments) == 0
    assert Dataset.open(tmp_path / "set").categories == ["maths", "code", "web", "", "", "chat", "?x"]


def test_status_shows_the_best_checkpoint(config: Path, run: LaunchedRun) -> None:
    run.start(*SETTINGS, "plan.epochs=400", config=config)
    run.wait_until(lambda: find_best(run.directory) is not None)
    command = [sys.executable, "-m", "launch.control", str(run.directory), "status"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert re.search(r"acceptance \d\.\d\d \(best \d\.\d\d at step \d+\)", shown), shown
    found = json.loads(subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout)
    assert found["best_step"] >= 6 and found["best_acceptance"] >= 1.0


def test_rank_0_dies_while_it_saves_the_best(config: Path, run: LaunchedRun, tmp_path: Path) -> None:
    """The measurement is kept by the other rank, and so is the best checkpoint."""
    settings = (*SETTINGS, "plan.epochs=3", "checkpoint.every_steps=100", 'drafters.devices=["cpu", "cpu"]')
    assert run.start(*settings, config=config).end() == 0, run.log_tails()
    disturbed = LaunchedRun(tmp_path / "disturbed")
    disturbed.directory.mkdir(mode=0o700)
    (disturbed.directory / "faults.json").write_text('{"drafter-0": [{"point": "drafter.mid_save"}]}')
    try:
        assert disturbed.start(*settings, config=config).end() == 0, disturbed.log_tails()
    finally:
        disturbed.kill_what_is_left()
    assert disturbed.num_incarnations("drafter-0") == 2
    assert disturbed.losses() == run.losses() and disturbed.weights() == run.weights()
    assert {line["step"]: line for line in evaluations(disturbed)} == {line["step"]: line for line in evaluations(run)}
    assert find_best(disturbed.directory) == find_best(run.directory)
    found = [sorted(path.name for path in (each.directory / "checkpoints").iterdir()) for each in (run, disturbed)]
    assert found[0] == found[1]
