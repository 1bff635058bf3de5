"""Exact greedy acceptance over the evaluation sets, shared among the ranks, with its control.

G groups (set and category of a sample), B block size.
"""

from collections.abc import Callable

import numpy as np
import torch
from msgspec.structs import asdict

from common.acceptance import Evaluation, SetAcceptance
from common.config import Config
from common.data.held_out import HeldOut
from services.drafter.model.acceptance import evaluate_batch, summarise, with_features_of_another_document
from services.drafter.model.batch import Ints, PackedBatch
from services.drafter.model.model import DraftModel


class Evaluator:
    """Adds up one evaluation, batch by batch, as rounds: int64 [G + 1, B].

    Row g counts the rounds of group g that emitted 1 .. B tokens, the last row those of the control. The control runs the
    same text on the hidden states of another document: any acceptance that is left did not come through the slots.
    """

    def __init__(self, model: DraftModel, frozen: tuple[torch.Tensor, torch.Tensor], config: Config) -> None:
        self._model = model
        self._embedding, self._head = frozen
        self._config = config
        groups = HeldOut.open(config.data).groups()
        self._groups = sorted(set(groups))
        indices = {group: index for index, group in enumerate(self._groups)}
        self._group_of = np.array([indices[group] for group in groups], dtype=np.int64)
        self._mine = np.zeros((len(self._groups) + 1, config.draft.block_size), dtype=np.int64)

    def begin(self) -> None:
        """Reset the counts."""
        self._mine[:] = 0

    def add(self, batch: PackedBatch) -> None:
        """Measure one batch."""
        np.add.at(self._mine, self._group_of[batch.sample_ids], self._measure(batch))
        self._mine[-1] += self._measure(with_features_of_another_document(batch)).sum(0)

    def close(self, add_up: Callable[[torch.Tensor], torch.Tensor], *, stopping: bool) -> tuple[torch.Tensor, bool]:
        """Add up over all ranks through `add_up`; returns the rounds, and True if any rank is stopping."""
        mine = np.append(self._mine, int(stopping))
        total = add_up(torch.from_numpy(mine).to(self._embedding.device))
        return total[:-1].view(self._mine.shape), bool(total[-1].item())

    def make_rounds(self) -> torch.Tensor:
        """Return zero rounds on the device."""
        return torch.zeros(self._mine.shape, dtype=torch.int64, device=self._embedding.device)

    def summarise(self, rounds: torch.Tensor, step: int) -> Evaluation:
        """Return the evaluation that counted these rounds after `step` optimizer steps."""
        counts = rounds.cpu().numpy()
        return Evaluation(
            **asdict(summarise(counts[:-1].sum(0))),
            step=step,
            acceptance_other_prompt=summarise(counts[-1]).acceptance,
            sets={name: self._summarise_set(name, counts) for name in self._config.data.eval_sets},
        )

    def _summarise_set(self, name: str, rounds: Ints) -> SetAcceptance:
        members = [index for index, (owner, _) in enumerate(self._groups) if owner == name]
        categories = {self._groups[index][1]: summarise(rounds[index]) for index in members if self._groups[index][1]}
        return SetAcceptance(**asdict(summarise(rounds[members].sum(0))), categories=categories)

    def _measure(self, batch: PackedBatch) -> Ints:
        return evaluate_batch(self._model, self._embedding, self._head, batch, self._config)
