"""The progress of a run: the state that is neither weights nor optimizer state.

    unknown --resume (from disk)--------------------------> known --advance, record_step, record_evaluation--> known
       |                                                      ^
       +----begin_transfer--> partial --load_state_dict-------+
                                 |
                                 +--the sender died--> resume, or an error where the disk has no checkpoint

G groups of evaluation samples, B block size.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from common.acceptance import Evaluation

UNKNOWN = -1


class RunState:
    """Progress of one rank; equal on all ranks that are at the same position."""

    def __init__(self, rounds: Tensor, summarise: Callable[[Tensor, int], Evaluation]) -> None:
        self.position = UNKNOWN  # the first batch of the sequence that is not in the weights; until resumed or received
        self.step = UNKNOWN  # the last optimizer step that this or another rank made since the run was resumed
        self.num_skipped = 0  # steps that were not finite, in a row up to now
        self.evaluation: Evaluation | None = None  # the last one, for checkpoint and export
        self._evaluated_at = UNKNOWN  # the position right after the last evaluation
        self._evaluated_step = UNKNOWN
        self._rounds = rounds  # int64 [G + 1, B] on the device: the counts of the last evaluation (see `Evaluator.close`)
        self._summarise = summarise  # makes an evaluation of counts and the number of optimizer steps before it
        self._is_partial = False  # a transfer of weights from another rank was interrupted; the weights are unusable

    @property
    def is_just_evaluated(self) -> bool:
        """Return True if the last evaluation measured the present weights."""
        return self.position == self._evaluated_at

    def evaluation_of(self, step: int) -> Evaluation | None:
        """Return the last evaluation if it measured the weights after `step` optimizer steps."""
        return self.evaluation if self.evaluation is not None and self.evaluation.step == step else None

    def resume(self, position: int, evaluation: Evaluation | None) -> None:
        """Take the position of a checkpoint, or 0 for the beginning of the run.

        Raises:
            RuntimeError: there is no checkpoint, and the first weights are partly overwritten.
        """
        if position == 0 and self._is_partial:
            raise RuntimeError("the rank that sent its state died meanwhile, and there is no checkpoint: start afresh")
        self.position, self.step, self.num_skipped, self.evaluation = position, UNKNOWN, 0, evaluation
        self._evaluated_at = self._evaluated_step = UNKNOWN
        self._is_partial = False

    def record_step(self, *, skipped: bool) -> None:
        """Count the steps in a row that were skipped."""
        self.num_skipped = self.num_skipped + 1 if skipped else 0

    def record_evaluation(self, rounds: Tensor, step: int) -> Evaluation:
        """Keep and return an evaluation that ended at the present position (waits for the device)."""
        self._rounds.copy_(rounds)
        self._evaluated_at, self._evaluated_step = self.position, step
        self.evaluation = self._summarise(self._rounds, step)
        return self.evaluation

    def begin_transfer(self) -> None:
        """Mark the weights as unusable until the state of another rank is complete."""
        self.position, self._is_partial = UNKNOWN, True

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as tensors, to be overwritten by another rank's."""
        counters = [self.position, self.step, self.num_skipped, self._evaluated_step, self._evaluated_at]
        return {"counters": torch.tensor(counters, device=self._rounds.device), "rounds": self._rounds}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._rounds.copy_(state["rounds"])
        counters = state["counters"].tolist()
        self.position, self.step, self.num_skipped, self._evaluated_step, self._evaluated_at = counters
        if self._evaluated_step != UNKNOWN:
            self.evaluation = self._summarise(self._rounds, self._evaluated_step)
        self._is_partial = False
