"""Greedy decoding of one sequence: by the target alone, and with drafts that the target verifies.

Both give the same tokens; the second takes fewer passes of the target (dflash.md section 4).
Shapes: T context rows, B block size, K taps, H hidden, Hkv key and value heads, D head_dim.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from common.config import DraftConfig
from services.drafter.attention import Attend, DenseAttention, KeysValues
from services.drafter.model import DraftModel
from services.drafter.target_cache import TargetCache
from services.drafter.visibility import BlockPlaces, key_runs


@dataclass(frozen=True)
class Decoding:
    """The outcome of decoding one prompt.

    Attributes:
        tokens: the new tokens, up to and with the first stop token.
        num_target_passes: passes of the target, the prefill included.
        accepted: drafts accepted and emitted, per verification round; empty without drafts.
    """

    tokens: list[int]
    num_target_passes: int
    accepted: list[int]

    @property
    def acceptance_length(self) -> float:
        """tau: emitted tokens per verification round, between 1 and B; 0 when there was no round."""
        return sum(accepted + 1 for accepted in self.accepted) / max(len(self.accepted), 1)


class BlockDrafter:
    """Drafts the block after a growing context; each context row is projected once."""

    def __init__(self, draft: DraftModel, config: DraftConfig, target: PreTrainedModel) -> None:
        self._draft, self._config, self._device = draft, config, draft.fc.weight.device
        model: Any = target
        self._embedding, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        self._context: list[KeysValues] = []
        self._num_rows = 0

    def append(self, taps: Tensor) -> None:
        """Add the rows [n, K, H] that follow the context."""
        positions = self._positions(taps.shape[0])
        new = self._draft.context_keys_values(self._draft.project_context(taps), positions)
        old = self._context or [(key[:, :0], value[:, :0]) for key, value in new]
        self._context = [
            (torch.cat([old_key, key], dim=1), torch.cat([old_value, value], dim=1))
            for (old_key, old_value), (key, value) in zip(old, new, strict=True)
        ]
        self._num_rows += taps.shape[0]

    def hidden(self, anchor_token: int) -> Tensor:
        """The block [B, H] whose anchor token comes right after the context, before the head."""
        embeddings = self._embedding(torch.tensor([anchor_token, self._config.mask_token_id], device=self._device))
        attends = {window: self._attend(window) for window in self._draft.windows}
        positions = self._positions(self._config.block_size)
        rows: Tensor = self._draft(embeddings, positions, self._context, [attends[window] for window in self._draft.windows])
        return rows

    def propose(self, anchor_token: int) -> list[int]:
        """The B - 1 most likely tokens after the anchor token."""
        rows = self.hidden(anchor_token)[1:].to(self._head.weight.dtype)
        proposal: list[int] = F.linear(rows, self._head.weight).argmax(dim=-1).tolist()
        return proposal

    def _positions(self, num_rows: int) -> Tensor:
        """Positions of rows right after the context."""
        return torch.arange(self._num_rows, self._num_rows + num_rows, device=self._device)

    def _attend(self, sliding_window: int) -> Attend:
        places = BlockPlaces(np.array([self._num_rows]), np.zeros(1, dtype=np.int64), np.ones(1, dtype=bool))
        block_size = self._config.block_size
        runs = key_runs(places, block_size, sliding_window, np.arange(block_size))
        return DenseAttention(runs, self._num_rows, block_size, self._device)


@torch.inference_mode()
def greedy(target: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int, stop_tokens: Collection[int] = ()) -> Decoding:
    """Decode with the target alone, one token a pass.

    Args:
        target: a causal language model with its head.
        prompt: at least one token id.
        max_new_tokens: at least 1.
        stop_tokens: ids that end the answer.
    """
    _check(prompt, max_new_tokens)
    with TargetCache(target) as cache:
        tokens = [cache.append(prompt)[0]]
        while len(tokens) < max_new_tokens and tokens[-1] not in stop_tokens:
            tokens.append(cache.append(tokens[-1:])[0])
        return Decoding(tokens, cache.num_passes, [])


@torch.inference_mode()
def speculate(
    target: PreTrainedModel,
    draft: DraftModel,
    config: DraftConfig,
    prompt: Sequence[int],
    max_new_tokens: int,
    stop_tokens: Collection[int] = (),
) -> Decoding:
    """Decode with drafts: the tokens of `greedy`, in fewer target passes.

    The anchor is the last known token; the target has not seen it, the context is all rows before it. A round
    drafts the B - 1 tokens after the anchor, runs anchor and drafts through the target, emits the drafts up to
    the first that the target would not have chosen, then the target's choice, which is the next anchor.

    Args:
        target: a causal language model with its head.
        draft: a draft model of this target, on the same device.
        config: the configuration of the draft model.
        prompt: at least one token id.
        max_new_tokens: at least 1.
        stop_tokens: ids that end the answer.
    """
    _check(prompt, max_new_tokens)
    drafter, accepted = BlockDrafter(draft, config, target), []
    with TargetCache(target, config.tap_layers) as cache:
        anchor_token, taps = cache.append(prompt)
        tokens = [anchor_token]
        while len(tokens) < max_new_tokens and tokens[-1] not in stop_tokens:
            drafter.append(taps)
            drafts = drafter.propose(tokens[-1])[: max_new_tokens - len(tokens) - 1]
            choices, taps = cache.verify(tokens[-1:] + drafts)
            emitted = _emitted(drafts, choices, stop_tokens)
            cache.keep(len(emitted))
            taps = taps[: len(emitted)]
            tokens += emitted
            accepted.append(len(emitted) - 1)
        return Decoding(tokens, cache.num_passes, accepted)


def _emitted(drafts: list[int], choices: list[int], stop_tokens: Collection[int]) -> list[int]:
    """The target's choices as far as the drafts before them were right, at most one stop token."""
    for position, choice in enumerate(choices):
        if choice in stop_tokens or position == len(drafts) or drafts[position] != choice:
            return choices[: position + 1]
    raise AssertionError("there is one more choice than there are drafts")


def _check(prompt: Sequence[int], max_new_tokens: int) -> None:
    if not prompt or max_new_tokens < 1:
        found = f"{len(prompt)} and {max_new_tokens}"
        raise ValueError(f"needed at least one prompt token and at least one new token, found {found}")
