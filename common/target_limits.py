"""Targets that are refused by the JSON files of their folder, before weights are loaded."""

from pathlib import Path
from typing import Any

from common.errors import ConfigError, ModelError
from common.run_dir import read_object
from common.target_shape import read_target_config

_SPECIAL = ("bos", "eos", "pad")


def refuse_special_mask(folder: Path, mask_token_id: int) -> None:
    """Raise ConfigError if the mask token begins, ends or pads a text of this target."""
    for key, path, found in _special_ids(folder):
        if mask_token_id in (found if isinstance(found, list) else [found]):
            raise ConfigError(
                f"draft.mask_token_id: needed an id that text never contains, found {mask_token_id}, the {key} of {path}"
            )


def _special_ids(folder: Path) -> list[tuple[str, Path, Any]]:
    """Return key, file and value of the special tokens in config.json and generation_config.json."""
    path = folder / "config.json"
    contents = [(path, part) for part in read_target_config(folder)]
    path = folder / "generation_config.json"
    if path.is_file():
        contents.append((path, read_object(path, ModelError)))
    keys = [f"{name}_token_id" for name in _SPECIAL]
    return [(key, path, content[key]) for path, content in contents for key in keys if content.get(key) is not None]
