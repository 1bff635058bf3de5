"""The command: rows in, two data sets and a table out."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from common.data.dataset import Dataset
from launch import prepare
from launch.data.writer import DatasetWriter
from tests.builders.tiny_chat_model import CHATML, save_chat_model

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_chat_model(folder)
    return folder


def make_rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Rows of ids, the last of which numbers them; all with one `id`, which means nothing."""
    return [{"id": "same", "prompt_ids": [1, 2], "answer_ids": [3, first + number]} for number in range(count)]


def make_chat(count: int) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": "answer " * (n % 5 + 1)}]}
        for n in range(count)
    ]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def run(model: Path, folder: Path, rows: list[Any] | None, *options: str) -> int:
    source = folder / "rows.jsonl"
    if rows is not None:
        write(source, rows)
    return prepare.main(["--model", str(model), "--input", str(source), "--out", str(folder / "train"), *options])


def read_last_ids(folder: Path) -> list[int]:
    dataset = Dataset.open(folder)
    return [int(dataset.read(sample_id).input_ids[-1]) for sample_id in range(dataset.num_samples)]


def read_report(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "report.json").read_text()))


def held_out(folder: Path, count: int) -> list[str]:
    return ["--eval-out", str(folder / "eval"), "--eval-samples", str(count)]


def test_the_last_rows_are_held_out(model: Path, tmp_path: Path) -> None:
    assert run(model, tmp_path, make_rows(10), *held_out(tmp_path, 3)) == 0
    assert read_last_ids(tmp_path / "train") == [0, 1, 2, 3, 4, 5, 6]
    assert read_last_ids(tmp_path / "eval") == [7, 8, 9]
    assert read_report(tmp_path / "train")["written"] == {"train": 7, "eval": 3}


def test_a_conversation_of_several_rows_is_never_in_both_sets(model: Path, tmp_path: Path) -> None:
    rows: list[Any] = [
        {"answers": [{"prompt_ids": [1, n], "answer_ids": [7, 8]}, {"prompt_ids": [2, n], "answer_ids": [7, 9]}]}
        for n in range(5)
    ]
    assert run(model, tmp_path, rows, *held_out(tmp_path, 3)) == 0
    parts = [Dataset.open(tmp_path / split) for split in ("train", "eval")]
    ids = [{int(part.read(row).input_ids[1]) for row in range(part.num_samples)} for part in parts]
    assert ids == [{0, 1, 2}, {3, 4}]
    assert parts[1].num_samples == 4


def test_every_dropped_and_changed_row_is_counted(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say = {"role": "assistant", "content": "x" * 30}
    rows: list[Any] = [
        *make_rows(2),
        "",  # no row
        make_rows(1)[0],
        {"prompt_ids": [1], "answer_ids": [2] * 50},
        {"prompt_ids": [1], "answer_ids": [2]},
        {"prompt_ids": [1], "answer_ids": [2, 258]},
        {"prompt_ids": [], "answer_ids": []},
        "null",
        "{",
        {"messages": [{"role": "tool", "content": "the template raises"}, say]},
        {"messages": [say, {"role": "user", "content": "Hi"}, {"role": "gpt", "content": "Hello"}]},
        {"messages": [{"role": "user", "content": "\ud83d"}, say]},
    ]
    assert run(model, tmp_path, rows, "--max-length", "40") == 0
    report = read_report(tmp_path / "train")
    assert report["dropped"] == {
        "the same tokens as an earlier row": 1,
        "longer than --max-length": 1,
        "no two supervised tokens in a row": 1,
        "an id outside the vocabulary": 1,
        "no supervised token": 1,
        "neither a conversation nor token ids": 1,
        "not JSON": 1,
        "refused by the chat template": 1,
        "text that is no Unicode": 1,
    }
    assert report["changed"] == {"answers before the first question removed": 1}
    assert (report["rows_in"], report["rows_kept"], report["samples"]) == (12, 3, 3)
    assert report["rows_in"] == report["rows_kept"] + sum(report["dropped"].values())
    table = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (table["rows in"], table["rows kept"], table["  dropped: not JSON"]) == ("12", "3", "1")


def test_two_data_sets_with_weights_and_a_limit(model: Path, tmp_path: Path) -> None:
    """The second counts two and a half times, of the third every second row; one row is held out of each."""
    paths = [write(tmp_path / f"{name}.jsonl", make_rows(20, first)) for name, first in (("a", 0), ("b", 50), ("c", 100))]
    sources = [f"{paths[0]},rows=3", f"{paths[1]},rows=5,weight=2.5", f"{paths[2]},weight=0.5,rows=6"]
    arguments = [word for source in sources for word in ("--input", source)]
    command = ["--model", str(model), *arguments, "--out", str(tmp_path / "train"), *held_out(tmp_path, 3)]
    assert prepare.main(command) == 0
    assert read_last_ids(tmp_path / "train") == [0, 1, 50, 50, 51, 51, 51, 52, 52, 53, 53, 53, 101, 103]
    assert read_last_ids(tmp_path / "eval") == [2, 54, 105]
    report = read_report(tmp_path / "train")
    assert report["dropped"] == {"left out by the weight of its data set": 3}
    assert [(line["name"], line["rows_in"], line["rows_usable"]) for line in report["inputs"]] == [
        ("a.jsonl", 3, 3),
        ("b.jsonl", 5, 5),
        ("c.jsonl", 6, 6),
    ]


def test_a_row_of_one_data_set_is_a_duplicate_in_the_other(model: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", make_rows(4))
    assert run(model, tmp_path, make_rows(3), "--input", str(other), *held_out(tmp_path, 2)) == 0
    assert read_last_ids(tmp_path / "train") + read_last_ids(tmp_path / "eval") == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("rows", "count", "message"),
    [
        ([], 0, "--input: needed at least 1 usable rows, found 0 samples of 0"),
        ([{"text": "Hi"}, ["no object"]], 0, "--input: needed at least 1 usable rows, found 0 samples of 0"),
        (make_rows(3), 3, "--input: needed at least 4 usable rows, found 3 samples of 3"),
    ],
)
def test_no_row_for_training_is_an_error_and_leaves_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[Any], count: int, message: str
) -> None:
    assert run(model, tmp_path, rows, *(held_out(tmp_path, count) if count else [])) == 2
    printed = capsys.readouterr()
    assert message in printed.err and "rows in" in printed.out
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_several_processes_write_the_same_bytes(model: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        assert run(model, tmp_path / str(number), make_chat(1200), "--workers", str(number)) == 0
    one, two = (Dataset.open(tmp_path / str(number) / "train") for number in (1, 2))
    assert one.num_samples == 1200
    assert [entry.sha256 for entry in one.manifest.files] == [entry.sha256 for entry in two.manifest.files]


def test_a_set_that_is_there_is_refused_and_replaced_on_request(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, tmp_path, make_rows(9), *held_out(tmp_path, 2)) == 0
    before = [(path, path.stat().st_ino) for path in tmp_path.rglob("*")]
    assert run(model, tmp_path, None, *held_out(tmp_path, 2)) == 2
    assert "train: needed a new folder, found one that exists (see --overwrite)" in capsys.readouterr().err
    assert [(path, path.stat().st_ino) for path in tmp_path.rglob("*")] == before
    assert run(model, tmp_path, make_rows(5), *held_out(tmp_path, 2), "--overwrite") == 0
    assert (read_last_ids(tmp_path / "train"), read_last_ids(tmp_path / "eval")) == ([0, 1, 2], [3, 4])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval", "rows.jsonl", "train"]


def test_a_failed_preparation_leaves_what_was_there(model: Path, tmp_path: Path) -> None:
    assert run(model, tmp_path, make_rows(5)) == 0
    assert run(model, tmp_path, [], "--overwrite") == 2
    assert read_last_ids(tmp_path / "train") == [0, 1, 2, 3, 4]


def test_a_damaged_set_is_replaced_on_request(model: Path, tmp_path: Path) -> None:
    assert run(model, tmp_path, make_rows(5)) == 0
    (tmp_path / "train" / "data-00000.arrow").write_bytes(b"")
    assert run(model, tmp_path, None, "--overwrite") == 0
    assert read_last_ids(tmp_path / "train") == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("out", "eval_out"), [("a", "a/eval"), ("a/train", "a"), ("a", "b/../a"), ("a", "link/eval")])
def test_nested_folders_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str, eval_out: str
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    source = write(tmp_path / "rows.jsonl", make_rows(5))
    folders = ["--out", str(tmp_path / out), "--eval-out", str(tmp_path / eval_out), "--eval-samples", "2"]
    assert prepare.main(["--model", str(model), "--input", str(source), *folders, "--overwrite"]) == 2
    assert "--eval-out: needed a folder neither in --out nor around it, found " in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "rows.jsonl"]


@pytest.mark.parametrize("name", ["notes.txt", "other"])
def test_a_folder_with_anything_else_in_it_is_not_replaced(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert run(model, tmp_path, make_rows(5)) == 0
    if name == "other":
        with DatasetWriter(tmp_path / "train" / name, {}) as writer:
            writer.add([1], [1])
    else:
        (tmp_path / "train" / name).write_text("mine")
    assert run(model, tmp_path, make_rows(3), "--overwrite") == 2
    assert f"train: needed a prepared data set and nothing else, found {name}" in capsys.readouterr().err
    assert read_last_ids(tmp_path / "train") == [0, 1, 2, 3, 4] and (tmp_path / "train" / name).exists()


def test_a_row_of_answers_that_are_no_ids_is_counted_and_the_others_are_written(model: Path, tmp_path: Path) -> None:
    assert run(model, tmp_path, [*make_rows(3), {"answers": [5]}, *make_rows(5)[3:]]) == 0
    assert read_last_ids(tmp_path / "train") == [0, 1, 2, 3, 4]
    assert list(read_report(tmp_path / "train")["dropped"].values()) == [1]


def test_rows_of_ids_need_no_chat_template(tmp_path: Path) -> None:
    save_chat_model(tmp_path / "model", chat_template=None)
    assert run(tmp_path / "model", tmp_path, make_rows(3)) == 0
    assert read_last_ids(tmp_path / "train") == [0, 1, 2]


def test_files_of_a_folder_that_are_not_read_are_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows").mkdir()
    write(tmp_path / "rows" / "a.jsonl", make_rows(3))
    (tmp_path / "rows" / "b.zip").write_bytes(b"PK")
    arguments = ["--model", str(model), "--input", str(tmp_path / "rows"), "--out", str(tmp_path / "train")]
    assert prepare.main(arguments) == 0
    assert f"not read: {tmp_path}/rows/b.zip" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, {"manifest.json": '{"schema_version": 1}'}, {"notes.txt": "mine"}])
def test_a_folder_that_is_something_else_is_not_touched(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: dict[str, str] | None
) -> None:
    (tmp_path / "eval").mkdir()
    for name, text in (content or {}).items():
        (tmp_path / "eval" / name).write_text(text)
    assert run(model, tmp_path, make_rows(3), *held_out(tmp_path, 1), "--overwrite") == 2
    assert "eval" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in (tmp_path / "eval").iterdir()} == (content or {})
    assert not (tmp_path / "train").exists()


def test_a_killed_preparation_leaves_no_set_and_the_next_starts_clean(model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", make_chat(20_000))
    command = [sys.executable, "-m", "launch.prepare", "--model", str(model), "--input", str(source), "--workers", "1"]
    process = subprocess.Popen([*command, "--out", str(tmp_path / "train")], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".train.partial/data-*.arrow")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "train").exists() and (tmp_path / ".train.partial").exists()
    assert run(model, tmp_path, make_rows(5)) == 0
    assert read_last_ids(tmp_path / "train") == [0, 1, 2, 3, 4]
    assert not (tmp_path / ".train.partial").exists()


def test_a_second_preparation_of_the_same_folder_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DatasetWriter(tmp_path / "train", {}) as writer:
        assert run(model, tmp_path, make_rows(3)) == 2
        writer.add([1], [1])
    assert "train: needed no other writer, found one at work" in capsys.readouterr().err
    assert Dataset.open(tmp_path / "train").num_samples == 1


def test_a_model_without_a_chat_template_is_named_and_a_file_helps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_chat_model(tmp_path / "model", chat_template=None)
    assert run(tmp_path / "model", tmp_path, make_chat(3)) == 2
    assert "needed a tokenizer with a chat template, found one without (see --template)" in capsys.readouterr().err
    (tmp_path / "chatml.jinja").write_text(CHATML)
    assert run(tmp_path / "model", tmp_path, None, "--template", str(tmp_path / "chatml.jinja")) == 0


def test_long_messages_are_cut_only_on_request(model: Path, tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x" * 1_000_000}]}
    assert run(model, tmp_path, [*make_chat(2), long]) == 0
    assert Dataset.open(tmp_path / "train").num_samples == 2
    assert run(model, tmp_path, None, "--truncate", "--overwrite") == 0
    dataset = Dataset.open(tmp_path / "train")
    assert dataset.lengths.tolist()[2] == 8192
    assert bool(dataset.read(2).loss_mask[-1])
    assert read_report(tmp_path / "train")["truncated_share"] == pytest.approx(1 / 3)
