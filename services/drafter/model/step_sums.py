"""The numbers of a training step that are summed over batches and ranks. B block size."""

from typing import NamedTuple

import torch
from torch import Tensor

_NUM_SINGLE, _NUM_PER_SLOT = 7, 3


class SlotSums(NamedTuple):
    """Counts of one batch; a plain DFlash has one candidate, its prediction, so all three acceptances are one."""

    accepted: Tensor  # drafts that a verification of every block would accept
    accepted_unary: Tensor  # the same if every slot took its likeliest token, without the selector
    accepted_oracle: Tensor  # the same if every slot took its label where that is a candidate
    correct: Tensor  # [B - 1] chosen tokens that equal the label of the slot
    recalled: Tensor  # [B - 1] labels among the candidates of the slot
    labels: Tensor  # [B - 1]


class StepSums:
    """Named views of one tensor, so that one collective sums all of it. Only this class knows the order.

    | loss | weight | selector loss | accepted | unary | oracle | correct [B - 1] | recalled [B - 1] | labels [B - 1] | stop |
    """

    def __init__(self, values: Tensor) -> None:
        num_slots = (len(values) - _NUM_SINGLE) // _NUM_PER_SLOT
        self.values = values  # float32 [7 + 3 * (B - 1)]
        self.loss = values[0]  # weighted sum of the losses; the one value with a gradient
        self.weight = values[1]  # divisor of loss and gradients: the sum of weights; with D-PACE the number of anchors
        self.selector_loss = values[2]  # the part of the selector in the loss, before train.selector_weight
        self.accepted, self.accepted_unary, self.accepted_oracle = values[3], values[4], values[5]  # see `SlotSums`
        self.correct, self.recalled, self.labels = values[6:-1].view(_NUM_PER_SLOT, num_slots).unbind(0)
        self.stop = values[-1]  # number of ranks that are to stop

    @staticmethod
    def size(block_size: int) -> int:
        return _NUM_SINGLE + _NUM_PER_SLOT * (block_size - 1)

    @classmethod
    def of(cls, loss: Tensor, weight: Tensor, selector_loss: Tensor, slots: SlotSums) -> "StepSums":
        """Join the numbers of one batch; no rank is to stop."""
        singles = torch.stack([loss, weight, selector_loss, slots.accepted, slots.accepted_unary, slots.accepted_oracle])
        return cls(torch.cat([singles, slots.correct, slots.recalled, slots.labels, slots.labels.new_zeros(1)]))
