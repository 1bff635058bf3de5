"""What a rank keeps of the run on disk: where it stands, and the drafter it ends with."""

import logging
from pathlib import Path

from common.acceptance import Evaluation, find_best
from common.config import Config
from common.drafter_files import fingerprint_drafter
from common.errors import CheckpointError
from services.drafter import checkpoint as checkpoints
from services.drafter.checkpoint import Checkpoint
from services.drafter.drafter_folder import read_fitting_drafter
from services.drafter.export import export
from services.drafter.model import DraftModel
from services.drafter.optimizer import MasterAdamW

log = logging.getLogger(__name__)


class Snapshots:
    """The checkpoints and the export of one run; rank 0 writes, all read."""

    def __init__(self, run_dir: Path, config: Config, plan_hash: bytes, rank: int) -> None:
        self._run_dir = run_dir
        self._config = config
        self._plan_hash = plan_hash.hex()
        self._identity = checkpoints.draft_identity(config)
        self._writes = rank == 0
        self.evaluation: Evaluation | None = None  # the latest, for checkpoint and export

    def resume(self, model: DraftModel, optimizer: MasterAdamW) -> int:
        """Take over the newest checkpoint, else what `draft.init` names; returns the next batch of the sequence.

        Raises:
            CheckpointError: the checkpoint is damaged, or of another plan or draft model; or the drafter to begin from
                is unreadable, does not fit, or is not the one that the run was started with.
        """
        folder = checkpoints.latest(self._run_dir)
        if folder is None:
            self._begin(model, optimizer)
            return 0
        checkpoint, weights, state = checkpoints.load(folder, self._identity, self._plan_hash)
        optimizer.load_state_dict({**state, "master": optimizer.flatten(model, weights)})
        self.evaluation = checkpoint.evaluation
        log.info("resumed from %s at batch %d", folder, checkpoint.next_batch)
        return checkpoint.next_batch

    def _begin(self, model: DraftModel, optimizer: MasterAdamW) -> None:
        """A warm start takes the weights as they are stored, in float32 masters, and no optimizer state."""
        draft = self._config.draft
        if not draft.init:
            return
        drafter, found = read_fitting_drafter(Path(draft.init), self._config), fingerprint_drafter(Path(draft.init))
        if found != draft.init_fingerprint:
            needed = draft.init_fingerprint
            raise CheckpointError(f"draft.init: {draft.init}: needed the contents {needed[:12]}, found {found[:12]}")
        optimizer.load_state_dict({**optimizer.state_dict(), "master": optimizer.flatten(model, drafter.weights())})
        log.info("begins from %s (%s layout)", draft.init, drafter.layout)

    def is_worth_keeping(self) -> bool:
        """Whether the weights that were just evaluated belong on disk: their checkpoint is there, or none is better.

        The weights that a run began with are not: who has them has them already.
        """
        evaluation, best = self.evaluation, find_best(self._run_dir)
        if evaluation is None or checkpoints.checkpoint_folder(self._run_dir, evaluation.step).exists():
            return evaluation is not None
        return evaluation.step > 0 and (best is None or evaluation.acceptance > best.acceptance)

    def save(self, model: DraftModel, optimizer: MasterAdamW, step: int, next_batch: int, *, required: bool) -> None:
        """Write a checkpoint; a disk that refuses ends the run only where the checkpoint is `required`."""
        if not self._writes:
            return
        state = optimizer.state_dict()
        del state["master"]
        evaluation = self._measured(step)
        checkpoint = Checkpoint(
            step=step, next_batch=next_batch, plan_hash=self._plan_hash, draft=self._identity, evaluation=evaluation
        )
        try:
            checkpoints.save(self._run_dir, checkpoint, optimizer.master_weights(model), state, self._config.checkpoint.keep)
        except CheckpointError as error:
            if required:
                raise
            log.error("%s; the run goes on without this checkpoint", error)

    def export(self, model: DraftModel, optimizer: MasterAdamW) -> None:
        """Write `<run>/export`."""
        if self._writes:
            weights = optimizer.master_weights(model)
            step = optimizer.num_steps
            export(self._run_dir / "export", self._config, weights, step, self._measured(step))

    def _measured(self, step: int) -> Evaluation | None:
        """The latest evaluation where it is of these very weights."""
        return self.evaluation if self.evaluation is not None and self.evaluation.step == step else None
