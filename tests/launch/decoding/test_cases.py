"""Cases from files of prompts and held-out samples, and conversations turn by turn."""

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from common.config import Config, DataConfig
from common.errors import DataError
from launch.data.writer import DatasetWriter
from launch.decoding.cases import Case, file_cases, first_of_each_category, held_out_cases, typed_case
from tests.builders.targets import make_target
from tests.builders.tiny_chat_model import END, make_tokenizer

HEAD, ANSWER = "<|im_start|>user\n", "<|im_start|>assistant\n"


def with_sets(config: Config, folder: Path) -> Config:
    """Two evaluation sets, one of which names categories; supervised is what is 50 or more."""
    rows = {"plain": [([3, 4, 50, 51], ""), ([60], "")], "named": [([5, 50, 6, 51], "a"), ([7, 50], "b"), ([8, 52], "a")]}
    for name, samples in rows.items():
        with DatasetWriter(folder / name, {}) as writer:
            for tokens, category in samples:
                writer.add(tokens, [token >= 50 for token in tokens], category)
    data = DataConfig(eval_paths={name: str(folder / name) for name in rows})
    return msgspec.structs.replace(config, data=data)


def prompts(cases: list[Case]) -> list[tuple[str, str, list[int]]]:
    return [(case.name, case.category, next(case.turns)) for case in cases]


def test_held_out_prompts_end_before_the_first_supervised_token(tmp_path: Path) -> None:
    config = with_sets(make_target(tmp_path, "llama")[0], tmp_path)
    assert prompts(held_out_cases(config, 9)) == [
        ("held-out sample 0", "plain", [3, 4]),
        ("held-out sample 1", "plain", [60]),  # at least one token
        ("held-out sample 2", "named/a", [5]),
        ("held-out sample 3", "named/b", [7]),
        ("held-out sample 4", "named/a", [8]),
    ]
    assert [case.name[-1] for case in held_out_cases(config, 1)] == ["0", "2", "3"]
    for case in held_out_cases(config, 1):
        next(case.turns)
        with pytest.raises(StopIteration):
            case.turns.send([1])
    without = msgspec.structs.replace(config, data=DataConfig())
    with pytest.raises(DataError, match="needed an evaluation data set, found none; give --prompt or --prompts"):
        held_out_cases(without, 1)


def test_turns_are_rendered_with_the_answers_before_them() -> None:
    tokenizer = make_tokenizer()
    turns = typed_case(tokenizer, "Hello").turns
    assert tokenizer.decode(next(turns)) == f"{HEAD}Hello{END}\n{ANSWER}"
    with pytest.raises(StopIteration):
        turns.send(tokenizer.encode(END))


def test_variables_of_the_template_are_set() -> None:
    tokenizer = make_tokenizer("{{ mood }}: {{ messages[0].content }}")
    assert tokenizer.decode(next(typed_case(tokenizer, "Hello", {"mood": "glad"}).turns)) == "glad: Hello"


def test_files_give_their_names_to_rows_without_a_category(tmp_path: Path) -> None:
    tokenizer, unusable = make_tokenizer(), Counter[str]()
    rows = [{"turns": ["One?", "Two?"]}, {"prompt": "Three?", "category": "odd"}, {"messages": []}]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cases = file_cases([str(tmp_path / "sums.jsonl")], tokenizer, unusable)
    assert [(case.name, case.category) for case in cases] == [("sums.jsonl 0", "sums"), ("sums.jsonl 1", "odd")]
    assert sum(unusable.values()) == 1
    first = cases[0].turns
    assert tokenizer.decode(next(first)) == f"{HEAD}One?{END}\n{ANSWER}"
    second = tokenizer.decode(first.send(tokenizer.encode(f"1{END}")))
    assert second == f"{HEAD}One?{END}\n{ANSWER}1{END}\n{HEAD}Two?{END}\n{ANSWER}"


def test_the_first_of_each_category() -> None:
    tokenizer = make_tokenizer()
    cases = [typed_case(tokenizer, "x")._replace(name=str(number), category=name) for number, name in enumerate("abacab")]
    assert [case.name for case in first_of_each_category(cases, 2)] == ["0", "1", "2", "3", "5"]
