"""Every rule of the configuration names its key; the shipped configurations hold what they promise."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from common import config
from common.errors import ConfigError
from common.target_shape import default_tap_layers
from tests.builders.targets import write_shape

CONFIGS = Path("launch/configs")
TINY = CONFIGS / "tiny.toml"


def qwen3_8b(folder: Path) -> Path:
    return write_shape(
        folder,
        model_type="qwen3",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1000000,
        max_position_embeddings=40960,
    )


def qwen3_6_27b(folder: Path) -> Path:
    text = {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
        "max_position_embeddings": 262144,
    }
    return write_shape(folder, model_type="qwen3_5", text_config=text, tie_word_embeddings=False)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("targets.devices=[]", "targets.devices: needed 1 or more entries, found []"),
        ("drafters.devices=[]", "drafters.devices: needed 1 or more entries, found []"),
        ("targets.devices=['gpu']", "targets.devices: needed cpu or cuda:N, or several of one kind joined by +, found gpu"),
        ("targets.devices=['cuda']", "targets.devices: needed cpu or cuda:N, or several of one kind joined by +, found cuda"),
        ("targets.compile=true", "targets.compile: needed false for targets on a CPU, found true"),
        ("drafters.devices=['cpu', 'cuda:']", "drafters.devices: needed cpu or cuda:N, found cuda:"),
        ("targets.num_threads=0", "targets.num_threads: needed at least 1, found 0"),
        ("drafters.num_threads=-1", "drafters.num_threads: needed at least 1, found -1"),
        ("train.noise_scale=inf", "train.noise_scale: needed a finite number, found inf"),
        ("train.learning_rate=nan", "train.learning_rate: needed a finite number, found nan"),
        ("supervision.stall_timeout_s=-inf", "supervision.stall_timeout_s: needed a finite number, found -inf"),
        ("ring.num_slots=0", "ring.num_slots: needed at least 1, found 0"),
        ("data={}", "data: needed either data.path or data.synthetic, found both or neither"),
        ("data.path=somewhere", "data: needed either data.path or data.synthetic, found both or neither"),
        ("train.anchors_per_document=0", "train.anchors_per_document: needed at least 1, found 0"),
        ("train.anchors_per_batch=7", "train.anchors_per_batch: needed at least plan.max_samples_per_batch 8, found 7"),
        ("train.anchors_per_batch=many", "train.anchors_per_batch: needed an integer, at least 1, found many"),
        ("train.profile_steps=[4, 3]", "train.profile_steps: needed [first, last], found [4, 3]"),
        ("train.decay_gamma=0", "train.decay_gamma: needed more than 0, found 0"),
        ("checkpoint.every_steps=0", "checkpoint.every_steps: needed at least 1, found 0"),
        ("checkpoint.keep=0", "checkpoint.keep: needed at least 1, found 0"),
        (
            "supervision.max_deaths_without_progress=0",
            "supervision.max_deaths_without_progress: needed at least 1, found 0",
        ),
        ("draft.num_layers=0", "draft.num_layers: needed at least 1, found 0"),
        ("draft.block_size=1", "draft.block_size: needed at least 2, found 1"),
        ("draft.mask_token_id=64", "draft.mask_token_id: needed an id below the vocabulary size 64, found 64"),
        ("draft.mask_token_id=-1", "draft.mask_token_id: needed at least 0, found -1"),
        ("draft.tap_layers=[2, 1]", "draft.tap_layers: needed ascending from 0 to 3, found [2, 1]"),
        ("draft.tap_layers=[1, 1]", "draft.tap_layers: needed ascending from 0 to 3, found [1, 1]"),
        ("draft.tap_layers=[1, 4]", "draft.tap_layers: needed ascending from 0 to 3, found [1, 4]"),
        ("draft.tap_layers=[-1, 1]", "draft.tap_layers: needed at least 0, found -1"),
        ("draft.layer_types=['full_attention']", "draft.layer_types: needed 2 entries, found ['full_attention']"),
        (
            "draft.layer_types=['sliding_attention', 'full_attention']",
            "draft.sliding_window: needed at least 1, found 0",
        ),
        ("draft.num_attention_heads=3", "draft.num_attention_heads: needed a multiple of num_key_value_heads 2, found 3"),
        (
            "draft.intermediate_size=-1",
            "draft.intermediate_size: needed at least 0, found -1",
        ),
        ("plan.bucket_lengths=[]", "plan.bucket_lengths: needed 1 or more entries, found []"),
        ("plan.bucket_lengths=[32, 16]", "plan.bucket_lengths: needed ascending lengths, found [32, 16]"),
        ("plan.bucket_lengths=[16, 16]", "plan.bucket_lengths: needed ascending lengths, found [16, 16]"),
        ("plan.bucket_lengths=[0, 16]", "plan.bucket_lengths: needed at least 1, found 0"),
        ("plan.max_tokens_per_batch=63", "plan.max_tokens_per_batch: needed room for the longest bucket 64, found 63"),
        ("plan.max_samples_per_batch=0", "plan.max_samples_per_batch: needed at least 1 and at most 4096, found 0"),
        ("plan.batches_per_step=0", "plan.batches_per_step: needed at least 1, found 0"),
        ("plan.batches_per_step=3", "plan.batches_per_step: needed a multiple of the 2 drafters, found 3"),
        ("plan.epochs=0", "plan.epochs: needed at least 1, found 0"),
    ],
)
def test_a_value_that_does_not_fit_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(TINY, [override])
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ring.num_slot=8", "ring.num_slot: needed a key among num_slots, layout, dtype, found none of this name"),
        ("colour=1", "colour: needed a key among seed, model, draft, data, plan, ring, targets, drafters, train, evaluation, "),
        ("data.synthetic.colour=1", "data.synthetic.colour: needed a key among num_samples, num_eval_samples, min_length, "),
        ("data.eval_paths.held=1", "data.eval_paths: needed a string, found {'held': 1}"),
        ("data.synthetic=1", "data.synthetic: needed a table, found 1"),
        ("data.synthetic={}", "data.synthetic.num_samples: needed an integer, at least 1, found nothing"),
        ("ring.num_slots=many", "ring.num_slots: needed an integer, at least 1, found many"),
        ("ring.num_slots=2.5", "ring.num_slots: needed an integer, at least 1, found 2.5"),
        ("ring.num_slots=true", "ring.num_slots: needed an integer, at least 1, found True"),
        ("ring.layout=heap", "ring.layout: needed packed or split, found heap"),
        ("model.dtype=float16", "model.dtype: needed bfloat16 or float32, found float16"),
        ("model.random_init=1", "model.random_init: needed true or false, found 1"),
        ("plan.max_samples_per_batch=4097", "plan.max_samples_per_batch: needed at least 1 and at most 4096, found 4097"),
        (
            "targets.devices=cpu",
            "targets.devices: needed a list of 1 or more entries, each cpu or cuda:N, or several of one kind joined by +",
        ),
        ("targets.devices=[1]", "targets.devices: needed cpu or cuda:N, or several of one kind joined by +, found 1"),
        ("plan={}", "plan.bucket_lengths: needed a list of 1 or more entries, each an integer, at least 1, found nothing"),
        ("target_shape={}", "target_shape.model_type: needed a string, found nothing"),
        ("draft.init_fingerprint=ab", "draft.init_fingerprint: needed to be left to draft.init, found a value"),
    ],
)
def test_a_key_that_is_unknown_missing_or_of_another_type_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(TINY, [override])
    assert str(caught.value).startswith(message)


def test_the_shape_of_the_target_is_not_set() -> None:
    shape = {**msgspec.to_builtins(config.load(TINY, []).shape)}
    values = ", ".join(f"{key} = {json.dumps(value)}" for key, value in shape.items())
    with pytest.raises(ConfigError, match=r"target_shape: needed to be left to model\.path, found a value"):
        config.load(TINY, [f"target_shape={{{values}}}"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ring.num_slots", "--set ring.num_slots: needed key=value"),
        ("=8", "--set =8: needed key=value"),
        ("seed.deep=1", "--set seed.deep=1: seed is a value, not a table"),
    ],
)
def test_an_override_that_is_not_one_is_named(tmp_path: Path, override: str, message: str) -> None:
    seeded = tmp_path / "seeded.toml"
    seeded.write_text("seed = 3\n" + TINY.read_text())
    with pytest.raises(ConfigError) as caught:
        config.load(seeded, [override])
    assert message in str(caught.value)


def test_overrides_are_typed_and_the_last_one_wins() -> None:
    overrides = ["ring.num_slots=8", "seed=7", "train.noise=uniform", "draft.tap_layers=[0, 3]", "seed=9"]
    loaded = config.load(TINY, overrides)
    assert (loaded.ring.num_slots, loaded.seed, loaded.train.noise) == (8, 9, "uniform")
    assert loaded.draft.tap_layers == [0, 3]
    assert loaded.ring.layout == config.load(TINY, []).ring.layout


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"[model\n", "{path}: not TOML"), (b"\xff\xfe", "{path}: not TOML"), (b"", "model: needed a table, found nothing")],
)
def test_a_file_that_is_not_a_configuration_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        config.load(path, [])
    assert str(caught.value).startswith(message.format(path=path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read: No such file"):
        config.load(tmp_path / "absent.toml", [])


def test_missing_keys_of_the_draft_come_from_the_target() -> None:
    loaded = config.load(TINY, [])
    draft, shape = loaded.draft, loaded.shape
    assert (shape.model_type, shape.vocab_size, shape.hidden_size, shape.num_hidden_layers) == ("llama", 64, 32, 4)
    assert (draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim) == (4, 2, 8)
    assert draft.intermediate_size == shape.intermediate_size == 64
    assert draft.layer_types == ["full_attention", "full_attention"]
    assert (loaded.num_targets, loaded.num_drafters, loaded.accumulation) == (2, 2, 1)


def test_written_and_read_again_it_is_the_same(tmp_path: Path) -> None:
    loaded = config.load(TINY, ["data.synthetic.num_samples=5", "supervision.window_s=1.5"])
    config.write(loaded, tmp_path)
    assert config.read(tmp_path) == loaded
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_run_directory_without_a_sound_config_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        config.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: "):
        config.read(tmp_path)
    (tmp_path / "config.json").write_text('{"seeds": 1}')
    with pytest.raises(ConfigError, match=r"config\.json: .*seeds"):
        config.read(tmp_path)


def test_a_configuration_is_frozen() -> None:
    loaded = config.load(TINY, [])
    with pytest.raises(AttributeError):
        loaded.seed = 1  # type: ignore[misc]


def test_the_reference_run(tmp_path: Path) -> None:
    loaded = config.load(CONFIGS / "qwen3_6_27b.toml", [f"model.path={qwen3_6_27b(tmp_path / 'target')}"])
    draft = loaded.draft
    assert (loaded.shape.hidden_size, loaded.shape.vocab_size, loaded.shape.rope_theta) == (5120, 248320, 1e7)
    assert draft.tap_layers == default_tap_layers(64, 5)
    assert draft.layer_types == ["sliding_attention"] * 4 + ["full_attention"]
    assert (draft.sliding_window, draft.block_size, draft.mask_token_id) == (2048, 16, 248070)
    assert (draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim, draft.intermediate_size) == (
        32,
        8,
        128,
        17408,
    )
    assert loaded.targets.devices == [f"cuda:{i}" for i in range(5)]
    assert loaded.drafters.devices == [f"cuda:{i}" for i in range(5, 8)]
    assert (len(loaded.plan.bucket_lengths), loaded.plan.bucket_lengths[-1], loaded.plan.epochs) == (6, 2048, 6)
    assert loaded.train.learning_rate == 6e-4


def test_the_qwen3_8b_run(tmp_path: Path) -> None:
    loaded = config.load(CONFIGS / "qwen3_8b.toml", [f"model.path={qwen3_8b(tmp_path / 'target')}"])
    draft = loaded.draft
    assert draft.tap_layers == default_tap_layers(36, 5)
    assert draft.layer_types == ["full_attention"] * 5
    assert (draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim, draft.intermediate_size) == (
        32,
        8,
        128,
        12288,
    )
    assert draft.mask_token_id == 151669
    assert loaded.targets.compile


def test_the_dflash2_runs(tmp_path: Path) -> None:
    shapes = {"qwen3_6_27b": qwen3_6_27b(tmp_path / "large"), "qwen3_8b": qwen3_8b(tmp_path / "small")}
    for name, folder in shapes.items():
        loaded = config.load(CONFIGS / f"{name}_dflash2.toml", [f"model.path={folder}"])
        draft, plain = loaded.draft, config.load(CONFIGS / f"{name}.toml", [f"model.path={folder}"])
        assert (draft.kind, draft.is_causal, draft.sliding_window) == ("dflash2", False, 2048)
        assert draft.layer_types == ["sliding_attention"] * 5
        assert (draft.selector_rank, draft.selector_top_k, draft.conv_group_size) == (256, 16, 16)
        assert draft.mask_token_id == plain.draft.mask_token_id
        assert (loaded.plan, loaded.targets, loaded.drafters) == (plain.plan, plain.targets, plain.drafters)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("draft.conv_group_size=7", "draft.conv_group_size: needed a divisor of hidden size 32, found 7"),
        ("draft.selector_top_k=65", "draft.selector_top_k: needed at most the vocabulary 64, found 65"),
        ("draft.selector_top_k=1", "draft.selector_top_k: needed"),
    ],
)
def test_settings_of_dflash2_that_do_not_fit(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config.load(TINY, ["draft.kind=dflash2", override])


def test_the_demo_run(tmp_path: Path) -> None:
    keys = json.loads((CONFIGS / "tiny_target" / "config.json").read_text()) | {"num_hidden_layers": 30, "vocab_size": 49152}
    loaded = config.load(CONFIGS / "demo.toml", [f"model.path={write_shape(tmp_path / 'target', **keys)}"])
    assert loaded.draft.tap_layers == default_tap_layers(30, 2) == [1, 27]
    assert set(loaded.targets.devices + loaded.drafters.devices) == {"cpu"}
    assert (loaded.model.dtype, loaded.draft.dtype, loaded.ring.dtype) == ("float32", "float32", "bfloat16")
