"""The shape of a target is read from every form of config.json, and what is missing is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from common import config
from common.errors import ConfigError, ModelError
from common.target_shape import default_tap_layers, read_target_shape, read_vocab_size
from tests.builders.targets import write_shape

CONFIGS = Path("launch/configs")
TINY = CONFIGS / "tiny.toml"


def test_a_target_that_is_missing_or_incomplete_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.path: needed a model folder with config\.json, found none in .*absent"):
        config.load(TINY, [f"model.path={tmp_path / 'absent'}"])
    with pytest.raises(ModelError, match="needed the key 'vocab_size'"):
        read_target_shape(write_shape(tmp_path / "short", model_type="llama"))
    broken = write_shape(tmp_path / "broken")
    (broken / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        read_target_shape(broken)
    (broken / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="needed an object, found list"):
        read_target_shape(broken)


def test_a_target_without_rope_theta_is_an_error_and_no_default(tmp_path: Path) -> None:
    keys = json.loads((CONFIGS / "tiny_target" / "config.json").read_text())
    del keys["rope_theta"], keys["rope_parameters"]
    with pytest.raises(ModelError, match="rope_theta"):
        read_target_shape(write_shape(tmp_path / "target", **keys))


@pytest.mark.parametrize(
    ("keys", "theta"),
    [
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}, 1e6),
        (
            {
                "rope_parameters": {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 5e5}},
                "rope_theta": 1,
            },
            5e5,
        ),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": None}, 5e5),
        ({"rope_parameters": None, "rope_theta": 2e6}, 2e6),
    ],
)
def test_theta_is_that_of_the_full_attention_layers(tmp_path: Path, keys: dict[str, Any], theta: float) -> None:
    tiny = json.loads((CONFIGS / "tiny_target" / "config.json").read_text())
    assert read_target_shape(write_shape(tmp_path / "target", **tiny | keys)).rope_theta == theta


def test_a_target_of_experts_only_needs_the_size_of_the_draft(tmp_path: Path) -> None:
    tiny = json.loads((CONFIGS / "tiny_target" / "config.json").read_text())
    del tiny["intermediate_size"]
    path = f"model.path={write_shape(tmp_path / 'target', **tiny | {'moe_intermediate_size': 16})}"
    with pytest.raises(ConfigError) as caught:
        config.load(TINY, [path])
    message = "draft.intermediate_size: needed at least 1, for config.json of the target names none, found 0"
    assert str(caught.value) == message
    assert config.load(TINY, [path, "draft.intermediate_size=96"]).draft.intermediate_size == 96


def test_the_vocabulary_is_read_without_the_rest(tmp_path: Path) -> None:
    assert read_vocab_size(write_shape(tmp_path / "flat", vocab_size=7)) == 7
    assert read_vocab_size(write_shape(tmp_path / "nested", text_config={"vocab_size": 9})) == 9
    with pytest.raises(ModelError, match="needed the key 'vocab_size'"):
        read_vocab_size(write_shape(tmp_path / "short"))


@pytest.mark.parametrize(
    ("num_hidden_layers", "num_taps", "taps"),
    [(36, 5, [1, 9, 17, 25, 33]), (64, 5, [1, 16, 31, 46, 61]), (36, 1, [18]), (30, 2, [1, 27])],
)
def test_taps_by_the_rule(num_hidden_layers: int, num_taps: int, taps: list[int]) -> None:
    assert default_tap_layers(num_hidden_layers, num_taps) == taps
