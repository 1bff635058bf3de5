"""launch.evaluate on a target and a drafter from anywhere, on files of prompts, greedily and sampling."""

import json
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from common.config import load
from launch import evaluate
from launch.decoding.pair import config_of_folders
from launch.decoding.report import Report
from services.drafter.folder.engine_config import LayoutName
from services.drafter.folder.export import export
from services.drafter.model.model import DraftModel
from tests.builders.targets import TOML
from tests.builders.tiny_chat_model import save_chat_model

ROWS: dict[str, list[dict[str, object]]] = {
    "maths.jsonl": [{"turns": ["1 + 1 = ?", "And twice that?"]}, {"turns": ["2 + 2 = ?"]}, {"turns": ["3 + 3 = ?"]}],
    "other.jsonl": [{"prompt": "Sing.", "category": "songs"}, {"turns": []}, {"prompt": "x" * 600, "category": "songs"}],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model, a drafter of it, and files of prompts."""
    folder = tmp_path_factory.mktemp("pair")
    save_chat_model(folder / "model")
    for name, rows in ROWS.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(TOML + f'[model]\npath = "{folder / "model"}"\ndtype = "float32"\n')
    config = load(folder / "run.toml", [])
    export(folder / "draft", config, DraftModel(config).state_dict(), 1, None)
    return folder


def arguments(folders: Path, *more: str) -> list[str]:
    pair = ["--model", str(folders / "model"), "--draft", str(folders / "draft"), "--threads", "1"]
    return [*pair, "--max-new-tokens", "12", "--out", str(folders / "out"), *more]


def read(folders: Path) -> Report:
    return msgspec.json.decode((folders / "out/evaluation.json").read_bytes(), type=Report)


def prompts(folders: Path) -> list[str]:
    return [argument for name in ROWS for argument in ("--prompts", str(folders / name))]


def test_files_of_prompts_by_category(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(arguments(folders, *prompts(folders))) == 0
    report, text = read(folders), capsys.readouterr().out
    assert {name: found.num_answers for name, found in report.categories.items()} == {"maths": 4, "songs": 1}
    assert sorted(report.left_out.values()) == [1, 1]
    assert any("needed a prompt of 1 to 512 tokens" in reason for reason in report.left_out)
    assert report.total.num_answers == 5
    assert report.total.lossless is not None
    assert report.total.lossless.num_same == 5
    assert report.total.num_rounds == sum(found.num_rounds for found in report.categories.values())
    assert report.total.acceptance == pytest.approx(1 + sum(report.total.acceptance_per_position))
    tokens, rounds = report.total.num_answer_tokens, report.total.num_rounds
    assert report.total.speculative.num_target_passes == 5 + rounds
    assert report.total.plain.num_target_passes == tokens
    assert report.total.passes_saved == pytest.approx(1 - (5 + rounds) / tokens)
    assert "maths.jsonl 0, turn 1" in text  # the second question of a conversation
    assert text.count("plain  ") == 3  # of the five answers only so many are shown


def test_a_few_of_each_category(folders: Path) -> None:
    assert evaluate.main(arguments(folders, *prompts(folders), "--num-prompts", "2")) == 0
    assert {name: found.num_answers for name, found in read(folders).categories.items()} == {"maths": 3, "songs": 1}


def test_sampled_answers_are_not_compared(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(arguments(folders, "--prompt", "Sing.", "--temperature", "1", "--seed", "3")) == 0
    assert capsys.readouterr().out.endswith("same tokens        not compared: the answers were sampled\n")
    report = read(folders)
    assert report.total.lossless is None
    assert (report.setup.temperature, report.setup.seed) == (1.0, 3)


def test_what_the_drafter_states_is_what_is_decoded(folders: Path) -> None:
    found, stated = config_of_folders(folders / "model", folders / "draft", "bfloat16"), load(folders / "run.toml", [])
    assert found.draft == msgspec.structs.replace(stated.draft, dtype="bfloat16")
    assert found.shape == stated.shape
    assert found.model.dtype == "bfloat16"


def test_layouts_of_others_are_decoded_alike(folders: Path, tmp_path: Path) -> None:
    config = load(folders / "run.toml", ["draft.layer_types=[]"])
    reports = []
    for layout in get_args(LayoutName):
        export(tmp_path / layout, config, DraftModel(config).state_dict(), 1, None, layout)
        assert evaluate.main([*arguments(folders, "--prompt", "Sing."), "--draft", str(tmp_path / layout)]) == 0
        reports.append(read(folders))
    ours, theirs = reports
    assert theirs.total.acceptance_per_position == ours.total.acceptance_per_position
    assert theirs.total.num_rounds == ours.total.num_rounds > 0


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("mask_token_id", None, "needed mask_token_id in config.json, found none"),
        ("target_layer_ids", [0, 3], "tap_layers: needed layers from 0 to 2, found [0, 3]"),
    ],
)
def test_drafters_that_cannot_be_used(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: object, message: str
) -> None:
    (tmp_path / "draft").mkdir()
    content = json.loads((folders / "draft/config.json").read_text())
    content["dflash_config"][key] = value
    content.pop(key, None)
    (tmp_path / "draft/config.json").write_text(json.dumps(content))
    (tmp_path / "draft/model.safetensors").symlink_to(folders / "draft/model.safetensors")
    words = ["--model", str(folders / "model"), "--draft", str(tmp_path / "draft"), "--prompt", "Sing."]
    assert evaluate.main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needed either RUN, or --model and --draft"),
        (["run", "--model", "m", "--draft", "d"], "needed either RUN, or --model and --draft"),
        (["--model", "m"], "needed either RUN, or --model and --draft"),
        (["--model", "m", "--draft", "d"], "only a run has held-out samples"),
        (["run", "--temperature", "-1"], "--temperature: needed 0 or more, found -1.0"),
        (["run", "--temperature", "nan"], "--temperature: needed 0 or more, found nan"),
        (["run", "--top-p", "0"], "--top-p: needed more than 0 and at most 1, found 0.0"),
        (["run", "--device", "cuda:99"], "argument --device: needed cuda:99, found "),
        (["run", "--device", "gpu"], "needed cpu or cuda:N, found gpu"),
        (["run", "--prompt", "x", "--prompts", "y"], "not allowed with"),
    ],
)
def test_command_lines_that_make_no_sense(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        evaluate.main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_nothing_to_decode_is_an_error(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "x" * 600}) + "\n")
    assert evaluate.main(arguments(folders, "--prompts", str(tmp_path / "long.jsonl"))) == 2
    assert "needed a prompt that can be decoded, found none" in capsys.readouterr().err
    assert evaluate.main(arguments(folders, "--prompts", str(tmp_path / "nowhere.jsonl"))) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err
