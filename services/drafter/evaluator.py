"""Exact greedy acceptance over the evaluation set, shared among the ranks, with its control."""

import torch

from common.config import Config
from services.drafter.evaluation import Acceptance, evaluate_batch, with_features_of_another_document
from services.drafter.group import Group
from services.drafter.model import DraftModel
from services.drafter.step import PackedBatch


class Evaluator:
    """Adds up one evaluation, batch by batch.

    The control runs the same text on another document's hidden states: what is left of the acceptance
    then did not come through the slots.
    """

    def __init__(self, model: DraftModel, frozen: tuple[torch.Tensor, torch.Tensor], config: Config) -> None:
        self._model = model
        self._embedding, self._head = frozen
        self._config = config
        self._own = Acceptance()
        self._control = Acceptance()

    def add(self, batch: PackedBatch) -> None:
        """Measure one batch."""
        self._own += self._measure(batch)
        self._control += self._measure(with_features_of_another_document(batch))

    def begin(self) -> None:
        """Forget what was measured."""
        self._own, self._control = Acceptance(), Acceptance()

    def close(self, group: Group, stopping: bool) -> tuple[Acceptance, Acceptance, bool]:
        """The acceptance and its control over all ranks, and whether any rank was told to stop."""
        counts = [self._own.num_rounds, self._own.num_tokens, self._control.num_rounds, self._control.num_tokens]
        total = group.add_up(torch.tensor([*counts, int(stopping)], device=self._embedding.device)).tolist()
        return Acceptance(*total[:2]), Acceptance(*total[2:4]), total[4] > 0

    def _measure(self, batch: PackedBatch) -> Acceptance:
        return evaluate_batch(self._model, self._embedding, self._head, batch, self._config)
