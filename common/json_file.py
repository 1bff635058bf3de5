"""JSON files for people and programs: written in one piece, and strict, so null stands for what is not finite."""

import json
from pathlib import Path
from typing import Any

import msgspec

from common.errors import HeadraceError


def write_json(path: Path, value: Any) -> None:
    """Write or replace a file; who reads meanwhile sees the old content or the new. OSError where the disk refuses."""
    aside = path.with_name(path.name + ".new")
    aside.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    aside.replace(path)


def read_object(path: Path, error: type[HeadraceError]) -> dict[str, Any]:
    """The object that somebody else's file holds; raises `error` where it cannot be read, is not JSON or no object."""
    try:
        content = json.loads(path.read_text())
    except OSError as cause:
        raise error(f"{path}: cannot be read: {cause.strerror}") from cause
    except ValueError as cause:
        raise error(f"{path}: not JSON: {cause}") from cause
    if not isinstance(content, dict):
        raise error(f"{path}: needed an object, found {type(content).__name__}")
    return content
