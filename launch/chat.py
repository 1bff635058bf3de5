"""A target's tokenizer and its chat template, always as plain lists of token ids."""

from pathlib import Path
from typing import cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from common.errors import ModelError
from launch.prompts import Message


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder.

    Raises:
        ModelError: no such folder, no tokenizer in it, or one without a chat template.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: needed a model folder with config.json, found none")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
    if not tokenizer.chat_template:
        raise ModelError(f"{folder}: needed a tokenizer with a chat template, found one without")
    return tokenizer


def render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, generation_prompt: bool) -> list[int]:
    """Token ids of a conversation; with `generation_prompt` up to where the assistant's next answer starts."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=generation_prompt, return_dict=False)
    return cast(list[int], ids)  # of one conversation, tokenized
