"""Exact greedy acceptance over the evaluation sets, shared among the ranks."""

from collections.abc import Callable

import numpy as np
import torch

from services.drafter.model.acceptance import AcceptanceCount


class Evaluator(AcceptanceCount):
    """Adds up the batches of one rank, then those of all."""

    def begin(self) -> None:
        """Reset the counts."""
        self.rounds[:] = 0

    def close(self, add_up: Callable[[torch.Tensor], torch.Tensor], *, stopping: bool) -> tuple[torch.Tensor, bool]:
        """Add up over all ranks through `add_up`; return the rounds, and True if any rank is stopping."""
        mine = np.append(self.rounds, int(stopping))
        total = add_up(torch.from_numpy(mine).to(self._embedding.device))
        return total[:-1].view(self.rounds.shape), bool(total[-1].item())

    def make_rounds(self) -> torch.Tensor:
        """Return zero rounds on the device."""
        return torch.zeros(self.rounds.shape, dtype=torch.int64, device=self._embedding.device)
