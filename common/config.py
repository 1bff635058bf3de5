"""The configuration of a run: every key, its type, its default and its limits, in one place.

A person writes TOML; `load` checks it and `launch.start_all` writes the result to
`<run>/config.json`, which is all that the other processes read (`read`).
"""

import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from common.errors import ConfigError
from common.json_file import write_json
from common.limits import check
from common.target_limits import refuse_quantized, refuse_scaled_embedding, refuse_special_mask
from common.target_shape import TargetShape, default_tap_layers, read_target_shape

DType = Literal["float32", "bfloat16"]
LayerType = Literal["full_attention", "sliding_attention"]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of the TOML file; unknown keys are errors."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """The frozen target."""

    path: str  # a folder with config.json, and with safetensors unless random_init
    random_init: bool = False  # weights made from the seed instead of read from the folder
    dtype: DType = "bfloat16"  # of the target's forward


class DraftConfig(Section, frozen=True, kw_only=True):
    """The draft model; 0 and [] mean "as the target" or "by the rule"."""

    num_layers: int = 5
    block_size: int = 16
    mask_token_id: int  # a vocabulary id that text never contains, never bos, eos or pad
    tap_layers: list[int] = []  # zero-based decoder layers of the target
    layer_types: list[LayerType] = []  # [] means full attention everywhere
    sliding_window: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0
    dtype: DType = "bfloat16"  # of the weights in the step; the master weights are float32
    init: str = ""  # a drafter folder of any known layout to begin from; "" means random weights
    init_fingerprint: str = ""  # of the files in it: filled in by start_all, never by a person


class SyntheticConfig(Section, frozen=True, kw_only=True):
    """Made-up data: random periodic token sequences, written into the run directory."""

    num_samples: int
    num_eval_samples: int
    min_length: int
    max_length: int


class DataConfig(Section, frozen=True, kw_only=True):
    """Prepared data sets (see launch.prepare)."""

    path: str = ""
    eval_path: str = ""  # "" means no evaluation, unless eval_paths names sets
    eval_paths: dict[str, str] = {}  # instead of it, several: name -> folder; acceptance is told apart by name
    synthetic: SyntheticConfig | None = None  # instead of all paths

    @property
    def eval_sets(self) -> dict[str, str]:
        """Every evaluation set, name -> folder, in their order; a single one is named after its folder."""
        return self.eval_paths or ({Path(self.eval_path).name: self.eval_path} if self.eval_path else {})


class PlanConfig(Section, frozen=True, kw_only=True):
    """Which samples make which batch; part of the identity of a run."""

    bucket_lengths: list[int]  # upper bounds in tokens, ascending
    max_tokens_per_batch: int  # also the capacity of a slot
    max_samples_per_batch: int = 64
    batches_per_step: int  # over all drafters; accumulation is batches_per_step / drafters
    epochs: int = 1


class RingConfig(Section, frozen=True, kw_only=True):
    """The shared-memory ring of each target."""

    num_slots: int = 4
    layout: Literal["packed", "split"] = "packed"
    dtype: DType = "bfloat16"  # of the hidden states in transit


class ActorsConfig(Section, frozen=True, kw_only=True):
    """One process per entry of `devices`."""

    devices: list[str]
    num_threads: int = 1


class TargetsConfig(ActorsConfig, frozen=True, kw_only=True):
    """The target processes."""

    compile: bool = False  # each decoder layer, with torch.compile: faster, and a longer warm-up; GPUs only


class TrainConfig(Section, frozen=True, kw_only=True):
    """Loss, anchors and optimizer."""

    learning_rate: float = 6e-4
    warmup_ratio: float = 0.04
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    loss: Literal["decay", "dpace"] = "decay"  # how the slots of a block are weighted
    decay_gamma: float = 7.0  # of "decay": weight of slot k is exp(-(k - 1) / gamma)
    contiguous_prefix: bool = True  # labels of a block end at its first token that is not supervised
    anchors_per_document: int = 512
    anchors_per_batch: int = 4096  # blocks of a batch at most; launch.balance finds the number that balances both sides
    head: Literal["exact", "fp8_logits", "fp8"] = "exact"  # of the loss: products as draft.dtype, the first in FP8, or both
    noise: Literal["off", "uniform", "gaussian"] = "off"
    noise_scale: float = 0.05
    max_nonfinite_steps: int = 5  # in a row; one more ends the run
    profile_steps: list[int] = []  # [first, last]: traced with torch.profiler, on every drafter


class EvaluationConfig(Section, frozen=True, kw_only=True):
    """Exact greedy acceptance on the evaluation set, before step 1 and after the last step."""

    every_steps: int = 0  # and after every so many steps; 0 means only first and last


class CheckpointConfig(Section, frozen=True, kw_only=True):
    """When the drafters save; they also save after the last step and when stopped."""

    every_steps: int = 500
    keep: int = 2  # the newest, beside the best


class SupervisionConfig(Section, frozen=True, kw_only=True):
    """When an actor is restarted, and when the run gives up."""

    max_restarts: int = 5  # per actor within the window
    window_s: float = 60.0
    max_deaths_without_progress: int = 3  # in a row, of one actor, with no new batch or step between them
    backoff_s: float = 0.5  # doubled with every restart in the window
    ready_timeout_s: float = 900.0  # from start to ready: loading and warm-up
    stall_timeout_s: float = 300.0  # no progress for longer: dumped, killed, restarted
    stop_timeout_s: float = 60.0  # from a stop request to the kill


class Config(Section, frozen=True, kw_only=True):
    """A whole run. `target_shape` is filled in by `load`, never by a person."""

    seed: int = 0
    model: ModelConfig
    draft: DraftConfig
    data: DataConfig
    plan: PlanConfig
    ring: RingConfig = RingConfig()
    targets: TargetsConfig
    drafters: ActorsConfig
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    target_shape: TargetShape | None = None

    @property
    def shape(self) -> TargetShape:
        """The shape of the target of a loaded configuration."""
        assert self.target_shape is not None, "the configuration was not loaded by load() or read()"
        return self.target_shape

    @property
    def num_anchors(self) -> int:
        """Blocks of a batch at most."""
        return self.train.anchors_per_batch

    @property
    def num_targets(self) -> int:
        """Number of target processes, and of rings."""
        return len(self.targets.devices)

    @property
    def num_drafters(self) -> int:
        """Number of drafter processes: the data-parallel world size."""
        return len(self.drafters.devices)

    @property
    def accumulation(self) -> int:
        """Batches per drafter and optimizer step."""
        return self.plan.batches_per_step // self.num_drafters


def load(path: Path, overrides: list[str], stand_in: Path | None = None) -> Config:
    """Read a TOML file, apply `key=value` overrides, check everything, fill in the defaults.

    Args:
        path: of the TOML file.
        overrides: applied in their order, so the last one wins.
        stand_in: a folder whose config.json is read instead where model.path does not exist.

    Raises:
        ConfigError: the file, a key or a combination of keys is wrong; the message names the key.
        ModelError: the target's folder is missing, or is of a kind that cannot be trained for.
    """
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    for override in overrides:
        _apply_override(tree, override)
    if "target_shape" in tree:
        raise ConfigError(f"{path}: target_shape is read from the model folder, not set")
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_name_the_key(str(error))}") from error
    if config.draft.init_fingerprint:
        raise ConfigError(f"{path}: draft.init_fingerprint is made from draft.init, not set")
    folder = Path(config.model.path).expanduser()
    if stand_in is not None and not folder.exists():
        folder = stand_in
    config = _fill_in(config, folder)
    check(config)
    _check_target(config, folder)
    return config


def read(run_dir: Path) -> Config:
    """Read `<run>/config.json` as `write` left it."""
    path = run_dir / "config.json"
    try:
        tree = msgspec.json.decode(path.read_bytes())
        if isinstance(tree, dict) and isinstance(tree.get("data"), dict):
            tree["data"].pop("skip_damaged", None)  # a key of earlier versions; other rows would give another plan hash
        return msgspec.convert(tree, Config)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {_name_the_key(str(error))}") from error


def write(config: Config, run_dir: Path) -> None:
    """Write `<run>/config.json` in one piece."""
    write_json(run_dir / "config.json", config)


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {override}: needed key=value, such as ring.num_slots=8")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    *tables, name = key.split(".")
    for table in tables:
        tree = tree.setdefault(table, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {override}: {table} is a value, not a table")
    tree[name] = value


def _name_the_key(message: str) -> str:
    """msgspec writes the place as `$.ring.num_slots`; people write `ring.num_slots`."""
    return message.replace("`$.", "`").replace("- at `$`", "at the top level").replace(" - at", " at")


def _check_target(config: Config, folder: Path) -> None:
    if not config.model.random_init:
        refuse_quantized(folder)
    refuse_scaled_embedding(folder)
    refuse_special_mask(folder, config.draft.mask_token_id)


def _fill_in(config: Config, folder: Path) -> Config:
    shape = read_target_shape(folder)
    draft = config.draft
    draft = msgspec.structs.replace(
        draft,
        tap_layers=draft.tap_layers or default_tap_layers(shape.num_hidden_layers, draft.num_layers),
        layer_types=draft.layer_types or ["full_attention"] * draft.num_layers,
        num_attention_heads=draft.num_attention_heads or shape.num_attention_heads,
        num_key_value_heads=draft.num_key_value_heads or shape.num_key_value_heads,
        head_dim=draft.head_dim or shape.head_dim,
        intermediate_size=draft.intermediate_size or shape.intermediate_size,
    )
    return msgspec.structs.replace(config, draft=draft, target_shape=shape)
