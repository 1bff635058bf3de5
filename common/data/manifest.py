"""The manifest of a prepared data set: number, sizes and checksums of its files, so that nothing else is taken for them."""

from pathlib import Path
from typing import Any

import msgspec

from common.errors import DataError

SCHEMA_VERSION = 1


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One Arrow file of a data set; `sha256` is "" where none is known."""

    name: str
    num_rows: int
    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `manifest.json`; `source` is free: where the samples came from and which settings decided them."""

    schema_version: int
    num_samples: int
    num_tokens: int
    num_supervised_tokens: int | None  # None: not counted
    max_length: int
    fingerprint: str
    files: list[FileEntry]
    source: dict[str, Any]


def read_manifest(folder: Path) -> Manifest:
    """Read `folder`/manifest.json. DataError for no manifest, or one of another schema version."""
    path = folder / "manifest.json"
    try:
        content = path.read_bytes()
        version = msgspec.json.decode(content).get("schema_version")
        if version != SCHEMA_VERSION:
            raise DataError(f"{path}: needed schema version {SCHEMA_VERSION}, found {version}")
        return msgspec.json.decode(content, type=Manifest)
    except FileNotFoundError as error:
        raise DataError(f"{folder}: needed manifest.json, found none (not a prepared data set, see launch.prepare)") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, AttributeError) as error:
        raise DataError(f"{path}: not a manifest: {error}") from error


def check_replaceable(folder: Path) -> None:
    """Raise DataError where a folder holds anything but a prepared data set."""
    if not folder.exists():
        return
    known = {"manifest.json", "report.json"} | {entry.name for entry in read_manifest(folder).files}
    if unknown := sorted(path.name for path in folder.iterdir() if path.name not in known):
        raise DataError(f"{folder}: needed a prepared data set and nothing else, found {', '.join(unknown)}")
