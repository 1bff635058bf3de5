"""What a rank keeps of the run on disk: where it stands, and the drafter it ends with."""

import logging
from pathlib import Path

from common.config import Config
from common.errors import CheckpointError
from services.drafter import checkpoint as checkpoints
from services.drafter.checkpoint import Checkpoint
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
        self.acceptance: float | None = None  # the latest, for checkpoint and export

    def resume(self, model: DraftModel, optimizer: MasterAdamW) -> int:
        """Take over the newest checkpoint, if there is one; returns the next batch of the sequence.

        Raises:
            CheckpointError: the checkpoint is damaged, or of another plan or draft model.
        """
        folder = checkpoints.latest(self._run_dir)
        if folder is None:
            return 0
        checkpoint, weights, state = checkpoints.load(folder, self._identity, self._plan_hash)
        optimizer.load_state_dict({**state, "master": optimizer.flatten(model, weights)})
        self.acceptance = checkpoint.metrics.get("acceptance")
        log.info("resumed from %s at batch %d", folder, checkpoint.next_batch)
        return checkpoint.next_batch

    def save(self, model: DraftModel, optimizer: MasterAdamW, step: int, next_batch: int, *, required: bool) -> None:
        """Write a checkpoint; a disk that refuses ends the run only where the checkpoint is `required`."""
        if not self._writes:
            return
        state = optimizer.state_dict()
        del state["master"]
        metrics = {} if self.acceptance is None else {"acceptance": self.acceptance}
        checkpoint = Checkpoint(
            step=step, next_batch=next_batch, plan_hash=self._plan_hash, draft=self._identity, metrics=metrics
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
            export(self._run_dir / "export", self._config, weights, optimizer.num_steps, self.acceptance)
