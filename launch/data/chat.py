"""A target's tokenizer and its chat template, always as plain lists of token ids."""

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from common.errors import ModelError
from launch.data.conversations import REASONING_KEYS, Message, with_text_arguments

TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


def open_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder, with or without a chat template. ModelError for no folder or no tokenizer."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: needed a model folder with config.json, found none")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
    return tokenizer


def load_tokenizer(folder: Path, template: Path | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer with its chat template, or that of a Jinja file. ModelError also where there is no template."""
    tokenizer = open_tokenizer(folder)
    try:
        tokenizer.chat_template = template.read_text() if template else tokenizer.chat_template
    except (OSError, ValueError) as error:
        raise ModelError(f"--template: {template} cannot be read: {error}") from error
    if not tokenizer.chat_template:
        raise ModelError(f"{folder}: needed a tokenizer with a chat template, found one without (see --template)")
    return tokenizer


def render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], **options: Any) -> list[int]:
    """Return the token ids of `render_text`, which has the options."""
    return tokenize(tokenizer, [render_text(tokenizer, messages, **options)])[0]


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    *,
    generation_prompt: bool,
    tools: list[dict[str, Any]] | None = None,
    settings: dict[str, Any] | None = None,
) -> str:
    """Return the text of a conversation; with `generation_prompt` up to where the assistant's next answer starts.

    Arguments of tool calls are objects, as servers give them to templates. A template that joins them to text fails on
    objects, or prints them as Python does: it is given the JSON text. `settings` are variables of the template, such
    as enable_thinking.
    """

    def apply(messages: list[Message]) -> str:
        options = {"tools": [*tools] if tools else None, "add_generation_prompt": generation_prompt} | (settings or {})
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))

    keys = _reasoning_keys(tokenizer.get_chat_template(tools=tools))
    messages = [_with_reasoning_under(message, keys) for message in messages]
    first = next((call["function"]["arguments"] for message in messages for call in message.get("tool_calls") or []), None)
    try:
        text = apply(messages)
    except TEMPLATE_ERRORS:
        if first is None:
            raise
        return apply([with_text_arguments(message) for message in messages])
    if not first or str(first) not in text:
        return text
    joined = apply([with_text_arguments(message) for message in messages])
    return joined if joined.count(str(first)) < text.count(str(first)) else text  # else the text itself quotes Python


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Return the ids of rendered texts: the template has put every special token into them."""
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids


@lru_cache
def _reasoning_keys(template: str) -> tuple[str, ...]:
    """Return the keys under which a template reads the reasoning: `message.thinking`, `message["reasoning_content"]`.

    Versions of transformers differ in which names they add to a message, so none is relied on.
    """
    read = {match[1] for match in re.finditer(rf"[.'\"]({'|'.join(REASONING_KEYS)})\b", template)}
    return tuple(key for key in REASONING_KEYS if key in read) or REASONING_KEYS[:1]


def _with_reasoning_under(message: Message, keys: tuple[str, ...]) -> Message:
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {key: value for key, value in message.items() if key not in REASONING_KEYS} | dict.fromkeys(keys, reasoning)


def end_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokens that end an answer: the tokenizer's own and those of generation_config.json."""
    path = folder / "generation_config.json"
    try:
        ids = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{path}: needed a generation configuration, found: {error}") from error
    known = [*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id]
    return {token for token in known if isinstance(token, int)}
