"""A target's tokenizer and its chat template, always as plain lists of token ids."""

import json
from pathlib import Path
from typing import Any, cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from common.errors import ModelError
from launch.data.conversations import Message


def open_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, with or without a chat template.

    Raises:
        ModelError: no such folder, or no tokenizer in it.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: needed a model folder with config.json, found none")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
    return tokenizer


def load_tokenizer(folder: Path, template: Path | None = None) -> PreTrainedTokenizerBase:
    """The same, with the chat template of a Jinja file where one is given.

    Raises:
        ModelError: as above, or there is no chat template.
    """
    tokenizer = open_tokenizer(folder)
    try:
        tokenizer.chat_template = template.read_text() if template else tokenizer.chat_template
    except (OSError, ValueError) as error:
        raise ModelError(f"--template: {template} cannot be read: {error}") from error
    if not tokenizer.chat_template:
        raise ModelError(f"{folder}: needed a tokenizer with a chat template, found one without (see --template)")
    return tokenizer


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    *,
    generation_prompt: bool,
    tools: list[dict[str, Any]] | None = None,
    settings: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation; with `generation_prompt` up to where the assistant's next answer starts.

    `settings` are variables of the template, such as enable_thinking.
    """
    ids = tokenizer.apply_chat_template(
        messages,
        tools=[*tools] if tools else None,
        add_generation_prompt=generation_prompt,
        return_dict=False,
        **(settings or {}),
    )
    return cast(list[int], ids)  # of one conversation, tokenized


def end_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that end an answer: the tokenizer's own and those of generation_config.json."""
    path = folder / "generation_config.json"
    try:
        ids = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{path}: needed a generation configuration, found: {error}") from error
    known = [*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id]
    return {token for token in known if isinstance(token, int)}
