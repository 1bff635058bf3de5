"""From the command line to the two drafters that are compared, and the documents that they are executed on."""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from common import config as configuration
from common.config import Config, ModelConfig
from common.draft_config import DraftConfig
from common.errors import CheckpointError, ModelError
from common.target_shape import read_target_shape
from common.weights import find_head
from launch import export
from launch.decoding.pair import bare_config
from launch.parity.folder import Folder, read_folder
from launch.parity.folder_warnings import find_warnings
from launch.parity.probe import Document, make_documents, read_documents
from launch.parity.reference import EngineDrafter, Reference, TrainedDrafter, compare
from launch.parity.report import Report
from services.drafter.folder.drafter_folder import differing_shapes, tensor_shapes

TRAINING = "training"  # the reference that is no folder
LONGEST_MADE_UP = 200  # tokens, where the windows need more


def answer(options: argparse.Namespace) -> Report:
    """Compare the drafters of a command line (see launch.parity.__main__).

    Raises:
        HeadraceError: something named is missing, unreadable, or does not fit the target.
    """
    named = options.reference or (str(options.subject) if _is_run(options.subject) else TRAINING)
    run = next((path for path in (Path(named), options.subject) if _is_run(path)), None)
    with _subject_folder(options) as path:
        folder = read_folder(path)
    config = _make_config(folder, run, options.model)
    _check_fits(folder, config)
    documents = _choose_documents(options, folder, config)
    reference = _make_reference(named, folder, config, options)
    warnings = find_warnings(folder, config, documents)
    return compare(reference, EngineDrafter(folder, config, options.device), documents, warnings)


def _is_run(path: Path) -> bool:
    return (path / "checkpoints").is_dir()


@contextlib.contextmanager
def _subject_folder(options: argparse.Namespace) -> Iterator[Path]:
    """Yield the drafter's folder; of a run its export, or a temporary one of the step."""
    run: Path = options.subject
    if not _is_run(run):
        yield run
    elif options.step is None and (run / "export").is_dir():
        yield run / "export"
    else:
        checkpoint = export.find_checkpoint(run, options.step, best=False)
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made) / f"export of {checkpoint.name}"
            export.run(run, folder, checkpoint, "dflash")
            yield folder


def _make_reference(named: str, folder: Folder, config: Config, options: argparse.Namespace) -> Reference:
    if _is_run(Path(named)):
        return TrainedDrafter.of_run(Path(named), options.step, options.device)
    if named == TRAINING:
        return TrainedDrafter.of_folder(folder, config, options.device)
    other = read_folder(Path(named))
    _check_fits(other, config)
    return EngineDrafter(other, config, options.device)


def _make_config(folder: Folder, run: Path | None, model: Path | None) -> Config:
    """Return a configuration with the engine's target, in float32, and the drafter of `folder` as it would be trained."""
    if run is None and model is None:
        raise ModelError("--model: needed the folder of the target, found none; only a run names its own")
    of_run = configuration.read(run) if run else None
    change = msgspec.structs.replace
    target = ModelConfig(path=str(model), dtype="float32") if model or not of_run else change(of_run.model, dtype="float32")
    shape, draft = read_target_shape(Path(target.path).expanduser()), _draft_config(folder)
    return change(of_run, model=target, draft=draft, target_shape=shape) if of_run else bare_config(target, draft, shape)


def _draft_config(folder: Folder) -> DraftConfig:
    """Return the drafter's part of a configuration; rotation is not in it, for it is the target's."""
    fields = folder.settings.keys() & set(DraftConfig.__struct_fields__)
    return DraftConfig(**{name: folder.settings[name] for name in fields} | {"dtype": "float32"})


def _check_fits(folder: Folder, config: Config) -> None:
    """Refuse a folder or a target that would end a trace in the middle, or whose head transformers would make at random."""
    if not config.model.random_init and not config.shape.tie_word_embeddings:
        find_head(Path(config.model.path).expanduser())
    shape, settings = config.shape, folder.settings
    last, layers, mask = shape.num_hidden_layers - 1, settings["tap_layers"], settings["mask_token_id"]
    lines = []
    if settings["hidden_size"] != shape.hidden_size:
        lines.append(f"hidden_size: needed {shape.hidden_size}, found {settings['hidden_size']}")
    if not 0 <= mask < shape.vocab_size:
        lines.append(f"mask_token_id: needed an id below {shape.vocab_size}, found {mask}")
    if not layers or not 0 <= min(layers) <= max(layers) <= last:
        lines.append(f"target_layer_ids: needed layers from 0 to {last}, found {layers}")
    needed = tensor_shapes(msgspec.structs.replace(config, draft=_draft_config(folder)))
    lines += differing_shapes(needed, {name: list(folder.tensors[name].shape) for name in needed if name in folder.tensors})
    if lines:
        raise CheckpointError(f"{folder.path} does not fit this target: {'; '.join(lines)}")


def _choose_documents(options: argparse.Namespace, folder: Folder, config: Config) -> list[Document]:
    """Return samples where there are any, else made-up ids that are long enough for a window to matter."""
    held_out = [Path(path).expanduser() for path in config.data.eval_sets.values()]
    if sets := [options.data] if options.data else held_out:
        share = -(-options.num_documents // len(sets))
        return [document for path in sets for document in read_documents(path, share, options.max_tokens)]
    window = max(kind.window for kind in folder.kinds) + 2 * folder.settings["block_size"]
    return make_documents(config.shape.vocab_size, {folder.settings["mask_token_id"]}, min(window, LONGEST_MADE_UP), seed=0)
