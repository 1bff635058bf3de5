"""A trained draft model as the files that inference engines load (dflash.md section 5)."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from common.acceptance import Evaluation
from common.config import Config
from common.errors import CheckpointError
from services.drafter.folder.card import write_card
from services.drafter.folder.drafter_folder import CONFIG, differing_shapes, read_drafter, tensor_shapes
from services.drafter.folder.durable_folder import durable_folder
from services.drafter.folder.engine_config import LayoutName, engine_config

WEIGHTS, CARD = "model.safetensors", "README.md"
_ARCHITECTURES = (["DFlashDraftModel"], ["DFlash2DraftModel"], ["DFlashSpeculator"])


def export(
    folder: Path,
    config: Config,
    weights: Mapping[str, Tensor],
    step: int,
    evaluation: Evaluation | None,
    layout: LayoutName = "dflash",
) -> None:
    """Write `folder` with config.json, model.safetensors (bfloat16) and a README.md; replace an export that is there.

    `weights` are the master weights by parameter name after `step` optimizer steps, of any float type; `evaluation` is None
    if they were not measured.

    Raises:
        CheckpointError: the folder holds something else, the weights are not those of the draft model of `config`, the
            layout cannot hold it, the disk refused, or the written folder does not read back as the same drafter.
    """
    _check_replaceable(folder)
    needed = tensor_shapes(config)
    if lines := differing_shapes(needed, {name: list(weight.shape) for name, weight in weights.items()}):
        raise CheckpointError(f"{folder}: {'; '.join(lines)}")
    rounded = {name: weights[name].detach().to("cpu", torch.bfloat16).contiguous() for name in needed}
    content = engine_config(config, layout) | {"dtype": "bfloat16"}
    with durable_folder(folder) as aside:
        (aside / CONFIG).write_text(json.dumps(content, indent=2) + "\n")
        (aside / CARD).write_text(write_card(config, step, evaluation, layout))
        try:
            save_file(rounded, aside / WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:
            raise CheckpointError(f"{folder / WEIGHTS}: not written: {error}") from error
        _read_back(aside, config, rounded)


def _check_replaceable(folder: Path) -> None:
    """Refuse a folder that is neither empty nor an earlier export."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        architectures = json.loads((folder / CONFIG).read_text())["architectures"]
    except (OSError, ValueError, KeyError, TypeError):
        architectures = None
    if architectures not in _ARCHITECTURES:
        raise CheckpointError(f"{folder}: needed a new folder or an earlier export, found something else")


def _read_back(folder: Path, config: Config, needed: Mapping[str, Tensor]) -> None:
    """Read the folder back: settings must be those of `config`, tensors equal bit for bit."""
    drafter = read_drafter(folder)
    if misfits := drafter.misfits(config):
        raise CheckpointError(f"{folder}: reads back as another drafter: {'; '.join(misfits)}")
    for name, found in drafter.weights().items():
        if not torch.equal(found, needed[name].float()):
            raise CheckpointError(f"{folder}: tensor {name}: read back other bytes than were written; the disk is at fault")
