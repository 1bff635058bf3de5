"""The checkpoints of a run: `<run>/checkpoints/step-00000100/` with the weights, the optimizer and the cursor.

The position of a run is one integer, kept in the same folder as the weights: both are there or neither is. The record
holds the SHA-256 of the other files and of itself. A folder that was found damaged is renamed `step-00000100.damaged`.
"""

import hashlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from common.acceptance import Evaluation, find_best
from common.actor import faults
from common.config import Config
from common.draft_config import LayerType
from common.errors import CheckpointError, DamagedCheckpointError
from common.run_dir import CHECKPOINTS
from common.sealed_record import is_intact, seal
from services.drafter.folder.durable_folder import durable_folder, remove_folder, remove_leftovers, replace_file

WEIGHTS, OPTIMIZER, RECORD = "model.pt", "optimizer.pt", "checkpoint.json"
DAMAGED = ".damaged"  # suffix of a folder that does not count as a checkpoint any more


class DraftIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identity of a draft model; weights of another identity do not fit it."""

    block_size: int
    mask_token_id: int
    tap_layers: list[int]
    layer_types: list[LayerType]
    sliding_window: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    is_causal: bool | None = None  # the defaults of this and the following are those of records from before DFlash 2
    kind: str = "dflash"
    conv_group_size: int = 0  # these three are 0 for DFlash
    selector_rank: int = 0
    selector_top_k: int = 0


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The content of checkpoint.json; `next_batch` is the first batch of the run that is not in the weights."""

    step: int
    next_batch: int
    plan_hash: str
    draft: DraftIdentity
    evaluation: Evaluation | None = None  # of exactly these weights; None if they were not measured
    files: dict[str, str] = {}  # SHA-256 by name; empty in a checkpoint from before checksums, which is not checked
    sha256: str = ""  # of the record itself


def draft_identity(config: Config) -> DraftIdentity:
    values = msgspec.structs.asdict(config.shape) | msgspec.structs.asdict(config.draft)
    if config.draft.kind == "dflash":
        values |= {"conv_group_size": 0, "selector_rank": 0, "selector_top_k": 0}
    return DraftIdentity(**{field: values[field] for field in DraftIdentity.__struct_fields__})


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    return run_dir / CHECKPOINTS / f"step-{step:08d}"


def save(run_dir: Path, checkpoint: Checkpoint, weights: Mapping[str, Tensor], optimizer: Mapping[str, Any], keep: int) -> Path:
    """Write a checkpoint, then remove all but the newest `keep` and the best; returns its folder. Only rank 0 calls it.

    If the step has a checkpoint already (an evaluation or a stop followed it) only its record is replaced: one step of one
    plan has the same weights, and their measured acceptance stays.

    Raises:
        CheckpointError: the disk is full or cannot be written. Everything that was there before is still there.
    """
    folder = checkpoint_folder(run_dir, checkpoint.step)
    clean(run_dir)
    if (existing := _find(folder)) is not None:
        _check_draft(folder, existing, checkpoint.draft)
        _check_plan(folder, existing, checkpoint.plan_hash)
        measured = checkpoint.evaluation or existing.evaluation
        replaced = msgspec.structs.replace(checkpoint, evaluation=measured, files=existing.files)
        replace_file(folder / RECORD, seal(replaced))
        return folder
    with durable_folder(folder) as aside:
        _write_tensors(aside / WEIGHTS, dict(weights))
        faults.reach("drafter.mid_save")
        _write_tensors(aside / OPTIMIZER, dict(optimizer))
        files = {name: _digest(aside / name) for name in (WEIGHTS, OPTIMIZER)}
        (aside / RECORD).write_bytes(seal(msgspec.structs.replace(checkpoint, files=files)))
    best = find_best(run_dir)
    for old in find_all(run_dir)[:-keep]:
        if best is None or old != checkpoint_folder(run_dir, best.step):
            remove_folder(old)
    return folder


def clean(run_dir: Path) -> None:
    """Remove the leftovers of killed saves; called at the start of a run."""
    remove_leftovers(run_dir / CHECKPOINTS)


def latest(run_dir: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None."""
    return next(reversed(find_all(run_dir)), None)


def load(folder: Path, draft: DraftIdentity, plan_hash: str) -> tuple[Checkpoint, dict[str, Tensor], dict[str, Any]]:
    """Read what `save` wrote, onto the CPU: checkpoint, master weights, optimizer state.

    Raises:
        CheckpointError: of another plan, or of another draft model; the message has both values.
        DamagedCheckpointError: a file is missing, unreadable or not the one that was written.
    """
    _check_plan(folder, read_checkpoint(folder), plan_hash)
    checkpoint, weights = load_weights(folder, draft)
    return checkpoint, weights, _read_tensors(folder / OPTIMIZER, checkpoint)


def load_weights(folder: Path, draft: DraftIdentity) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Load a checkpoint of any plan, without the optimizer; raises as `load` does."""
    checkpoint = read_checkpoint(folder)
    _check_draft(folder, checkpoint, draft)
    return checkpoint, _read_tensors(folder / WEIGHTS, checkpoint)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read checkpoint.json alone."""
    path = folder / RECORD
    try:
        content = path.read_bytes()
        checkpoint = msgspec.json.decode(content, type=Checkpoint)
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path}: not a checkpoint: {error}") from error
    if not is_intact(content):
        raise DamagedCheckpointError(f"{path}: needed the content that was written, found another checksum")
    return checkpoint


def find_all(run_dir: Path) -> list[Path]:
    """Return the checkpoints, oldest first; a folder gets such a name only when all of it is on disk."""
    folders = (run_dir / CHECKPOINTS).glob("step-*")
    return sorted(folder for folder in folders if re.fullmatch(r"step-\d{8,}", folder.name))


def set_aside(folder: Path) -> None:
    """Rename a damaged checkpoint, so that it does not count and can still be examined."""
    aside = folder.with_name(folder.name + DAMAGED)
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)


def _find(folder: Path) -> Checkpoint | None:
    """Return the record of a checkpoint, or None if there is no intact one."""
    try:
        return read_checkpoint(folder)
    except DamagedCheckpointError:
        return None


def _check_draft(folder: Path, checkpoint: Checkpoint, draft: DraftIdentity) -> None:
    for field in draft.__struct_fields__:
        needed, found = getattr(draft, field), getattr(checkpoint.draft, field)
        if needed != found:
            raise CheckpointError(f"{folder}: of another draft model: {field}: needed {needed}, found {found}")


def _check_plan(folder: Path, checkpoint: Checkpoint, plan_hash: str) -> None:
    if checkpoint.plan_hash != plan_hash:
        raise CheckpointError(f"{folder}: of another batch plan: plan hash: needed {plan_hash}, found {checkpoint.plan_hash}")


def _write_tensors(path: Path, tensors: dict[str, Any]) -> None:
    with path.open("wb") as file:  # not by name: torch would hide why the disk refused
        torch.save(tensors, file)


def _read_tensors(path: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    try:
        if checkpoint.files and (found := _digest(path)) != (needed := checkpoint.files.get(path.name, "none")):
            raise DamagedCheckpointError(f"{path}: needed SHA-256 {needed[:12]}, found {found[:12]}")
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except DamagedCheckpointError:
        raise
    except Exception as error:  # a damaged archive or pickle may raise any exception
        reason = str(error).partition("\n")[0]
        raise DamagedCheckpointError(f"{path}: cannot be read: {reason}") from error
    if not isinstance(tensors, dict):
        raise DamagedCheckpointError(f"{path}: needed tensors by name, found {type(tensors).__name__}")
    return tensors


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
