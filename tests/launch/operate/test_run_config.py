"""The resolved configuration, and input that is refused in one line before a process starts."""

import json
import re
from pathlib import Path

import pytest
import torch

from common import config as configuration
from launch import prepare
from launch.data.vocabulary import fingerprint_vocabulary
from launch.data.writer import DatasetWriter
from launch.operate.run_config import read_gpus, resolve
from tests.builders.launched_runs import CONFIG, LaunchedRun
from tests.builders.saved_sets import Row, save_set
from tests.builders.tiny_chat_model import END, START, make_tokenizer, save_chat_model
from tests.launch.test_bad_input import refuse

GOOD: list[Row] = [([2, 3, row, 5, 6, 7, 8, 9], [0, 0, 0, 1, 1, 1, 1, 1]) for row in range(20)]
SILENT: list[Row] = [(ids, [0] * len(ids)) for ids, _ in GOOD]


def with_token(row: int, token: int) -> list[Row]:
    rows = [(list(ids), mask) for ids, mask in GOOD]
    rows[row][0][4] = token
    return [*rows]


def start(run: LaunchedRun, *overrides: str) -> LaunchedRun:
    """The tiny configuration without its made-up data."""
    config = run.directory.with_name("given.toml")
    config.write_text(re.sub(r"\[data\.synthetic\].*?\n\n", "", CONFIG.read_text(), flags=re.DOTALL))
    return run.start(*overrides, config=config, flags=("--dry-run",))


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (with_token(15, 75), "needed ids below 64, found 75 in sample 15"),
        (with_token(19, 64), "needed ids below 64, found 64 in sample 19"),
        (SILENT, "needed a supervised token, found none"),
    ],
)
def test_a_saved_set_that_does_not_fit_is_refused(run: LaunchedRun, tmp_path: Path, rows: list[Row], found: str) -> None:
    good, wrong = save_set(tmp_path / "good", GOOD), save_set(tmp_path / "wrong", rows)
    refuse(start(run, f"data.path={wrong}"), 2, f"error: data.path: {found}\n")
    refuse(start(run, f"data.path={good}", f"data.eval_path={wrong}"), 2, f"error: data.eval_path: {found}\n")
    named = f'data.eval_paths={{"a" = "{good}", "b" = "{wrong}"}}'
    refuse(start(run, f"data.path={good}", named), 2, f"error: data.eval_paths.b: {found}\n")
    assert start(run, f"data.path={good}", f"data.eval_path={good}").end() == 0
    assert not run.directory.exists()


def test_negative_ids_are_refused(run: LaunchedRun, tmp_path: Path) -> None:
    wrong = save_set(tmp_path / "wrong", with_token(3, -100))
    refuse(start(run, f"data.path={wrong}"), 2, "error: data.path: needed ids from 0, found -100 in sample 3\n")


@pytest.mark.parametrize("mask", [0, 1])
def test_a_prepared_set_without_a_supervised_token_is_refused(run: LaunchedRun, tmp_path: Path, mask: int) -> None:
    with DatasetWriter(tmp_path / "set", {}) as writer:
        writer.add([2, 3, 4], [0, 0, mask])
    if mask:
        assert start(run, f"data.path={tmp_path}/set").end() == 0
    else:
        refuse(start(run, f"data.path={tmp_path}/set"), 2, "error: data.path: needed a supervised token, found none\n")


def test_data_of_another_tokenizer_are_refused_with_both_names(run: LaunchedRun, tmp_path: Path) -> None:
    """The ids of both are below the vocabulary size: nothing else would tell."""
    for name in ("prepared", "other"):
        save_chat_model(tmp_path / name)
    make_tokenizer(special_tokens=(END, START)).save_pretrained(tmp_path / "other")
    (tmp_path / "chat.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]}) + "\n"
    )
    arguments = ["--model", tmp_path / "prepared", "--input", tmp_path / "chat.jsonl", "--out", tmp_path / "set"]
    assert prepare.main([*map(str, arguments), "--workers", "1"]) == 0
    data = f"data.path={tmp_path}/set"
    found = f"needed samples of the tokenizer of {tmp_path}/other, found those of {tmp_path}/prepared"
    refuse(start(run, data, f"model.path={tmp_path}/other"), 2, f"error: data.path: {found}\n")
    assert start(run, data, f"model.path={tmp_path}/prepared").end() == 0, run.stderr


def test_a_vocabulary_is_its_tokens_and_ids_in_any_layout_of_the_file(tmp_path: Path) -> None:
    def fingerprint(**content: object) -> str:
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        return fingerprint_vocabulary(tmp_path)

    added = [{"content": "<end>", "id": 2}]
    known = fingerprint(model={"vocab": {"a": 0, "b": 1}}, added_tokens=added)
    assert known == fingerprint(added_tokens=added, model={"vocab": {"b": 1, "a": 0}, "merges": []})
    assert known == fingerprint(model={"vocab": [["a", -1.5], ["b", -2.0]]}, added_tokens=added)
    assert known != fingerprint(model={"vocab": {"a": 1, "b": 0}}, added_tokens=added)
    assert known != fingerprint(model={"vocab": {"a": 0, "b": 1}})
    assert fingerprint(model={}) == fingerprint_vocabulary(tmp_path / "nowhere") == ""


def test_paths_are_absolute_and_made_up_data_lie_in_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = resolve(configuration.load(CONFIG, []), tmp_path)
    assert made_up.model.path == str(Path.cwd() / "launch/configs/tiny_target")
    assert (made_up.data.path, made_up.data.eval_path) == (str(tmp_path / "data/train"), str(tmp_path / "data/eval"))
    assert resolve(made_up, tmp_path) == made_up
    monkeypatch.setenv("HOME", str(tmp_path))
    config = tmp_path / "given.toml"
    config.write_text(re.sub(r"\[data\.synthetic\].*?\n\n", "", CONFIG.read_text(), flags=re.DOTALL))
    data = resolve(configuration.load(config, ["data.path=~/train", 'data.eval_paths={a = "held"}']), tmp_path).data
    assert (data.path, data.eval_path, data.eval_paths) == (f"{tmp_path}/train", "", {"a": str(Path.cwd() / "held")})


def test_a_hidden_gpu_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert read_gpus() == []


@pytest.mark.gpu
def test_gpus_are_those_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_gpus() == [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "99")
    assert read_gpus() == []
