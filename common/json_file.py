"""JSON files for people and programs: written in one piece, and strict, so null stands for what is not finite."""

from pathlib import Path
from typing import Any

import msgspec


def write_json(path: Path, value: Any) -> None:
    """Write or replace a file; who reads meanwhile sees the old content or the new. OSError where the disk refuses."""
    aside = path.with_name(path.name + ".new")
    aside.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    aside.replace(path)
