"""The key of a prepared data set: everything that changes what is in it, and what is different between two keys."""

import hashlib
import json
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from launch import incremental
from launch.data import chat, conversations, inputs, masking, rules
from launch.data.inputs import Input


def describe_inputs(sources: list[Input]) -> list[dict[str, Any]]:
    """Contents, weights and limits; what a file is called and where it lies changes nothing."""
    return [{"sha256": inputs.fingerprint(path), "weight": weight, "max_rows": max_rows} for path, weight, max_rows in sources]


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Template, vocabulary, merges, special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)  # a slow tokenizer has none
    vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True) if backend is None else backend.to_str()
    parts = [vocabulary, str(tokenizer.special_tokens_map)]
    return {
        "template": _sha256(str(tokenizer.chat_template).encode()),
        "tokenizer": _sha256("\n".join(parts).encode()),
        "libraries": f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}",
    }


def describe_rules() -> str:
    """SHA-256 of the code that reads, renders and checks rows."""
    files = [Path(str(module.__file__)) for module in (inputs, conversations, chat, incremental, masking, rules)]
    return _sha256(b"".join(file.read_bytes() for file in files))


def differences(former: dict[str, Any], key: dict[str, Any]) -> list[str]:
    """One line per entry that is not the same."""
    names = [name for name in [*key, *(name for name in former if name not in key)] if former.get(name) != key.get(name)]
    return [f"{name}: {_short(former.get(name))} -> {_short(key.get(name))}" for name in names]


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_short, value)) + "]"
    if isinstance(value, dict):
        return " ".join(f"{name}={_short(item)}" for name, item in value.items() if item is not None)
    text = str(value)
    return text[:12] if len(text) == 64 else text


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
