"""Drafts the blocks after growing contexts, with what of each context can be computed once.

Shapes: R rows, n new context rows, B block size, K taps, H hidden, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from common.config import DraftConfig
from launch.decoding.contexts import Contexts
from launch.decoding.row_attention import RowAttention
from services.drafter.model.model import DraftModel


class BlockDrafter:
    """One context per row; each context row is projected once."""

    def __init__(self, draft: DraftModel, config: DraftConfig, target: PreTrainedModel, num_rows: int = 1) -> None:
        self._draft, self._config, self._device = draft, config, draft.fc.weight.device
        model: Any = target
        self._embedding, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        self._contexts = Contexts(config, num_rows, draft.fc.weight)

    def append(self, taps: Sequence[Tensor]) -> None:
        """Add to every row the context rows [n, K, H] that follow its context."""
        places = self._contexts.places([rows.shape[0] for rows in taps])
        projected = self._draft.project_context(torch.cat(list(taps)))
        self._contexts.append(places, self._draft.context_keys_values(projected, places.columns))

    def hidden(self, anchor_tokens: Sequence[int]) -> Tensor:
        """The blocks [R, B, H] whose anchor tokens come right after the contexts, before the head."""
        config, lengths = self._config, self._contexts.lengths
        tokens = torch.tensor([*anchor_tokens, config.mask_token_id], device=self._device)
        own = self._contexts.places([config.block_size] * len(anchor_tokens))
        attends = {window: RowAttention(lengths, own, config, window) for window in set(self._draft.windows)}
        attend_of_layers = [attends[window] for window in self._draft.windows]
        rows: Tensor = self._draft(self._embedding(tokens), own.columns, self._contexts.layers(), attend_of_layers)
        return rows.view(len(anchor_tokens), config.block_size, -1)

    def logits(self, anchor_tokens: Sequence[int]) -> Tensor:
        """What may follow each anchor token: [R, B - 1, V]."""
        rows = self.hidden(anchor_tokens)[:, 1:].to(self._head.weight.dtype)
        return F.linear(rows, self._head.weight)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self._contexts.select(rows)
