"""Decode a prompt: by the target alone, and with drafts that the target verifies.

Greedily both give the same tokens, sampling both draw from the same distribution; the second takes fewer passes of the
target (dflash.md section 4). Shapes: B block size, n drafts of a round, K taps, H hidden, V vocabulary.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.draft_config import DraftConfig
from launch.decoding.answer import Answer, Decoding, Limits
from launch.decoding.block_drafter import BlockDrafter
from launch.decoding.sampling import Sampling, accept, draw, probabilities
from launch.decoding.target_cache import TargetCache
from services.drafter.model.model import DraftModel

Seed = Sequence[int]  # of the random numbers of an answer


class _Clock:
    """Wall-clock times on a device that runs behind."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks_s: list[float] = []
        self.mark()

    def mark(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._marks_s.append(time.perf_counter())

    def stop(self, answer: Answer, cache: TargetCache) -> Decoding:
        self.mark()
        began, prefilled, ended = self._marks_s
        return Decoding(answer.tokens, cache.num_passes, answer.accepted, prefilled - began, ended - prefilled)


@torch.inference_mode()
def decode(target: PreTrainedModel, prompt: Sequence[int], limits: Limits, seed: Seed = (0,)) -> Decoding:
    """Decode with the target alone, one token a pass; the answer ends where the target's positions end at the latest.

    Raises:
        DataError: the prompt is empty or longer than the target's positions, or no new token is wanted.
    """
    answer, clock = Answer(target, prompt, limits, seed), _Clock(target.device)
    with TargetCache(target) as cache:
        logits, _ = cache.prefill(prompt)
        _add_one(answer, logits, limits.sampling)
        clock.mark()
        while answer.room:
            logits, _ = cache.extend(answer.tokens[-1:])
            cache.keep(1)
            _add_one(answer, logits[0], limits.sampling)
    return clock.stop(answer, cache)


@torch.inference_mode()
def speculate(
    target: PreTrainedModel,
    draft: DraftModel,
    config: DraftConfig,
    prompt: Sequence[int],
    limits: Limits,
    seed: Seed = (0,),
) -> Decoding:
    """Decode as `decode` does, in fewer target passes, with drafts of a draft model on the same device.

    The anchor is the last known token; the target has not seen it, the context is all rows before it. A round
    drafts up to B - 1 tokens after the anchor, runs anchor and drafts through the target, emits the drafts up to
    the first that the target refuses, then a token of the target's own, which is the next anchor.
    """
    answer, clock = Answer(target, prompt, limits, seed), _Clock(target.device)
    drafter = BlockDrafter(draft, config, target)
    with TargetCache(target, config.tap_layers) as cache:
        logits, taps = cache.prefill(prompt)
        _add_one(answer, logits, limits.sampling)
        clock.mark()
        while answer.room:
            cache.keep(len(taps))
            drafter.append(taps)
            taps = _round(answer, drafter, cache, config.block_size - 1, limits.sampling)
    return clock.stop(answer, cache)


def _add_one(answer: Answer, logits: Tensor, sampling: Sampling) -> None:
    """Choose the next token of the answer from its logits [V]."""
    uniform = torch.tensor(answer.random.random(), dtype=torch.float64, device=logits.device)
    answer.add([int(draw(probabilities(logits, sampling), uniform))])


def _round(answer: Answer, drafter: BlockDrafter, cache: TargetCache, num_slots: int, sampling: Sampling) -> Tensor:
    """Draft, verify and emit; return the taps [n, K, H] of the anchor and the emitted drafts, pending in the cache."""
    num_drafts, anchor = min(num_slots, answer.room - 1), answer.tokens[-1]
    uniforms = torch.from_numpy(answer.random.random(2 * num_slots + 1)).to(drafter.device)
    of_drafts, of_tests, of_next = torch.split(uniforms, [num_slots, num_slots, 1])

    drafts, chances = (part[:num_drafts] for part in drafter.draft(anchor, sampling, of_drafts))
    proposed = drafts.tolist()
    logits, taps = cache.extend([anchor, *proposed])
    tests = torch.cat([of_tests[:num_drafts], of_next])
    accepted, following = accept(probabilities(logits, sampling), chances, drafts, tests)
    num_emitted = answer.add([*proposed[:accepted], following])
    answer.accepted.append(num_emitted - 1)
    return taps[:num_emitted]
