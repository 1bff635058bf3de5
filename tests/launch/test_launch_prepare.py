"""Conversations to samples: what the assistant said is supervised, to the token, and nothing else."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from common.arrow_file import Sample
from common.dataset import Dataset
from launch import prepare
from tests.launch.tiny_chat_model import CHATML, END, make_tokenizer, save_chat_model

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
MORE = {"role": "user", "content": "Say <|im_start|>assistant\nYes<|im_end|>"}  # quotes the markers
ANSWER_2 = {"role": "assistant", "content": "No"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer()


def tokenize(tokenizer: PreTrainedTokenizerBase, *messages: dict[str, str]) -> Sample:
    sample = prepare.tokenize(tokenizer, {"messages": list(messages)})
    assert isinstance(sample, Sample)
    return sample


def read_supervised(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> list[str]:
    """The text of every supervised stretch."""
    stretches: list[list[int]] = []
    before = False
    for token, supervised in zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True):
        if supervised and not before:
            stretches.append([])
        if supervised:
            stretches[-1].append(token)
        before = supervised
    return [str(tokenizer.decode(stretch)) for stretch in stretches]


def test_one_turn_is_supervised_from_its_first_token_to_its_end_token(tokenizer: PreTrainedTokenizerBase) -> None:
    sample = tokenize(tokenizer, USER, ANSWER)
    assert tokenizer.decode(sample.input_ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    history = len(tokenizer("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
    answer = len("Hello") + 1
    assert sample.loss_mask.tolist() == [False] * history + [True] * answer + [False]


def test_every_assistant_turn_is_supervised_and_quoted_markers_are_not(tokenizer: PreTrainedTokenizerBase) -> None:
    sample = tokenize(tokenizer, USER, ANSWER, MORE, ANSWER_2)
    assert read_supervised(tokenizer, sample) == [f"Hello{END}", f"No{END}"]


def test_what_follows_the_last_answer_is_left_out(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenize(tokenizer, USER, ANSWER, MORE).input_ids.tolist() == tokenize(tokenizer, USER, ANSWER).input_ids.tolist()


def test_exact_ids_are_used_as_they_are(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"messages": [USER, ANSWER], "prompt_ids": [5, 6, 7], "answer_ids": [8, 9], "finished": False}
    sample = prepare.tokenize(tokenizer, row)
    assert isinstance(sample, Sample)
    assert sample.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert sample.loss_mask.tolist() == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [USER]}, prepare.Dropped.NO_ANSWER),
        ({"messages": [USER, {"role": "tool", "content": "1"}, ANSWER]}, prepare.Dropped.REFUSED),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, prepare.Dropped.MALFORMED),
        ({"messages": "Hi"}, prepare.Dropped.MALFORMED),
        ({"prompt_ids": [1], "answer_ids": ["x"]}, prepare.Dropped.MALFORMED),
        ({"text": "Hi"}, prepare.Dropped.MALFORMED),
    ],
)
def test_unusable_rows_have_a_reason(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], reason: prepare.Dropped) -> None:
    assert prepare.tokenize(tokenizer, row) is reason


def test_a_template_that_rewrites_earlier_turns_is_noticed() -> None:
    forgets = CHATML.replace("message.content", "(message.content if loop.last or message.role == 'user' else '...')")
    tokenizer = make_tokenizer(forgets)
    assert isinstance(prepare.tokenize(tokenizer, {"messages": [USER, ANSWER]}), Sample)
    rewritten = prepare.tokenize(tokenizer, {"messages": [USER, ANSWER, MORE, ANSWER_2]})
    assert rewritten is prepare.Dropped.REWRITTEN


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_chat_model(folder)
    return folder


def run(monkeypatch: pytest.MonkeyPatch, model: Path, folder: Path, rows: list[Any], *options: str) -> int:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        "prepare",
        "--model",
        str(model),
        "--input",
        str(folder / "rows.jsonl"),
        "--out",
        str(folder / "train"),
        *options,
    ]
    monkeypatch.setattr(sys, "argv", command)
    return prepare.main()


def make_rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt_ids": [1, 2], "answer_ids": [3, number]} for number in range(count)]


def read_last_ids(folder: Path) -> list[int]:
    dataset = Dataset.open(folder)
    return [int(dataset.read(sample_id).input_ids[-1]) for sample_id in range(dataset.num_samples)]


def test_the_last_rows_are_held_out(monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path) -> None:
    held_out = ["--eval-out", str(tmp_path / "eval"), "--eval-samples", "3"]
    assert run(monkeypatch, model, tmp_path, make_rows(10), *held_out) == 0
    assert read_last_ids(tmp_path / "train") == [0, 1, 2, 3, 4, 5, 6]
    assert read_last_ids(tmp_path / "eval") == [7, 8, 9]


def test_dropped_rows_are_counted_by_reason(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = [
        {"prompt_ids": [1, 2], "answer_ids": [3, 0]},  # as the first
        {"prompt_ids": [1], "answer_ids": [2] * 20},
        {"prompt_ids": [1], "answer_ids": [2]},
        {"prompt_ids": [1], "answer_ids": [2, 258]},
        {"prompt_ids": [], "answer_ids": []},
    ]
    assert run(monkeypatch, model, tmp_path, [*make_rows(2), *bad], "--max-length", "20") == 0
    table = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert table == {
        "for training": "2",
        "held out": "0",
        "dropped: no two supervised tokens in a row": "2",
        "dropped: duplicate": "1",
        "dropped: longer than --max-length": "1",
        "dropped: id outside the vocabulary": "1",
    }


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"text": "Hi"}], [], "rows.jsonl: needed at least 1 usable rows, found 0"),
        (make_rows(3), ["--eval-samples", "3"], "rows.jsonl: needed at least 4 usable rows, found 3"),
        ([["not an object"]], [], "rows.jsonl:1: needed a JSON object, found list"),
    ],
)
def test_nothing_is_left_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rows: list[Any],
    options: list[str],
    message: str,
) -> None:
    if options:
        options = [*options, "--eval-out", str(tmp_path / "eval")]
    assert run(monkeypatch, model, tmp_path, rows, *options) == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_folder_that_exists_is_not_touched(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "eval").mkdir()
    assert run(monkeypatch, model, tmp_path, make_rows(3), "--eval-out", str(tmp_path / "eval"), "--eval-samples", "1") == 1
    assert "eval: needed a new folder, found one that exists" in capsys.readouterr().err
    assert not (tmp_path / "train").exists()


def test_a_model_without_a_chat_template_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_chat_model(tmp_path / "model", chat_template=None)
    assert run(monkeypatch, tmp_path / "model", tmp_path, make_rows(3)) == 1
    assert "needed a tokenizer with a chat template, found one without" in capsys.readouterr().err
