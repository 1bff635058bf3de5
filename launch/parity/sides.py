"""From what a person names to the two sides that are compared."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from common import config as configuration
from common.config import ActorsConfig, Config, DataConfig, DraftConfig, ModelConfig, PlanConfig, TargetsConfig
from common.errors import CheckpointError, ModelError
from common.run_dir import CHECKPOINTS, EXPORT
from common.target_shape import read_target_shape
from common.weights import find_head
from launch.decoding.full_target import load_full_target, stop_tokens
from launch.parity.causes import Side
from launch.parity.doubts import find_doubts
from launch.parity.folder import Folder, read_folder
from launch.parity.plain import PlainTarget, run_plain
from launch.parity.probe import Document, make_documents, read_documents
from launch.parity.training import run_training
from services.drafter.folder.checkpoint import checkpoint_folder, draft_identity, latest, load_weights
from services.drafter.folder.drafter_folder import differing_shapes, tensor_shapes
from services.drafter.folder.export import export

TRAINING = "training"  # the reference that is no folder
LONGEST_MADE_UP = 200  # tokens, where the windows ask for more


class Request(NamedTuple):
    """What a person asked for.

    Attributes:
        subject: a run directory or a drafter's folder.
        reference: TRAINING, or another of the two kinds of folder; None for the run itself or TRAINING.
        model: the target of the engine; None for that of the run.
        data: a prepared data set; None for the run's evaluation samples, or made-up ids.
        step: of the run's checkpoint; None for the newest.
        num_documents: shared among the evaluation sets, of each as many.
        max_tokens: of a document.
        device: of the target.
    """

    subject: Path
    reference: str | None
    model: Path | None
    data: Path | None
    step: int | None
    num_documents: int
    max_tokens: int
    device: torch.device


class Outcome(NamedTuple):
    """Both sides, executed.

    Attributes:
        needed: the reference.
        found: what is checked.
        doubts: what looks wrong with the second and cannot be decided by running it.
    """

    needed: Side
    found: Side
    doubts: list[str]


def is_run(path: Path) -> bool:
    """A run directory has checkpoints, a drafter's folder has not."""
    return (path / CHECKPOINTS).is_dir()


def run_both(request: Request) -> Outcome:
    """Execute the reference and what is checked.

    Raises:
        HeadraceError: something named is missing, unreadable, or does not fit the target.
    """
    reference = request.reference or (str(request.subject) if is_run(request.subject) else TRAINING)
    run = next((path for path in (Path(reference), request.subject) if is_run(path)), None)
    with _subject_folder(request) as path:
        folder = read_folder(path)
    config = _config(folder, run, request.model)
    _check_fits(folder, config)
    documents = _documents(request, folder, config)
    other = None if reference == TRAINING or is_run(Path(reference)) else read_folder(Path(reference))
    outcome = _run_engine(request, folder, other, config, documents)  # frees the whole target before it loads another
    if is_run(Path(reference)):
        return outcome._replace(needed=_run_side(Path(reference), request, documents))
    if reference == TRAINING:
        name = f"{folder.path} in training form, for this target"
        return outcome._replace(needed=_training_side(name, config, folder, request, documents))
    return outcome


def _run_engine(request: Request, folder: Folder, other: Folder | None, config: Config, documents: list[Document]) -> Outcome:
    """All that needs the whole target: what is checked, and as reference the other folder."""
    model = load_full_target(config, request.device)
    target = PlainTarget(model)
    found = _plain_side(folder, target, documents)
    needed = found
    if other is not None:
        _check_fits(other, config)
        needed = _plain_side(other, target, documents)
    doubts = find_doubts(folder, config.shape, stop_tokens(model) | _special_ids(model), documents)
    return Outcome(needed, found, doubts)


@contextlib.contextmanager
def _subject_folder(request: Request) -> Iterator[Path]:
    """The drafter's folder; of a run its export, or one made for the occasion of the step asked for."""
    if not is_run(request.subject):
        yield request.subject
        return
    ready = request.subject / EXPORT
    if request.step is None and ready.is_dir():
        yield ready
        return
    config = configuration.read(request.subject)
    step, weights = _checkpoint(request.subject, config, request.step)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / f"export of step {step}"
        export(folder, config, weights, step, None)
        yield folder


def _checkpoint(run: Path, config: Config, step: int | None) -> tuple[int, Mapping[str, Tensor]]:
    """The step and the weights of the checkpoint asked for, or of the newest."""
    folder = latest(run) if step is None else checkpoint_folder(run, step)
    if folder is None:
        raise CheckpointError(f"{run / 'checkpoints'}: needed a checkpoint, found none")
    checkpoint, weights = load_weights(folder, draft_identity(config))
    return checkpoint.step, weights


def _config(folder: Folder, run: Path | None, model: Path | None) -> Config:
    """A configuration that names the engine's target, in float32, and the drafter of `folder` as it would be trained."""
    if run is not None:
        config = configuration.read(run)
    elif model is not None:
        config = Config(
            model=ModelConfig(path=str(model)),
            draft=DraftConfig(mask_token_id=folder.mask_token_id),
            data=DataConfig(),
            plan=PlanConfig(bucket_lengths=[1], max_tokens_per_batch=1, batches_per_step=1),
            targets=TargetsConfig(devices=["cpu"]),
            drafters=ActorsConfig(devices=["cpu"]),
        )
    else:
        raise ModelError("--model: needed the folder of the target, found none; only a run names its own")
    change = msgspec.structs.replace
    target = change(config.model, dtype="float32") if model is None else ModelConfig(path=str(model), dtype="float32")
    shape = read_target_shape(Path(target.path).expanduser())
    return change(config, model=target, draft=_draft_config(folder), target_shape=shape)


def _draft_config(folder: Folder) -> DraftConfig:
    """What training would be told; rotation is not part of it, for it is the target's."""
    content, num_layers = folder.content, len(folder.kinds)
    return DraftConfig(
        num_layers=num_layers,
        block_size=folder.block_size,
        mask_token_id=folder.mask_token_id,
        tap_layers=folder.target_layer_ids,
        layer_types=content.get("layer_types") or ["full_attention"] * num_layers,
        sliding_window=content.get("sliding_window") or 0,
        num_attention_heads=folder.num_heads,
        num_key_value_heads=folder.num_key_value_heads,
        head_dim=folder.head_dim,
        intermediate_size=content["intermediate_size"],
        dtype="float32",
    )


def _check_fits(folder: Folder, config: Config) -> None:
    """What can only be wrong: it would end a side in the middle, or let transformers make up a head at random."""
    path = Path(config.model.path).expanduser()
    if not config.model.random_init and not config.shape.tie_word_embeddings:
        find_head(path)
    shape, layers = config.shape, folder.target_layer_ids
    last = shape.num_hidden_layers - 1
    lines = []
    if folder.content["hidden_size"] != shape.hidden_size:
        lines.append(f"hidden_size: needed {shape.hidden_size}, found {folder.content['hidden_size']}")
    if not 0 <= folder.mask_token_id < shape.vocab_size:
        lines.append(f"mask_token_id: needed an id below {shape.vocab_size}, found {folder.mask_token_id}")
    if not layers or not 0 <= min(layers) <= max(layers) <= last:
        lines.append(f"target_layer_ids: needed layers from 0 to {last}, found {layers}")
    needed = tensor_shapes(msgspec.structs.replace(config, draft=_draft_config(folder)))
    lines += differing_shapes(needed, {name: list(folder.tensors[name].shape) for name in needed})
    if lines:
        raise CheckpointError(f"{folder.path} does not fit this target: {'; '.join(lines)}")


def _documents(request: Request, folder: Folder, config: Config) -> list[Document]:
    """Samples where there are any, else made-up ids that are long enough for a window to matter."""
    held_out = [Path(path).expanduser() for path in config.data.eval_sets.values()]
    if sets := [request.data] if request.data else held_out:
        share = -(-request.num_documents // len(sets))
        return [document for path in sets for document in read_documents(path, share, request.max_tokens)]
    window = max(kind.window for kind in folder.kinds) + 2 * folder.block_size
    return make_documents(config.shape.vocab_size, {folder.mask_token_id}, min(window, LONGEST_MADE_UP), seed=0)


def _plain_side(folder: Folder, target: PlainTarget, documents: list[Document]) -> Side:
    return Side(
        f"{folder.path} as an engine runs it", run_plain(folder, target, documents), folder.tensors, folder.target_layer_ids
    )


def _run_side(run: Path, request: Request, documents: list[Document]) -> Side:
    config = configuration.read(run)
    step, weights = _checkpoint(run, config, request.step)
    trace = run_training(config, weights, documents, request.device)
    rounded = {name: weight.bfloat16().float() for name, weight in weights.items()}
    return Side(f"{run}, checkpoint of step {step}, in training form", trace, rounded, config.draft.tap_layers)


def _training_side(name: str, config: Config, folder: Folder, request: Request, documents: list[Document]) -> Side:
    weights = {name: folder.tensors[name] for name in tensor_shapes(config)}
    return Side(name, run_training(config, weights, documents, request.device), weights, folder.target_layer_ids)


def _special_ids(model: PreTrainedModel) -> set[int]:
    """Beginning, end and padding by the target's config.json."""
    text_config = model.config.get_text_config()
    found = [getattr(text_config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
    return {token for entry in found for token in (entry if isinstance(entry, list) else [entry]) if token is not None}
