"""The files of a drafter folder, and a fingerprint of their content; loads no torch."""

import hashlib
from pathlib import Path

from common.errors import CheckpointError

_PATTERNS = ("config.json", "*.safetensors", "*.safetensors.index.json")


def fingerprint_drafter(folder: Path) -> str:
    """Return the SHA-256 of the configuration and the tensors of a drafter folder.

    Raises:
        CheckpointError: no such folder, no config.json, no safetensors, or a file that cannot be read.
    """
    files = {pattern: sorted(folder.glob(pattern)) for pattern in _PATTERNS}
    for pattern in _PATTERNS[:2]:
        if not files[pattern]:
            raise CheckpointError(f"{folder}: needed a drafter folder, found no {pattern}")
    digest = hashlib.sha256()
    try:
        for path in (path for found in files.values() for path in found):
            with path.open("rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()
