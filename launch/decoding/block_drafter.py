"""Draft the block after a growing context, whose keys and values are computed once per row.

Shapes: n new context rows, B block size, K taps, H hidden, V vocabulary, C candidates of a slot.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from common.draft_config import DraftConfig
from launch.decoding.sampling import Sampling, draw, probabilities
from services.drafter.model.attention import DenseAttention, KeysValues
from services.drafter.model.model import DraftModel
from services.drafter.model.selector import Candidates, CandidateSelector, top_candidates
from services.drafter.model.visibility import BlockAnchors, LayerMask, key_runs


class Drafts(NamedTuple):
    """The drafts of a block, and what each was drawn from."""

    tokens: Tensor  # int64 [B - 1]
    chances: Tensor  # float64 [B - 1, V], of each slot given the drafts before it


class BlockDrafter:
    """A draft model with the cached keys and values of one context."""

    def __init__(self, draft: DraftModel, config: DraftConfig, target: PreTrainedModel) -> None:
        self.device = draft.fc.weight.device
        self._draft, self._config = draft, config
        model: Any = target
        self._embedding, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        empty = draft.fc.weight.new_empty(config.num_key_value_heads, 0, config.head_dim)
        self._layers: list[KeysValues] = [(empty, empty)] * config.num_layers
        self._length = 0

    def append(self, taps: Tensor) -> None:
        """Add the rows [n, K, H] that follow the context."""
        new = self._draft.context_keys_values(self._draft.project_context(taps), self._positions(len(taps)))
        self._layers = [
            (torch.cat([keys, new_keys], dim=1), torch.cat([values, new_values], dim=1))
            for (keys, values), (new_keys, new_values) in zip(self._layers, new, strict=True)
        ]
        self._length += len(taps)

    def hidden(self, anchor_token: int) -> Tensor:
        """Return the block [B, H], before the head, whose anchor token comes right after the context."""
        tokens = torch.tensor([anchor_token, self._config.mask_token_id], device=self.device)
        attends = {mask: self._attention(mask) for mask in set(self._draft.masks)}
        positions = self._positions(self._config.block_size)
        layers = [attends[mask] for mask in self._draft.masks]
        embeddings = self._draft.embed(tokens, self._embedding.weight)
        block: Tensor = self._draft(embeddings, positions, self._layers, layers)
        return block

    def draft(self, anchor_token: int, sampling: Sampling, uniforms: Tensor) -> Drafts:
        """Draft the tokens after the anchor token; equal uniform numbers [B - 1] give equal drafts."""
        hidden = self.hidden(anchor_token)[1:]
        logits = F.linear(self._draft.for_head(hidden).to(self._head.weight.dtype), self._head.weight)
        if self._draft.candidate_selector is not None:
            return self._select(self._draft.candidate_selector, anchor_token, hidden, logits, sampling.temperature, uniforms)
        chances = probabilities(logits, sampling)
        return Drafts(draw(chances, uniforms), chances)

    def _select(
        self,
        selector: CandidateSelector,
        anchor_token: int,
        hidden: Tensor,
        logits: Tensor,
        temperature: float,
        uniforms: Tensor,
    ) -> Drafts:
        """Draw slot after slot, from the scores of its candidates; top_p is the target's alone, as in engines."""
        candidates = top_candidates(logits, self._config.num_candidates, self._draft.logit_softcap)
        of_slots: list[Tensor] = []  # [1, C] each

        def choose(slot: int, scores: Tensor) -> Tensor:
            of_slots.append(probabilities(scores, Sampling(temperature)))
            return draw(of_slots[-1], uniforms[slot, None])

        block = Candidates(candidates.tokens[None], candidates.logits[None])
        tokens = selector.select(hidden[None], block, torch.tensor([anchor_token], device=self.device), choose)[0]
        chances = torch.zeros(logits.shape, dtype=torch.float64, device=self.device)
        return Drafts(tokens, chances.scatter_(1, candidates.tokens, torch.cat(of_slots)))

    def _attention(self, mask: LayerMask) -> DenseAttention:
        block_size = self._config.block_size
        block = BlockAnchors(np.array([self._length]), np.array([0]), np.array([True]))
        runs = key_runs(block, block_size, mask, np.arange(block_size))
        return DenseAttention(runs, self._length, block_size, self.device)

    def _positions(self, count: int) -> Tensor:
        return torch.arange(self._length, self._length + count, device=self.device)
