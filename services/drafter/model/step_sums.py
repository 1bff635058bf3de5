"""The numbers of a training step that are summed over batches and ranks.

Shapes: B block size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_NUM_SINGLE = 4  # loss, weight, accepted and stop


@dataclass(frozen=True)
class StepSums:
    """Named views of one tensor, so that one collective sums all of it. Only this class knows the order.

    | loss | weight | accepted | correct [B - 1] | labels [B - 1] | stop |
    """

    values: Tensor  # float32 [4 + 2 * (B - 1)]

    @staticmethod
    def size(block_size: int) -> int:
        """Return the number of values."""
        return _NUM_SINGLE + 2 * (block_size - 1)

    @classmethod
    def of(cls, loss: Tensor, weight: Tensor, accepted: Tensor, correct: Tensor, labels: Tensor) -> "StepSums":
        """Join the numbers of one batch; nobody was told to stop."""
        return cls(torch.cat([torch.stack([loss, weight, accepted]), correct, labels, labels.new_zeros(1)]))

    @property
    def loss(self) -> Tensor:
        """Weighted sum of cross entropies; the one value with a gradient."""
        return self.values[0]

    @property
    def weight(self) -> Tensor:
        """Divisor of loss and gradients: the sum of weights; with D-PACE the number of anchors."""
        return self.values[1]

    @property
    def accepted(self) -> Tensor:
        """Number of drafts that a verification of every block would accept."""
        return self.values[2]

    @property
    def correct(self) -> Tensor:
        """Number of correct predictions of each slot, [B - 1]."""
        return self.values[3 : 3 + self._num_slots]

    @property
    def labels(self) -> Tensor:
        """Number of labels of each slot, [B - 1]."""
        return self.values[3 + self._num_slots : 3 + 2 * self._num_slots]

    @property
    def stop(self) -> Tensor:
        """Number of ranks that were told to stop."""
        return self.values[-1]

    @property
    def _num_slots(self) -> int:
        return (len(self.values) - _NUM_SINGLE) // 2
