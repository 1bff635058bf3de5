"""The name of a vocabulary: read from tokenizer.json alone, so that start_all needs no tokenizer library."""

import hashlib
import json
from pathlib import Path


def fingerprint_vocabulary(folder: Path) -> str:
    """Return the SHA-256 of all tokens with their ids; "" where the folder has no tokenizer.json that holds them.

    Another layout of the file, other merges or another chat template change nothing.
    """
    try:
        content = json.loads((folder / "tokenizer.json").read_bytes())
        tokens = content["model"]["vocab"]
        if isinstance(tokens, list):  # of a unigram model, with scores; a token's id is its index
            tokens = {token: index for index, (token, _) in enumerate(tokens)}
        tokens = tokens | {token["content"]: token["id"] for token in content.get("added_tokens", [])}
        return hashlib.sha256(json.dumps(sorted(tokens.items())).encode()).hexdigest()
    except (OSError, ValueError, KeyError, TypeError):
        return ""
