"""The command that shows a data set."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from common.data.arrow_file import Sample
from common.data.dataset import Dataset
from launch import inspect, prepare
from launch.data.writer import DatasetWriter
from tests.builders.saved_sets import save_set
from tests.builders.tiny_chat_model import save_chat_model

ROWS = [
    {"messages": [{"role": "user", "content": f"[bold]{n}[/bold] {'?' * n}"}, {"role": "assistant", "content": "Yes. " * n}]}
    for n in range(1, 9)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspected")
    save_chat_model(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    arguments = ["--model", folder / "model", "--input", folder / "rows.jsonl", "--out", folder / "set"]
    assert prepare.main([str(word) for word in arguments]) == 0
    return folder


def test_a_row_is_shown_with_its_answer_marked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets of the text are text, not markup."""
    assert inspect.main([str(folder / "set"), "--row", "1"]) == 0
    rule, *text = capsys.readouterr().out.splitlines()
    num_tokens = len("user\n[bold]2[/bold] ??\n" + "assistant\nYes. Yes. ") + 4
    assert f" row 1: {num_tokens} tokens, 11 supervised" in rule
    assert text == ["<|im_start|>user", "[bold]2[/bold] ??<|im_end|>", "<|im_start|>assistant", "⟦Yes. Yes. <|im_end|>⟧"]


def test_on_a_terminal_what_is_supervised_is_coloured() -> None:
    dataset_row = inspect.render_row(Sample(np.array([7, 8, 9], np.int32), np.array([False, True, True])), None)
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    console.print(dataset_row)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "\x1b[2m7\x1b[0m \x1b[1;32m⟦8 9⟧\x1b[0m \n"


def test_without_a_tokenizer_ids_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with DatasetWriter(tmp_path / "set", {}) as writer:
        writer.add([5, 6, 7, 8], [0, 1, 1, 0])
    assert inspect.main([str(tmp_path / "set"), "--row", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[1].strip() == "5 ⟦6 7⟧ 8"


def test_the_manifest_and_the_table_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main([str(folder / "set")]) == 0
    out = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    manifest = Dataset.open(folder / "set").manifest
    shown = {f"fingerprint {manifest.fingerprint}", f"model {folder / 'model'}", "split train"}
    assert shown | {"rows in 8", "rows kept 8", "1-128 tokens 8"} <= set(out)
    assert out[0].startswith("samples 8 in 1 files of 0.0 MB")


def test_a_set_is_verified(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main([str(folder / "set"), "--verify"]) == 0
    assert capsys.readouterr().out == f"{folder / 'set'}: 1 files, 0 damaged\n"
    with DatasetWriter(tmp_path / "set", {}, rows_per_file=2) as writer:
        for row in range(6):
            writer.add([1000 + row, 2], [1, 1])
    path = tmp_path / "set" / "data-00001.arrow"
    path.write_bytes(path.read_bytes().replace(np.int32(1003).tobytes(), np.int32(1007).tobytes()))
    (tmp_path / "set" / "data-00002.arrow").unlink()
    assert inspect.main([str(tmp_path / "set"), "--verify"]) == 1
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith("data-00001.arrow: needed SHA-256 ") and first.endswith("; unusable rows: 3 to 3")
    assert second.startswith("data-00002.arrow: needed a file of ") and second.endswith("unusable rows: 4 to 5")
    assert last.endswith("3 files, 2 damaged")


def test_a_saved_set_has_no_checksums_to_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_set(tmp_path / "saved", [([1, 2], [0, 1]), ([3], [1])])
    assert inspect.main([str(folder), "--verify"]) == 0
    assert "2 files, 0 damaged (2 without a checksum: only their structure was checked)" in capsys.readouterr().out
    assert inspect.main([str(folder)]) == 0
    assert "not counted" in capsys.readouterr().out


def test_lengths_are_bars_of_all_samples_and_of_their_supervised_tokens(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "set", {}) as writer:
        for length in (5, 200, 200, 400):
            writer.add(range(length), [number < 150 for number in range(length)])
    console = Console(file=io.StringIO(), width=100)
    console.print(inspect.draw_lengths(Dataset.open(tmp_path / "set")))
    assert isinstance(console.file, io.StringIO)
    assert [line.split() for line in console.file.getvalue().splitlines()[1:]] == [
        ["1-128", "1", "█" * 6, "1", "█" * 6],
        ["129-256", "2", "█" * 12, "3", "█" * 18],
        ["257-512", "1", "█" * 6, "0"],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], "absent: needed a prepared data set, found no such folder"),
        (["absent", "--verify"], "absent: needed a prepared data set, found no such folder"),
        (["set", "--row", "8"], "--row: needed 0 to 7, found 8"),
        (["set", "--row", "0", "--model", "absent"], "absent: needed a model folder with config.json, found none"),
    ],
)
def test_what_is_wrong_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert inspect.main([str(folder / arguments[0]), *arguments[1:]]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
