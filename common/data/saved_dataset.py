"""Folders written by Hugging Face `Dataset.save_to_disk`, described like our own so that they are read as they are.

Their Arrow files are streams with the columns `input_ids` and `loss_mask`; nothing is copied or converted.
"""

import hashlib
import json
from pathlib import Path

from common.data.arrow_file import ArrowFile
from common.data.manifest import SCHEMA_VERSION, FileEntry, Manifest
from common.errors import DataError


def is_saved_dataset(folder: Path) -> bool:
    """Return whether `save_to_disk` wrote the folder: a set, or several under one name."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def describe_saved_dataset(folder: Path) -> tuple[Manifest, list[ArrowFile]]:
    """Map its files and make their manifest. Lengths are read, tokens are not.

    The fingerprint is the library's own with the names and sizes of the files; no checksum is known. DataError for
    several sets under one name, an index that is not written out, or a file that is damaged.
    """
    names, fingerprint = _read_state(folder)
    files = [ArrowFile(folder / name) for name in names]
    entries = [
        FileEntry(name, file.num_rows, (folder / name).stat().st_size, "") for name, file in zip(names, files, strict=True)
    ]
    identity = [fingerprint, [(entry.name, entry.num_rows, entry.num_bytes) for entry in entries]]
    lengths = [file.lengths() for file in files]
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        num_samples=sum(entry.num_rows for entry in entries),
        num_tokens=sum(int(part.sum()) for part in lengths),
        num_supervised_tokens=None,
        max_length=max((int(part.max()) for part in lengths if len(part)), default=0),
        fingerprint=hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
        files=entries,
        source={"made_by": "datasets.save_to_disk"},
    )
    return manifest, files


def saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files of the rows in their order. DataError for several sets under one name, or an index."""
    return [folder / name for name in _read_state(folder)[0]]


def _read_state(folder: Path) -> tuple[list[str], object]:
    """Return the names of the files, and the library's fingerprint."""
    path = folder / "state.json"
    if not path.is_file():
        splits = ", ".join(sorted(path.parent.name for path in folder.glob("*/state.json")))
        raise DataError(f"{folder}: needed one data set, found the splits {splits}: name the folder of one")
    try:
        state = json.loads(path.read_bytes())
        if state.get("_indices_data_files") or state.get("_indices_files"):
            raise DataError(
                f"{path}: needed rows in their order on disk, found an index: save it again after flatten_indices()"
            )
        names = [file["filename"] for file in state["_data_files"]]
        if not all(isinstance(name, str) for name in names):
            raise TypeError("_data_files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: needed the state of a saved data set, found: {error!r}") from error
    return names, state.get("_fingerprint")
