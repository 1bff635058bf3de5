"""Targets that are refused by their JSON files, before a process starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from common import config
from common.errors import ConfigError
from common.target_limits import refuse_special_mask

TINY = Path("launch/configs/tiny.toml")
SHAPE: dict[str, Any] = json.loads(Path("launch/configs/tiny_target/config.json").read_text())
WRAPPER = {"model_type": "llava"}


def make_target(folder: Path, generation: dict[str, Any] | None = None, **keys: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE | keys))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def load(folder: Path, *overrides: str, random_init: str = "false") -> config.Config:
    return config.load(TINY, [f"model.path={folder}", f"model.random_init={random_init}", *overrides])


@pytest.mark.parametrize(
    ("keys", "generation", "found"),
    [
        ({"bos_token_id": 63}, None, "bos_token_id of {folder}/config.json"),
        ({"pad_token_id": 63}, None, "pad_token_id of {folder}/config.json"),
        (WRAPPER | {"text_config": SHAPE | {"eos_token_id": [1, 63]}}, None, "eos_token_id of {folder}/config.json"),
        ({}, {"eos_token_id": [2, 63]}, "eos_token_id of {folder}/generation_config.json"),
        ({}, {"pad_token_id": 63}, "pad_token_id of {folder}/generation_config.json"),
    ],
)
def test_a_mask_token_that_text_contains_is_refused(
    tmp_path: Path, keys: dict[str, Any], generation: dict[str, Any] | None, found: str
) -> None:
    folder = make_target(tmp_path / "target", generation, **keys)
    with pytest.raises(ConfigError) as caught:
        load(folder, random_init="true")
    message = "draft.mask_token_id: needed an id that text never contains, found 63, the "
    assert str(caught.value) == message + found.format(folder=folder)
    refuse_special_mask(folder, 62)
