"""The shape of a target is read from every form of config.json, and what is missing is named."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
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
    with pytest.raises(ModelError, match="needed the key 'model_type'"):
        read_target_shape(write_shape(tmp_path / "short", vocab_size=7))
    with pytest.raises(ModelError, match="needed the key 'num_attention_heads', found none"):
        read_target_shape(write_shape(tmp_path / "mamba", model_type="mamba"))
    with pytest.raises(ModelError, match=r"needed an architecture that transformers knows, found: .*unheard_of"):
        read_target_shape(write_shape(tmp_path / "unknown", model_type="unheard_of"))
    with pytest.raises(ModelError, match="needed a decoder that transformers can make, found bart"):
        read_target_shape(write_shape(tmp_path / "encoder", model_type="bart"))
    with pytest.raises(ModelError, match=r"needed a first layer that reads rows of the embedding, .* found gpt2"):
        read_target_shape(write_shape(tmp_path / "positions", model_type="gpt2"))
    with pytest.raises(ModelError, match="needed layers that run once, found dory with n_recurrent_loops 2"):
        read_target_shape(write_shape(tmp_path / "loop", model_type="dory"))
    broken = write_shape(tmp_path / "broken")
    (broken / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        read_target_shape(broken)
    (broken / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="needed an object, found list"):
        read_target_shape(broken)


def test_keys_that_are_left_to_the_class_have_its_defaults(tmp_path: Path) -> None:
    """A folder of Gemma 3 states the keys that differ from its class only."""
    shape = read_target_shape(write_shape(tmp_path / "flat", model_type="gemma3_text", num_hidden_layers=5))
    assert (shape.num_hidden_layers, shape.head_dim, shape.vocab_size, shape.rope_theta) == (5, 256, 262208, 1e6)
    nested = read_target_shape(write_shape(tmp_path / "nested", model_type="gemma3", text_config={"hidden_size": 64}))
    assert (nested.model_type, nested.hidden_size, nested.tie_word_embeddings) == ("gemma3_text", 64, True)
    renamed = read_target_shape(write_shape(tmp_path / "renamed", model_type="gptj", n_embd=48, n_layer=3, n_head=4))
    assert (renamed.hidden_size, renamed.num_hidden_layers, renamed.head_dim) == (48, 3, 12)
    one_key_head = read_target_shape(write_shape(tmp_path / "falcon", model_type="falcon", multi_query=True))
    assert one_key_head.num_key_value_heads == 1


def test_a_shape_is_read_again_only_where_config_json_changed(tmp_path: Path) -> None:
    """Without torch by a child process, whose answer an earlier start keeps in its run directory."""
    shape = read_target_shape(write_shape(tmp_path / "target", model_type="llama"))
    earlier = msgspec.structs.replace(shape, vocab_size=7)
    assert read_target_shape(tmp_path / "target", earlier) is earlier
    assert read_target_shape(write_shape(tmp_path / "other", model_type="llama", vocab_size=9), earlier).vocab_size == 9


@pytest.mark.parametrize(("model_type", "answer"), [("llama", "llama False"), ("dory", "needed layers that run once")])
def test_a_process_without_torch_stays_without_it(tmp_path: Path, model_type: str, answer: str) -> None:
    program = f"""
import sys
from pathlib import Path
from common.errors import ModelError
from common.target_shape import read_target_shape
try:
    print(read_target_shape(Path({str(tmp_path / "target")!r})).model_type, "torch" in sys.modules)
except ModelError as error:
    print(error)
"""
    write_shape(tmp_path / "target", model_type=model_type)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer in done.stdout


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
    path = f"model.path={write_shape(tmp_path / 'target', **tiny | {'model_type': 'jetmoe', 'intermediate_size': 0})}"
    with pytest.raises(ConfigError) as caught:
        config.load(TINY, [path])
    message = "draft.intermediate_size: needed at least 1, for config.json of the target names none, found 0"
    assert str(caught.value) == message
    assert config.load(TINY, [path, "draft.intermediate_size=96"]).draft.intermediate_size == 96


def test_the_vocabulary_is_read_without_the_rest(tmp_path: Path) -> None:
    assert read_vocab_size(write_shape(tmp_path / "flat", vocab_size=7)) == 7
    assert read_vocab_size(write_shape(tmp_path / "nested", text_config={"vocab_size": 9})) == 9
    assert read_vocab_size(write_shape(tmp_path / "short", model_type="llama")) == 32000


@pytest.mark.parametrize(
    ("num_hidden_layers", "num_taps", "taps"),
    [(36, 5, [1, 9, 17, 25, 33]), (64, 5, [1, 16, 31, 46, 61]), (36, 1, [18]), (30, 2, [1, 27])],
)
def test_taps_by_the_rule(num_hidden_layers: int, num_taps: int, taps: list[int]) -> None:
    assert default_tap_layers(num_hidden_layers, num_taps) == taps
