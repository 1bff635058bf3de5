"""Resuming, saving and exporting a run: everything a rank reads from or writes to the run directory's drafter."""

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
from services.drafter.run_state import RunState

log = logging.getLogger(__name__)


class Checkpointer:
    """The checkpoints and the export of one run; rank 0 writes, all ranks read."""

    def __init__(self, run_dir: Path, config: Config, plan_hash: bytes, rank: int) -> None:
        self._run_dir = run_dir
        self._config = config
        self._plan_hash = plan_hash.hex()
        self._identity = checkpoints.draft_identity(config)
        self._writes = rank == 0

    def resume(self, model: DraftModel, optimizer: MasterAdamW) -> tuple[int, Evaluation | None]:
        """Load the newest checkpoint, or the drafter that `draft.init` names.

        Returns:
            The next batch of the sequence, and the evaluation of the loaded weights.

        Raises:
            CheckpointError: the checkpoint is damaged, or of another plan or draft model; or the drafter to begin from
                is unreadable, does not fit, or is not the one that the run was started with.
        """
        folder = checkpoints.latest(self._run_dir)
        if folder is None:
            self._begin(model, optimizer)
            return 0, None
        checkpoint, weights, state = checkpoints.load(folder, self._identity, self._plan_hash)
        optimizer.load_state_dict({**state, "master": optimizer.flatten(model, weights)})
        log.info("resumed from %s at batch %d", folder, checkpoint.next_batch)
        return checkpoint.next_batch, checkpoint.evaluation

    def _begin(self, model: DraftModel, optimizer: MasterAdamW) -> None:
        """Load the weights of `draft.init` as they are stored into the float32 masters; it has no optimizer state."""
        draft = self._config.draft
        if not draft.init:
            return
        drafter, found = read_fitting_drafter(Path(draft.init), self._config), fingerprint_drafter(Path(draft.init))
        if found != draft.init_fingerprint:
            needed = draft.init_fingerprint
            raise CheckpointError(f"draft.init: {draft.init}: needed the contents {needed[:12]}, found {found[:12]}")
        optimizer.load_state_dict({**optimizer.state_dict(), "master": optimizer.flatten(model, drafter.weights())})
        log.info("begins from %s (%s layout)", draft.init, drafter.layout)

    def is_worth_keeping(self, evaluation: Evaluation) -> bool:
        """Return True if the weights that were just evaluated belong on disk: they are there already, or are the best.

        The initial weights are not worth a checkpoint: they can be made again.
        """
        if checkpoints.checkpoint_folder(self._run_dir, evaluation.step).exists():
            return True
        best = find_best(self._run_dir)
        return evaluation.step > 0 and (best is None or evaluation.acceptance > best.acceptance)

    def save(self, model: DraftModel, optimizer: MasterAdamW, run: RunState, step: int, *, required: bool) -> None:
        """Write a checkpoint; a disk error ends the run only if the checkpoint is `required`."""
        if not self._writes:
            return
        state = optimizer.state_dict()
        del state["master"]
        checkpoint = Checkpoint(
            step=step,
            next_batch=run.position,
            plan_hash=self._plan_hash,
            draft=self._identity,
            evaluation=run.evaluation_of(step),
        )
        try:
            checkpoints.save(self._run_dir, checkpoint, optimizer.master_weights(model), state, self._config.checkpoint.keep)
        except CheckpointError as error:
            if required:
                raise
            log.error("%s; the run goes on without this checkpoint", error)

    def export(self, model: DraftModel, optimizer: MasterAdamW, run: RunState) -> None:
        """Write `<run>/export`."""
        if self._writes:
            weights, step = optimizer.master_weights(model), optimizer.num_steps
            export(self._run_dir / "export", self._config, weights, step, run.evaluation_of(step))
