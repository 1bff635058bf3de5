"""Drafts the blocks after growing contexts, with what of each context can be computed once.

Shapes: R rows, n new context rows, B block size, K taps, H hidden, V vocabulary, Hkv key and value heads, D head_dim.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from common.config import DraftConfig
from services.drafter.attention import Attend, DenseAttention, KeysValues
from services.drafter.model import DraftModel
from services.drafter.visibility import BlockPlaces, key_runs


class BlockDrafter:
    """One context per row; each context row is projected once."""

    def __init__(self, draft: DraftModel, config: DraftConfig, target: PreTrainedModel, num_rows: int = 1) -> None:
        self._draft, self._config, self._device = draft, config, draft.fc.weight.device
        model: Any = target
        self._embedding, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        self._contexts: list[list[KeysValues]] = [[] for _ in range(num_rows)]  # of each row, one pair per layer
        self._lengths = [0] * num_rows

    def append(self, taps: Sequence[Tensor]) -> None:
        """Add to every row the context rows [n, K, H] that follow its context."""
        counts = [rows.shape[0] for rows in taps]
        positions = self._positions(counts)
        new = self._draft.context_keys_values(self._draft.project_context(torch.cat(list(taps))), positions)
        split = [zip(torch.split(key, counts, 1), torch.split(value, counts, 1), strict=True) for key, value in new]
        for row, layers in enumerate(zip(*split, strict=True)):
            old = self._contexts[row]
            self._contexts[row] = [_join([old[index], pair]) if old else pair for index, pair in enumerate(layers)]
            self._lengths[row] += counts[row]

    def hidden(self, anchor_tokens: Sequence[int]) -> Tensor:
        """The blocks [R, B, H] whose anchor tokens come right after the contexts, before the head."""
        block_size = self._config.block_size
        tokens = torch.tensor([*anchor_tokens, self._config.mask_token_id], device=self._device)
        attends = {window: self._attend(window) for window in set(self._draft.windows)}
        context = [_join(layer) for layer in zip(*self._contexts, strict=True)]
        positions = self._positions([block_size] * len(anchor_tokens))
        rows: Tensor = self._draft(self._embedding(tokens), positions, context, [attends[it] for it in self._draft.windows])
        return rows.view(len(anchor_tokens), block_size, -1)

    def logits(self, anchor_tokens: Sequence[int]) -> Tensor:
        """What may follow each anchor token: [R, B - 1, V]."""
        rows = self.hidden(anchor_tokens)[:, 1:].to(self._head.weight.dtype)
        return F.linear(rows, self._head.weight)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self._contexts = [self._contexts[row] for row in rows]
        self._lengths = [self._lengths[row] for row in rows]

    def _positions(self, counts: Sequence[int]) -> Tensor:
        """Positions of `counts` rows right after each context, one context after the other."""
        ranges = [np.arange(length, length + count) for length, count in zip(self._lengths, counts, strict=True)]
        return torch.from_numpy(np.concatenate(ranges)).to(self._device)

    def _attend(self, sliding_window: int) -> Attend:
        lengths = np.array(self._lengths)
        ends = lengths.cumsum()
        places = BlockPlaces(ends, ends - lengths, np.ones(len(ends), dtype=bool))
        num_rows = len(ends) * self._config.block_size
        runs = key_runs(places, self._config.block_size, sliding_window, np.arange(num_rows))
        return DenseAttention(runs, int(ends[-1]), num_rows, self._device)


def _join(parts: Sequence[KeysValues]) -> KeysValues:
    """Keys and values [Hkv, rows, D], back to back."""
    if len(parts) == 1:
        return parts[0]
    keys, values = zip(*parts, strict=True)
    return torch.cat(keys, dim=1), torch.cat(values, dim=1)
