"""Answers by the target: what a batch answers is what each prompt would be answered alone."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from common.dataset import Dataset
from common.errors import DataError
from launch import prepare, regenerate
from launch.chat import render
from launch.prompts import find_human_eval, read_prompts
from tests.launch.tiny_chat_model import save_chat_model

PROMPTS = ["a", "What is the longest of these prompts?", "Why?", "Tell me", "one more"]
MAX_NEW_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedTokenizerBase]:
    folder = tmp_path_factory.mktemp("model")
    return folder, save_chat_model(folder)


def run(monkeypatch: pytest.MonkeyPatch, model: Path, prompts: str, out: Path, *options: str) -> list[dict[str, Any]]:
    command = ["regenerate", "--model", str(model), "--prompts", prompts, "--out", str(out), "--threads", "1"]
    monkeypatch.setattr(sys, "argv", [*command, "--max-new-tokens", str(MAX_NEW_TOKENS), *options])
    assert regenerate.main() == 0
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


def test_a_batch_answers_like_each_prompt_alone(
    monkeypatch: pytest.MonkeyPatch, model: tuple[Path, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    folder, tokenizer = model
    rows = run(monkeypatch, folder, write_prompts(tmp_path), tmp_path / "out.jsonl", "--batch-size", "3")
    alone, end_id = LlamaForCausalLM.from_pretrained(folder), tokenizer.eos_token_id
    assert len({tuple(row["answer_ids"]) for row in rows}) > 1
    for prompt, row in zip(PROMPTS, rows, strict=True):
        history = [{"role": "user", "content": prompt}]
        assert row["messages"][:-1] == history
        assert row["prompt_ids"] == render(tokenizer, history, generation_prompt=True)
        assert row["answer_ids"] == decode_greedily(alone, row["prompt_ids"], end_id)
        assert row["messages"][-1]["content"] == tokenizer.decode(row["answer_ids"], skip_special_tokens=True)


def test_an_answer_stops_at_the_end_token_and_says_so(
    monkeypatch: pytest.MonkeyPatch, model: tuple[Path, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    """An answer's third token is made the end token, so that it ends there and others go on."""
    folder, tokenizer = model
    [first, *_] = run(monkeypatch, folder, write_prompts(tmp_path), tmp_path / "out.jsonl")
    end_id = first["answer_ids"][2]
    changed = LlamaForCausalLM.from_pretrained(folder)
    changed.generation_config.eos_token_id = [end_id, 0]
    changed.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = run(monkeypatch, tmp_path / "model", write_prompts(tmp_path), tmp_path / "out.jsonl")
    assert rows[0]["answer_ids"] == first["answer_ids"][: first["answer_ids"].index(end_id) + 1]
    for row in rows:
        ends = [token in (end_id, 0) for token in row["answer_ids"]]
        assert row["finished"] == ends[-1]
        assert not any(ends[:-1])
        assert row["finished"] or len(ends) == MAX_NEW_TOKENS
    assert {row["finished"] for row in rows} == {True, False}


def test_the_limit_takes_the_first_prompts_and_prepare_takes_the_rows(
    monkeypatch: pytest.MonkeyPatch, model: tuple[Path, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    rows = run(monkeypatch, model[0], write_prompts(tmp_path), tmp_path / "out.jsonl", "--limit", "2")
    assert [row["messages"][0]["content"] for row in rows] == PROMPTS[:2]
    assert prepare.main(["--model", str(model[0]), "--input", str(tmp_path / "out.jsonl"), "--out", str(tmp_path / "set")]) == 0
    sample = Dataset.open(tmp_path / "set").read(0)
    assert sample.input_ids.tolist() == rows[0]["prompt_ids"] + rows[0]["answer_ids"]
    assert sample.loss_mask.tolist() == [False] * len(rows[0]["prompt_ids"]) + [True] * len(rows[0]["answer_ids"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "prompts.jsonl", "set"]


def test_prompts_are_read_from_any_of_the_three_forms(tmp_path: Path) -> None:
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    rows = [{"prompt": "a"}, {"turns": ["a", "c"]}, {"messages": [user, answer]}]
    (tmp_path / "prompts.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    assert read_prompts(str(tmp_path / "prompts.jsonl")) == [[user]] * 3


def test_human_eval_is_read_from_its_package_without_importing_it() -> None:
    prompts = read_prompts("human-eval")
    assert len(prompts) == 164
    assert "human_eval" not in sys.modules
    assert all(len(prompt) == 1 and "def " in prompt[0]["content"] for prompt in prompts)
    assert find_human_eval().suffix == ".gz"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"prompts\.jsonl: needed at least one prompt, found none"),
        (
            '{"prompt": "a"}\n{"question": "b"}',
            r"prompts\.jsonl:2: needed messages, prompt or turns .* found the keys question",
        ),
        ('{"messages": [{"role": "assistant", "content": "b"}]}', r"prompts\.jsonl:1: needed messages, prompt or turns"),
        ("{", r"prompts\.jsonl:1: needed JSON, found"),
    ],
)
def test_bad_prompts_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "prompts.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        read_prompts(str(tmp_path / "prompts.jsonl"))


def test_a_missing_file_of_prompts_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.jsonl: cannot be read"):
        read_prompts(str(tmp_path / "absent.jsonl"))
