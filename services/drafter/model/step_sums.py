"""The numbers of a training step that are summed over batches and ranks. B block size."""

import torch
from torch import Tensor

_NUM_SINGLE = 4  # loss, weight, accepted and stop


class StepSums:
    """Named views of one tensor, so that one collective sums all of it. Only this class knows the order.

    | loss | weight | accepted | correct [B - 1] | labels [B - 1] | stop |
    """

    def __init__(self, values: Tensor) -> None:
        num_slots = (len(values) - _NUM_SINGLE) // 2
        self.values = values  # float32 [4 + 2 * (B - 1)]
        self.loss = values[0]  # weighted sum of cross entropies; the one value with a gradient
        self.weight = values[1]  # divisor of loss and gradients: the sum of weights; with D-PACE the number of anchors
        self.accepted = values[2]  # number of drafts that a verification of every block would accept
        self.correct = values[3 : 3 + num_slots]  # number of correct predictions of each slot
        self.labels = values[3 + num_slots : 3 + 2 * num_slots]  # number of labels of each slot
        self.stop = values[-1]  # number of ranks that are to stop

    @staticmethod
    def size(block_size: int) -> int:
        return _NUM_SINGLE + 2 * (block_size - 1)

    @classmethod
    def of(cls, loss: Tensor, weight: Tensor, accepted: Tensor, correct: Tensor, labels: Tensor) -> "StepSums":
        """Join the numbers of one batch; no rank is to stop."""
        return cls(torch.cat([torch.stack([loss, weight, accepted]), correct, labels, labels.new_zeros(1)]))
