"""Compute what DFlash 2 adds to an engine's forward, in plain torch from its specification: row by row, slot by slot.

B block size, H hidden, G groups of H / G channels, V vocabulary, S = B - 1 slots of a block, K candidates of a slot, r rank.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from launch.parity.folder import Folder
from launch.parity.stages import Selection

KERNEL = (2, 2)  # sides (before a sublayer, after it) and taps (the row itself, the row before it)


class Convolution(NamedTuple):
    """The two convolutions around one sublayer, for the rows of one block."""

    base: Tensor  # [2, 2, H], side and tap
    dynamic: Tensor  # [B, 2, 2, G], made from the rows that enter the sublayer

    @classmethod
    def make(cls, folder: Folder, name: str, entering: Tensor) -> "Convolution":
        """Make the convolutions of the module `name` for the rows [B, H] that enter its sublayer."""
        projected = entering @ folder.tensors[f"{name}.kernel_projection.weight"].T
        num_groups = entering.shape[1] // folder.settings["conv_group_size"]
        return cls(folder.tensors[f"{name}.base_kernel"], projected.view(len(entering), *KERNEL, num_groups))

    def apply(self, rows: Tensor, side: int) -> Tensor:
        """Convolve the rows [B, H] of one block; the row before the first one is zero."""
        group_size = rows.shape[1] // self.dynamic.shape[3]
        before, convolved = torch.zeros_like(rows[0]), []
        for row, dynamic in zip(rows, self.dynamic[:, side], strict=True):
            own, previous = self.base[side] + dynamic.repeat_interleave(group_size, dim=1)
            convolved.append(own * row + previous * before)
            before = row
        return torch.stack(convolved)


def largest(logits: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` largest logits of every slot, ascending; of equal logits the lower ids: [S, K]."""
    return logits.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values


def pair_scores(folder: Folder, hidden: Tensor, logits: Tensor, before: Tensor, tokens: Tensor) -> Tensor:
    """Score every candidate of one slot after every possible token before it: [P, K].

    Args:
        folder: the drafter.
        hidden: [H], the slot's row behind the final norm.
        logits: [K], of the candidates.
        before: int64 [P], the possible tokens before the slot.
        tokens: int64 [K], the candidates.
    """
    predecessors = folder.tensors["candidate_selector.predecessor_codebook"][before]
    successors = folder.tensors["candidate_selector.successor_codebook"][tokens]
    projected = folder.tensors["candidate_selector.hidden_projection.weight"] @ hidden
    return logits + torch.einsum("pr,r,kr->pk", predecessors, projected, successors)


def select(folder: Folder, hidden: Tensor, logits: Tensor, anchor: int) -> Selection:
    """Choose a token for every slot of hidden [S, H] and logits [S, V], from left to right, each after the last one chosen."""
    tokens = largest(logits, folder.settings["selector_top_k"])
    values = logits.gather(1, tokens)
    before, chosen, predecessors, scores = torch.tensor([anchor]), 0, [], []
    for slot in range(len(tokens)):
        table = pair_scores(folder, hidden[slot], values[slot], before, tokens[slot])
        predecessors.append(before[chosen])
        scores.append(table[chosen])
        before, chosen = tokens[slot], int(table[chosen].argmax())  # of equal scores the first, so the lower id
    drafts = [int(of_slot[row.argmax()]) for of_slot, row in zip(tokens, scores, strict=True)]
    return Selection(tokens, values, torch.stack(predecessors), torch.stack(scores), torch.tensor(drafts))
