"""Exact greedy acceptance over the evaluation sets, shared among the ranks, with its control.

G groups (set and category of a sample), B block size.
"""

from collections.abc import Callable

import numpy as np
import torch
from msgspec.structs import asdict

from common.acceptance import Evaluation, SetAcceptance
from common.config import Config
from common.held_out import HeldOut
from services.drafter.anchors import Ints
from services.drafter.evaluation import evaluate_batch, summarise, with_features_of_another_document
from services.drafter.model import DraftModel
from services.drafter.step import PackedBatch

NEVER = -1


class Evaluator:
    """Adds up one evaluation, batch by batch.

    The control runs the same text on another document's hidden states: what is left of the acceptance
    then did not come through the slots.

    Attributes:
        rounds: int64 [G + 1, B], the last whole evaluation over all ranks: rounds that emitted 1 .. B tokens, per group,
            and those of the control; on the device, so that ranks can hand it over.
        step: optimizer steps before that evaluation; NEVER where there was none.
    """

    def __init__(self, model: DraftModel, frozen: tuple[torch.Tensor, torch.Tensor], config: Config) -> None:
        self._model = model
        self._embedding, self._head = frozen
        self._config = config
        groups = HeldOut.open(config.data).groups()
        self._groups = sorted(set(groups))
        places = {group: place for place, group in enumerate(self._groups)}
        self._group_of = np.array([places[group] for group in groups], dtype=np.int64)
        self._mine = np.zeros((len(self._groups) + 1, config.draft.block_size), dtype=np.int64)
        self.rounds = torch.zeros(self._mine.shape, dtype=torch.int64, device=self._embedding.device)
        self.step = NEVER

    def begin(self) -> None:
        """Forget what was measured."""
        self._mine[:] = 0

    def add(self, batch: PackedBatch) -> None:
        """Measure one batch."""
        np.add.at(self._mine, self._group_of[batch.sample_ids], self._measure(batch))
        self._mine[-1] += self._measure(with_features_of_another_document(batch)).sum(0)

    def close(self, add_up: Callable[[torch.Tensor], torch.Tensor], step: int, stopping: bool) -> bool:
        """Add up over all ranks through `add_up`; returns whether any rank was told to stop."""
        mine = np.append(self._mine, int(stopping))
        total = add_up(torch.from_numpy(mine).to(self.rounds.device))
        self.rounds.copy_(total[:-1].view(self.rounds.shape))
        self.step = step
        return bool(total[-1].item())

    def result(self) -> Evaluation | None:
        """The last whole evaluation; None where there was none."""
        if self.step == NEVER:
            return None
        rounds = self.rounds.cpu().numpy()
        return Evaluation(
            **asdict(summarise(rounds[:-1].sum(0))),
            step=self.step,
            acceptance_other_prompt=summarise(rounds[-1]).acceptance,
            sets={name: self._summarise_set(name, rounds) for name in self._config.data.eval_sets},
        )

    def _summarise_set(self, name: str, rounds: Ints) -> SetAcceptance:
        mine = [place for place, (owner, _) in enumerate(self._groups) if owner == name]
        named = {self._groups[place][1]: summarise(rounds[place]) for place in mine if self._groups[place][1]}
        return SetAcceptance(**asdict(summarise(rounds[mine].sum(0))), categories=named)

    def _measure(self, batch: PackedBatch) -> Ints:
        return evaluate_batch(self._model, self._embedding, self._head, batch, self._config)
