"""Resume, save and export a run: everything that a rank reads from the run directory or writes there as the drafter."""

import logging
from pathlib import Path

from common.acceptance import Evaluation, find_best
from common.actor.messages import Welcome
from common.config import Config
from common.drafter_files import fingerprint_drafter
from common.errors import CheckpointError, DamagedCheckpointError
from common.run_dir import EXPORT
from services.drafter.folder import checkpoint as checkpoints
from services.drafter.folder.checkpoint import Checkpoint
from services.drafter.folder.drafter_folder import read_initial_drafter
from services.drafter.folder.export import export
from services.drafter.training.optimizer import MasterAdamW
from services.drafter.training.run_state import RunState

log = logging.getLogger(__name__)


class Checkpointer:
    """The checkpoints and the export of one run; rank 0 writes, all ranks read."""

    def __init__(self, run_dir: Path, config: Config, welcome: Welcome, rank: int) -> None:
        self._run_dir = run_dir
        self._config = config
        self._plan_hash = welcome.plan_hash.hex()
        self._num_batches, self._num_steps = welcome.num_batches, welcome.num_steps
        self._identity = checkpoints.draft_identity(config)
        self._writes = rank == 0

    def resume(self, optimizer: MasterAdamW) -> tuple[int, Evaluation | None]:
        """Load the newest complete checkpoint, or else the drafter that `draft.init` names.

        Every rank decides for itself and finds the same. Damaged checkpoints are named in the log and set aside.

        Returns:
            The next batch of the sequence, and the evaluation of the loaded weights.

        Raises:
            CheckpointError: all checkpoints are damaged, or the newest intact one is of another plan or draft model; or
                the drafter to begin from is unreadable, does not fit, or is not the one that the run was started with.
        """
        damaged: dict[Path, DamagedCheckpointError] = {}
        for folder in reversed(checkpoints.find_all(self._run_dir)):
            try:
                found = self._load(folder, optimizer)
            except DamagedCheckpointError as error:
                log.error("%s; trying an older checkpoint", error)
                damaged[folder] = error
                continue
            for other in damaged if self._writes else ():
                checkpoints.set_aside(other)
            return found
        if damaged:
            newest = next(iter(damaged.values()))
            raise CheckpointError(f"needed an intact checkpoint, found none among {len(damaged)}: {newest}")
        self._begin(optimizer)
        return 0, None

    def _load(self, folder: Path, optimizer: MasterAdamW) -> tuple[int, Evaluation | None]:
        checkpoint, weights, state = checkpoints.load(folder, self._identity, self._plan_hash)
        self._check_cursor(folder, checkpoint)
        try:
            optimizer.load(weights, state)
        except ValueError as error:
            raise DamagedCheckpointError(f"{folder}: {error}") from error
        log.info("resumed from %s at batch %d", folder, checkpoint.next_batch)
        return checkpoint.next_batch, checkpoint.evaluation

    def _check_cursor(self, folder: Path, checkpoint: Checkpoint) -> None:
        """Check the numbers of a record, which may have no checksum; the end of the sequence must be of the last step."""
        batch, step, group = checkpoint.next_batch, checkpoint.step, self._config.plan.batches_per_step
        if not 0 <= batch <= self._num_batches or batch % group:
            needed = f"a multiple of {group} from 0 to {self._num_batches}"
            raise DamagedCheckpointError(f"{folder}: next_batch: needed {needed}, found {batch}")
        if not 0 <= step <= self._num_steps or (batch == self._num_batches and step != self._num_steps):
            raise DamagedCheckpointError(f"{folder}: step: needed at most {self._num_steps}, found {step} at batch {batch}")

    def _begin(self, optimizer: MasterAdamW) -> None:
        """Load the weights of `draft.init` into the float32 masters; it has no optimizer state."""
        draft = self._config.draft
        if not draft.init:
            return
        drafter, found = read_initial_drafter(Path(draft.init), self._config), fingerprint_drafter(Path(draft.init))
        if found != draft.init_fingerprint:
            needed = draft.init_fingerprint
            raise CheckpointError(f"draft.init: {draft.init}: needed the contents {needed[:12]}, found {found[:12]}")
        optimizer.load(optimizer.master_weights() | drafter.weights(), optimizer.state_dict())  # what it lacks stays fresh
        log.info("begins from %s (%s layout)", draft.init, drafter.layout)

    def is_worth_keeping(self, evaluation: Evaluation) -> bool:
        """Return True if the weights that were just evaluated are on disk already, or are the best.

        The initial weights are not worth a checkpoint: they can be made again.
        """
        if checkpoints.checkpoint_folder(self._run_dir, evaluation.step).exists():
            return True
        best = find_best(self._run_dir)
        return evaluation.step > 0 and (best is None or evaluation.acceptance > best.acceptance)

    def save(self, optimizer: MasterAdamW, run: RunState, step: int, *, required: bool) -> None:
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
            checkpoints.save(self._run_dir, checkpoint, optimizer.master_weights(), state, self._config.checkpoint.keep)
        except CheckpointError as error:
            if required:
                raise
            log.error("%s; the run goes on without this checkpoint", error)

    def export(self, optimizer: MasterAdamW, run: RunState) -> None:
        """Write `<run>/export`."""
        if self._writes:
            weights, step = optimizer.master_weights(), optimizer.num_steps
            export(self._run_dir / EXPORT, self._config, weights, step, run.evaluation_of(step))
