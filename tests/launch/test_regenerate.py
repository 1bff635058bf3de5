"""Answers by the target: what a batch answers is what each prompt would be answered alone."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from common.data.dataset import Dataset
from common.errors import DataError
from launch import prepare, regenerate
from launch.data.answers import AnswerFile
from launch.data.chat import render
from launch.data.generator import Generator, load_model
from launch.data.prompts import Script, find_human_eval, read_scripts
from launch.regenerate import Batches
from tests.builders.tiny_chat_model import save_chat_model

PROMPTS = ["a", "What is the longest of these prompts?", "Why?", "Tell me", "one more"]
MAX_NEW_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedTokenizerBase]:
    folder = tmp_path_factory.mktemp("model")
    return folder, save_chat_model(folder)


def run(model: Path, prompts: str, out: Path, *options: str) -> list[dict[str, Any]]:
    command = ["--model", str(model), "--prompts", prompts, "--out", str(out), "--threads", "1"]
    assert regenerate.main([*command, "--max-new-tokens", str(MAX_NEW_TOKENS), *options]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def write_prompts(folder: Path) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return str(path)


def decode_greedily(model: LlamaForCausalLM, ids: list[int], end_id: int) -> list[int]:
    """One prompt alone, without caches or padding."""
    answer: list[int] = []
    with torch.inference_mode():
        while len(answer) < MAX_NEW_TOKENS and end_id not in answer:
            logits = model(input_ids=torch.tensor([ids + answer]), use_cache=False).logits
            answer.append(int(logits[0, -1].argmax()))
    return answer


def test_a_batch_answers_like_each_prompt_alone(model: tuple[Path, PreTrainedTokenizerBase], tmp_path: Path) -> None:
    folder, tokenizer = model
    rows = run(folder, write_prompts(tmp_path), tmp_path / "out.jsonl", "--batch-size", "3")
    alone, end_id = LlamaForCausalLM.from_pretrained(folder), tokenizer.eos_token_id
    assert len({tuple(row["answer_ids"]) for row in rows}) > 1
    for prompt, row in zip(PROMPTS, rows, strict=True):
        history = [{"role": "user", "content": prompt}]
        assert row["messages"][:-1] == history
        assert row["prompt_ids"] == render(tokenizer, history, generation_prompt=True)
        assert row["answer_ids"] == decode_greedily(alone, row["prompt_ids"], end_id)
        assert row["messages"][-1]["content"] == tokenizer.decode(row["answer_ids"], skip_special_tokens=True)


@pytest.mark.gpu
def test_a_gpu_answers_like_a_cpu(model: tuple[Path, PreTrainedTokenizerBase], tmp_path: Path) -> None:
    folder, _ = model
    rows = run(folder, write_prompts(tmp_path), tmp_path / "out.jsonl")
    on_gpu = run(folder, write_prompts(tmp_path), tmp_path / "gpu.jsonl", "--device", "cuda:0", "--batch-size", "3")
    assert on_gpu == rows


def test_an_answer_stops_at_the_end_token_and_says_so(model: tuple[Path, PreTrainedTokenizerBase], tmp_path: Path) -> None:
    """An answer's third token is made the end token, so that it ends there and others go on."""
    folder, tokenizer = model
    [first, *_] = run(folder, write_prompts(tmp_path), tmp_path / "out.jsonl")
    end_id = first["answer_ids"][2]
    changed = LlamaForCausalLM.from_pretrained(folder)
    changed.generation_config.eos_token_id = [end_id, 0]
    changed.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = run(tmp_path / "model", write_prompts(tmp_path), tmp_path / "out.jsonl")
    assert rows[0]["answer_ids"] == first["answer_ids"][: first["answer_ids"].index(end_id) + 1]
    for row in rows:
        ends = [token in (end_id, 0) for token in row["answer_ids"]]
        assert row["finished"] == ends[-1]
        assert not any(ends[:-1])
        assert row["finished"] or len(ends) == MAX_NEW_TOKENS
    assert {row["finished"] for row in rows} == {True, False}


def test_the_limit_takes_the_first_prompts_and_prepare_takes_the_rows(
    model: tuple[Path, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    rows = run(model[0], write_prompts(tmp_path), tmp_path / "out.jsonl", "--limit", "2")
    assert [row["messages"][0]["content"] for row in rows] == PROMPTS[:2]
    assert prepare.main(["--model", str(model[0]), "--input", str(tmp_path / "out.jsonl"), "--out", str(tmp_path / "set")]) == 0
    sample = Dataset.open(tmp_path / "set").read(0)
    assert sample.input_ids.tolist() == rows[0]["prompt_ids"] + rows[0]["answer_ids"]
    assert sample.loss_mask.tolist() == [False] * len(rows[0]["prompt_ids"]) + [True] * len(rows[0]["answer_ids"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "prompts.jsonl", "set"]


def test_several_turns_are_answered_one_after_the_other(model: tuple[Path, PreTrainedTokenizerBase], tmp_path: Path) -> None:
    """Each to the answers before it; an answer that was cut ends its conversation. Many ids end an answer here."""
    folder, tokenizer = model
    changed = LlamaForCausalLM.from_pretrained(folder)
    changed.generation_config.eos_token_id = [*range(0, len(tokenizer), 16), tokenizer.eos_token_id]
    changed.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [prompt, "and?"]}) + "\n" for prompt in PROMPTS))
    rows = run(tmp_path / "model", str(path), tmp_path / "out.jsonl")
    answers = [row.get("answers", [row]) for row in rows]
    assert {len(parts) for parts in answers} == {1, 2}
    for row, parts in zip(rows, answers, strict=True):
        assert len(row["messages"]) == 2 * len(parts)
        assert row["finished"] or len(parts[-1]["answer_ids"]) == MAX_NEW_TOKENS
        for number, part in enumerate(parts):
            history = row["messages"][: 2 * number + 1]
            assert part["prompt_ids"] == render(tokenizer, history, generation_prompt=True)


def test_what_was_answered_is_not_answered_again(
    model: tuple[Path, PreTrainedTokenizerBase], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = model
    prompts, out = write_prompts(tmp_path), tmp_path / "out.jsonl"
    rows = run(folder, prompts, out, "--batch-size", "2")
    lines = out.read_text().splitlines(keepends=True)
    out.with_name("out.jsonl.partial").write_text(lines[0] + lines[2] + lines[1][:9])
    out.unlink()
    assert run(folder, prompts, out, "--batch-size", "2") == rows
    monkeypatch.setattr("launch.data.generator.load_model", None)  # not needed any more
    assert run(folder, prompts, out, "--batch-size", "2") == rows


def test_prompts_are_taken_window_by_window(
    model: tuple[Path, PreTrainedTokenizerBase], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory does not grow with their number."""
    folder, tokenizer = model
    monkeypatch.setattr(regenerate, "WINDOW_BATCHES", 1)
    taken: list[str] = []

    def scripts() -> Iterator[tuple[str, Script]]:
        for prompt in PROMPTS:
            taken.append(prompt)
            yield prompt, Script([{"role": "user", "content": prompt}, None])

    def load() -> Generator:
        return Generator(folder, tokenizer, torch.device("cpu"), 2)

    done = AnswerFile(tmp_path / "out.jsonl")
    answers = Batches(load, tokenizer, 2).answer(scripts(), done)
    assert [(prompt, len(taken)) for prompt, _ in answers] == list(zip(PROMPTS, [2, 2, 4, 4, 5], strict=True))
    done.close()


def test_a_category_is_handed_on(model: tuple[Path, PreTrainedTokenizerBase], tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": "a", **more}) + "\n" for more in ({"category": "maths"}, {}, {"category": 3}))
    )
    assert [row.get("category") for row in run(model[0], str(path), tmp_path / "out.jsonl")] == ["maths", None, None]


def test_the_dtype_is_that_of_the_files_unless_another_is_given(
    model: tuple[Path, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    """Answers of one type are not taken for those of another."""
    assert load_model(model[0], torch.device("cpu")).dtype == torch.float32
    assert load_model(model[0], torch.device("cpu"), torch.bfloat16).dtype == torch.bfloat16
    prompts, out = write_prompts(tmp_path), tmp_path / "out.jsonl"
    keys = [{row["key"] for row in run(model[0], prompts, out, *options)} for options in ([], ["--dtype", "bfloat16"])]
    assert not keys[0] & keys[1]


def read_turns(path: Path) -> list[list[str | None]]:
    return [
        [None if turn is None else turn["content"] for turn in script.turns]
        for script in read_scripts(str(path), None, Counter())
    ]


def test_prompts_are_read_from_any_of_the_forms(tmp_path: Path) -> None:
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    more = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]
    rows = [{"prompt": "a"}, {"turns": ["a", "c"]}, {"messages": [user, answer]}, {"conversations": more}]
    (tmp_path / "prompts.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    assert read_turns(tmp_path / "prompts.jsonl") == [["a", None], ["a", None, "c", None], ["a", None], ["a", None, "c", None]]


def test_human_eval_is_read_from_its_package_without_importing_it() -> None:
    unusable: Counter[str] = Counter()
    scripts = list(read_scripts("human-eval", None, unusable))
    assert not unusable
    assert len(scripts) == 164
    assert "human_eval" not in sys.modules
    for turns, tools, category in scripts:
        assert tools is None and category is None and len(turns) == 2 and turns[1] is None
        assert turns[0] is not None and "def " in turns[0]["content"]
    assert find_human_eval().suffix == ".gz"


def test_rows_without_anything_to_answer_are_counted_and_left_out(
    model: tuple[Path, PreTrainedTokenizerBase], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last one is refused by the chat template."""
    answer, tool = {"role": "assistant", "content": "b"}, {"role": "tool", "content": "c"}
    rows = [{"prompt": "a"}, {"question": "b"}, {"messages": [answer]}, {"prompt": "\ud800"}, {"messages": [tool]}, []]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{\n")
    [row] = run(model[0], str(path), tmp_path / "out.jsonl")
    assert row["messages"][0]["content"] == "a"
    assert {line for line in capsys.readouterr().out.splitlines() if line.startswith("left out")} == {
        "left out 2: neither a conversation nor token ids",
        "left out 1: no turn of the user or a tool before an answer",
        "left out 1: text that is no Unicode",
        "left out 1: not JSON",
        "left out 1: no tools",
    }


@pytest.mark.parametrize(
    ("content", "found"),
    [("", "none"), ("{}\n{}\n[", "2 rows with neither a conversation nor token ids, 1 rows with not JSON")],
)
def test_no_prompt_at_all_is_an_error(tmp_path: Path, content: str, found: str) -> None:
    (tmp_path / "prompts.jsonl").write_text(content)
    with pytest.raises(DataError, match=rf"prompts\.jsonl: needed at least one row with messages, .* found {found}"):
        list(read_scripts(str(tmp_path / "prompts.jsonl"), None, Counter()))


def test_a_missing_file_of_prompts_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.jsonl: needed a file or a folder, found none"):
        list(read_scripts(str(tmp_path / "absent.jsonl"), None, Counter()))


def test_without_a_limit_an_answer_goes_on_until_the_context_is_full(
    model: tuple[Path, PreTrainedTokenizerBase], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = LlamaForCausalLM.from_pretrained(model[0])
    changed.config.max_position_embeddings = 120
    changed.generation_config.eos_token_id = [0]
    changed.save_pretrained(tmp_path / "model")
    model[1].save_pretrained(tmp_path / "model")
    command = ["--model", str(tmp_path / "model"), "--prompts", write_prompts(tmp_path), "--out", str(tmp_path / "out.jsonl")]
    assert regenerate.main([*command, "--limit", "1", "--threads", "1"]) == 0
    [row] = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert row["finished"] or len(row["prompt_ids"] + row["answer_ids"]) == 120
    assert len(row["answer_ids"]) > 48 or row["finished"]
    assert f"{int(not row['finished'])} cut at the limit" in capsys.readouterr().out
