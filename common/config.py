"""The settings of a run: every key with its type, default, bounds and meaning, and the combinations that are refused.

A person writes TOML; `load` checks it and completes it from the target's folder, and `launch.start_all` writes the
result to `<run>/config.json`, which is all that the other processes read (`read`). `python -m launch.settings` prints the
reference, made from the fields below and their comments.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.draft_config import DraftConfig, check_draft, complete_draft
from common.errors import ConfigError
from common.quantized_weights import check_quantization
from common.run_dir import CONFIG, read_object, write_json
from common.target_limits import refuse_special_mask
from common.target_shape import TargetShape, read_target_shape
from common.typed_toml import (
    Count,
    Device,
    Devices,
    DType,
    Natural,
    NonNegative,
    Positive,
    Section,
    Share,
    convert,
    need,
    override,
    read_toml,
)


class ModelConfig(Section, frozen=True, kw_only=True):
    """The frozen target."""

    path: str  # a folder with config.json, and with safetensors unless random_init
    random_init: bool = False  # make the weights from the seed instead of reading them from the folder
    dtype: DType = "bfloat16"  # of the target's forward


class SyntheticConfig(Section, frozen=True, kw_only=True):
    """Random periodic token sequences, written into the run directory."""

    num_samples: Count  # for training
    num_eval_samples: Count  # held out
    min_length: Annotated[int, Meta(ge=2)]  # tokens of the shortest sample
    max_length: Count  # tokens of the longest sample


class DataConfig(Section, frozen=True, kw_only=True):
    """Prepared data sets (see launch.prepare), or made-up data."""

    path: str = ""  # folder of the training set
    eval_path: str = ""  # folder of the held-out set; "" means no evaluation, unless eval_paths names sets
    eval_paths: dict[str, str] = {}  # several held-out sets instead, name = folder; acceptance is reported for each
    synthetic: SyntheticConfig | None = None  # made-up data instead of all paths

    @property
    def eval_sets(self) -> dict[str, str]:
        """Every evaluation set, name -> folder, in their order; a single one is named after its folder."""
        return self.eval_paths or ({Path(self.eval_path).name: self.eval_path} if self.eval_path else {})


class PlanConfig(Section, frozen=True, kw_only=True):
    """Which samples make which batch; part of the identity of a run."""

    bucket_lengths: Annotated[list[Count], Meta(min_length=1)]  # upper bounds in tokens, ascending
    max_tokens_per_batch: Count  # with padding; also the capacity of a slot
    max_samples_per_batch: Annotated[int, Meta(ge=1, le=4096)] = 64  # rows of a batch at most
    batches_per_step: Count  # over all drafters; accumulation is batches_per_step / drafters
    epochs: Count = 1  # passes over the training set


class RingConfig(Section, frozen=True, kw_only=True):
    """The shared-memory ring of each target."""

    num_slots: Count = 4  # batches that a target can be ahead
    layout: Literal["packed", "split"] = "packed"  # of T tokens and K taps, [T, K, H] or [K, T, H]; joined devices: split
    dtype: DType = "bfloat16"  # of the hidden states in transit


class ActorsConfig(Section, frozen=True, kw_only=True):
    """One process per entry of `devices`."""

    devices: Annotated[list[Device], Meta(min_length=1)]  # one process on each; a device may be named again
    num_threads: Count = 1  # of torch, in each process


class TargetsConfig(ActorsConfig, frozen=True, kw_only=True):
    """The target processes."""

    devices: Annotated[list[Devices], Meta(min_length=1)]  # one process on each entry; "cuda:0+cuda:1" splits its layers
    precision: Literal["model", "checkpoint"] = "model"  # of linear layers: model.dtype, or FP8 as stored
    compile: bool = False  # each decoder layer, with torch.compile: faster, and a longer warm-up; GPUs only


class TrainConfig(Section, frozen=True, kw_only=True):
    """Loss, anchors and optimizer."""

    learning_rate: NonNegative = 6e-4  # the highest, after warm-up; decays by a cosine
    warmup_ratio: Share = 0.04  # share of the steps in which the learning rate rises
    max_grad_norm: Positive = 1.0  # gradients are scaled down to it
    weight_decay: NonNegative = 0.0  # of AdamW
    loss: Literal["decay", "dpace"] = "decay"  # weights of the slots of a block
    decay_gamma: Positive = 7.0  # of "decay": the weight of slot k is exp(-(k - 1) / gamma)
    selector_weight: NonNegative = 1.0  # of dflash2: the selector's loss beside the base loss; 0 trains the rest alone
    selector_warmup_ratio: Share = 0.0  # share of the steps, from the first, in which the selector's weight is 0
    selector_ramp_ratio: Share = 0.0  # share of the steps after those in which it rises to selector_weight
    contiguous_prefix: bool = True  # labels of a block end at its first token that is not supervised
    anchors_per_document: Count = 512  # blocks of a sample at most
    anchors_per_batch: Count = 4096  # blocks of a batch at most; launch.balance finds the number that balances both sides
    head: Literal["exact", "fp8_logits", "fp8"] = "exact"  # products of the loss: as draft.dtype, the first in FP8, or both
    noise: Literal["off", "uniform", "gaussian"] = "off"  # added to the hidden states
    noise_scale: NonNegative = 0.05  # half width or standard deviation of the noise
    max_nonfinite_steps: Natural = 5  # skipped in a row; one more ends the run
    profile_steps: list[Count] = []  # [first, last]: traced with torch.profiler, on every drafter


class EvaluationConfig(Section, frozen=True, kw_only=True):
    """Exact greedy acceptance on the evaluation set, before step 1 and after the last step."""

    every_steps: Natural = 0  # and after every so many steps; 0 means only first and last


class CheckpointConfig(Section, frozen=True, kw_only=True):
    """When the drafters save; they also save after the last step and when stopped."""

    every_steps: Count = 500  # optimizer steps between two checkpoints
    keep: Count = 2  # the newest, beside the best


class SupervisionConfig(Section, frozen=True, kw_only=True):
    """When an actor is restarted, and when the run gives up."""

    max_restarts: Natural = 5  # per actor within the window
    window_s: Positive = 60.0  # length of the window
    max_deaths_without_progress: Count = 3  # in a row, of one actor, with no new batch or step between them
    backoff_s: NonNegative = 0.5  # pause before a restart, doubled with every restart in the window
    ready_timeout_s: Positive = 900.0  # from start to ready: loading and warm-up
    stall_timeout_s: Positive = 300.0  # no progress for longer: stacks dumped, killed, restarted
    stop_timeout_s: NonNegative = 60.0  # from a stop request to the kill


class Config(Section, frozen=True, kw_only=True):
    """A whole run."""

    seed: Natural = 0  # of the plan, the anchors, the noise and all random weights
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
    target_shape: TargetShape | None = None  # filled in by `load`, never by a person

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
        return len(self.targets.devices)

    @property
    def num_drafters(self) -> int:
        """Number of drafter processes: the data-parallel world size."""
        return len(self.drafters.devices)

    @property
    def accumulation(self) -> int:
        """Batches per drafter and optimizer step."""
        return self.plan.batches_per_step // self.num_drafters


def load(path: Path, overrides: list[str], stand_in: Path | None = None, run_dir: Path | None = None) -> Config:
    """Read a TOML file, apply `key=value` overrides in their order, check everything, fill in the defaults.

    Where the folder model.path does not exist, config.json of the folder `stand_in` is read instead, if there is one. An
    earlier start in `run_dir` has the shape of the same target.

    Raises:
        ConfigError: the file, a key or a combination of keys is wrong; the message names the key.
        ModelError: the target's folder is missing, or is of a kind that cannot be trained for.
    """
    tree = read_toml(path)
    for text in overrides:
        override(tree, text)
    config = convert(tree, Config)
    need(config.target_shape is None, "target_shape", "to be left to model.path", "a value")
    need(not config.draft.init_fingerprint, "draft.init_fingerprint", "to be left to draft.init", "a value")
    folder = Path(config.model.path).expanduser()
    if stand_in is not None and not folder.exists():
        folder = stand_in
    if not config.model.random_init:
        check_quantization(folder)
    shape = read_target_shape(folder, _earlier_shape(run_dir))
    config = msgspec.structs.replace(config, draft=complete_draft(config.draft, shape), target_shape=shape)
    _check(config)
    refuse_special_mask(folder, config.draft.mask_token_id)
    return config


def read(run_dir: Path) -> Config:
    """Read `<run>/config.json` as `write` left it."""
    path = run_dir / CONFIG
    tree = read_object(path, ConfigError)
    if isinstance(tree.get("data"), dict):
        tree["data"].pop("skip_damaged", None)  # a key of earlier versions; other rows would give another plan hash
    return convert(tree, Config, prefix=f"{path}: ")


def _earlier_shape(run_dir: Path | None) -> TargetShape | None:
    """Return the shape that an earlier start left, if it can be read: check_resume compares the rest."""
    try:
        return read(run_dir).target_shape if run_dir is not None and (run_dir / CONFIG).is_file() else None
    except ConfigError:
        return None


def write(config: Config, run_dir: Path) -> None:
    write_json(run_dir / CONFIG, config)


def _check(config: Config) -> None:
    """Raise ConfigError for the first combination of settings that does not fit."""
    check_draft(config.draft, config.shape)
    _check_data(config.data)
    _check_plan(config.plan, config.num_drafters)
    _check_train(config.train, config.plan, config.shape)
    _check_targets(config.targets, config.ring.num_slots, config.draft.tap_layers[-1] + 1)
    on_gpus = all("cpu" not in entry and "+" not in entry for entry in config.targets.devices)
    fits = config.targets.precision == "model" or (config.model.dtype == "bfloat16" and on_gpus)
    needed = '"model", or model.dtype = "bfloat16" and targets of one GPU each'
    need(fits, "targets.precision", needed, '"checkpoint"')


def _check_targets(targets: TargetsConfig, num_slots: int, num_layers: int) -> None:
    for entry in targets.devices:
        names = entry.split("+")
        need(names[0] == "cpu" or len(set(names)) == len(names), "targets.devices", "each GPU once in an entry", entry)
        fits = len(names) <= num_layers
        need(fits, "targets.devices", f"at most {num_layers} devices for the {num_layers} layers up to the last tap", entry)
        slots = f"at least {len(names) + 1} for a target of {len(names)} devices"
        need(len(names) == 1 or num_slots > len(names), "ring.num_slots", slots, num_slots)
        need("cpu" not in names or not targets.compile, "targets.compile", "false for targets on a CPU", "true")


def _check_data(data: DataConfig) -> None:
    need(bool(data.path) != (data.synthetic is not None), "data", "either data.path or data.synthetic", "both or neither")
    num_named = sum([bool(data.eval_path), bool(data.eval_paths), data.synthetic is not None])
    need(num_named <= 1, "data", "one of data.eval_path, data.eval_paths and data.synthetic", f"{num_named} of them")
    for name, path in data.eval_paths.items():
        need(bool(name and path), "data.eval_paths", "names and folders", f"{name!r} = {path!r}")


def _check_plan(plan: PlanConfig, num_drafters: int) -> None:
    buckets, capacity = plan.bucket_lengths, plan.max_tokens_per_batch
    need(buckets == sorted(set(buckets)), "plan.bucket_lengths", "ascending lengths", buckets)
    need(capacity >= buckets[-1], "plan.max_tokens_per_batch", f"room for the longest bucket {buckets[-1]}", capacity)
    shared = plan.batches_per_step % num_drafters == 0
    need(shared, "plan.batches_per_step", f"a multiple of the {num_drafters} drafters", plan.batches_per_step)


def _check_train(train: TrainConfig, plan: PlanConfig, shape: TargetShape) -> None:
    samples, window = plan.max_samples_per_batch, train.profile_steps
    fits = train.anchors_per_batch >= samples
    need(fits, "train.anchors_per_batch", f"at least plan.max_samples_per_batch {samples}", train.anchors_per_batch)
    divisible = shape.vocab_size % 16 == shape.hidden_size % 16 == 0
    need(train.head == "exact" or divisible, "train.head", "vocabulary and hidden size divisible by 16 for fp8", train.head)
    need(not window or (len(window) == 2 and window[0] <= window[1]), "train.profile_steps", "[first, last]", window)
