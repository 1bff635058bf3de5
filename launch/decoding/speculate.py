"""Decoding a few prompts together: by the target alone, and with drafts that the target verifies.

Greedily both give the same tokens, sampling both draw from the same distribution; the second takes fewer passes of the
target (dflash.md section 4). Shapes: R rows, B block size, n drafts of a round, K taps, H hidden, V vocabulary.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.config import DraftConfig
from launch.decoding.answer import Answer, Decoding, Limits, Prompts, begin_answers
from launch.decoding.block_drafter import BlockDrafter
from launch.decoding.sampling import Sampling, accept, draw, probabilities
from launch.decoding.target_cache import TargetCache
from services.drafter.model.model import DraftModel


@dataclass(frozen=True)
class Batch:
    """Prompts decoded together: their answers in order, and the time until each had its first token, and from there."""

    decodings: list[Decoding]
    prefill_s: float
    decode_s: float


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

    def stop(self, answers: list[Answer]) -> Batch:
        self.mark()
        began, prefilled, ended = self._marks_s
        return Batch([answer.decoding for answer in answers], prefilled - began, ended - prefilled)


@torch.inference_mode()
def decode(target: PreTrainedModel, prompts: Prompts, limits: Limits, seeds: Sequence[Sequence[int]] = ()) -> Batch:
    """Decode with the target alone, one token a pass.

    Args:
        target: a causal language model with its head.
        prompts: at least one token id each; answers end where the target's positions end.
        limits: of every answer.
        seeds: what each prompt's random numbers come from; by default its number.

    Raises:
        DataError: a prompt is empty or longer than the target's positions, or no new token is asked for.
        ModelError: the target's cache cannot hold these prompts together.
    """
    answers, clock = begin_answers(target, prompts, limits, seeds), _Clock(target.device)
    with TargetCache(target) as cache:
        logits, _ = cache.prefill(prompts)
        _add_one(answers, logits, limits.sampling)
        clock.mark()
        alive = answers
        while rows := _with_room(alive, cache):
            alive = [alive[row] for row in rows]
            cache.select(rows)
            logits, _ = cache.extend([answer.tokens[-1:] for answer in alive])
            cache.keep([1] * len(alive))
            _add_one(alive, logits[:, 0], limits.sampling)
    return clock.stop(answers)


@torch.inference_mode()
def speculate(
    target: PreTrainedModel,
    draft: DraftModel,
    config: DraftConfig,
    prompts: Prompts,
    limits: Limits,
    seeds: Sequence[Sequence[int]] = (),
) -> Batch:
    """Decode with drafts: what `decode` gives, in fewer target passes.

    The anchor is the last known token; the target has not seen it, the context is all rows before it. A round
    drafts up to B - 1 tokens after the anchor, runs anchor and drafts through the target, emits the drafts up to
    the first that the target refuses, then a token of the target's own, which is the next anchor.

    Args:
        target: a causal language model with its head.
        draft: a draft model of this target, on the same device.
        config: the configuration of the draft model.
        prompts: as the other arguments and the errors, see `decode`.
        limits: of every answer.
        seeds: what each prompt's random numbers come from; by default its number.
    """
    answers, clock = begin_answers(target, prompts, limits, seeds), _Clock(target.device)
    drafter = BlockDrafter(draft, config, target, len(prompts))
    with TargetCache(target, config.tap_layers) as cache:
        logits, taps = cache.prefill(prompts)
        _add_one(answers, logits, limits.sampling)
        clock.mark()
        alive = answers
        while rows := _with_room(alive, cache):
            alive, taps = [alive[row] for row in rows], [taps[row] for row in rows]
            cache.select(rows)
            drafter.select(rows)
            cache.keep([len(row) for row in taps])
            drafter.append(taps)
            taps = _round(alive, drafter, cache, config.block_size - 1, limits.sampling)
    return clock.stop(answers)


def _with_room(alive: list[Answer], cache: TargetCache) -> list[int]:
    """The rows that go on; what each has cost is noted before any of them leaves the cache."""
    for answer, num_passes in zip(alive, cache.num_passes, strict=True):
        answer.num_target_passes = num_passes
    return [row for row, answer in enumerate(alive) if answer.room]


def _add_one(alive: list[Answer], logits: Tensor, sampling: Sampling) -> None:
    """Choose the next token of every answer from its logits [R, V]."""
    uniforms = torch.tensor([answer.random.random() for answer in alive], dtype=torch.float64, device=logits.device)
    for answer, token in zip(alive, draw(probabilities(logits, sampling), uniforms).tolist(), strict=True):
        answer.add([token])


def _round(alive: list[Answer], drafter: BlockDrafter, cache: TargetCache, num_slots: int, sampling: Sampling) -> list[Tensor]:
    """Draft, verify and emit; the tokens of the cache are pending.

    Every row draws the same number of random numbers whatever the others do, so an answer does not depend on them.

    Returns:
        The taps [n, K, H] of every row's anchor and its emitted drafts.
    """
    num_drafts = min(num_slots, max(it.room for it in alive) - 1, min(it.num_positions - len(it.tokens) for it in alive))
    numbers = np.stack([answer.random.random(2 * num_slots + 1) for answer in alive])
    anchors = [answer.tokens[-1] for answer in alive]
    draft = drafter.logits(anchors)[:, :num_drafts]
    uniforms = torch.from_numpy(numbers).to(draft.device)
    of_drafts, of_tests, of_next = torch.split(uniforms, [num_slots, num_slots, 1], dim=1)

    chances = probabilities(draft, sampling)
    drafts = draw(chances, of_drafts[:, :num_drafts])
    proposed = drafts.tolist()
    logits, taps = cache.extend([[anchor, *row] for anchor, row in zip(anchors, proposed, strict=True)])
    rooms = torch.tensor([min(answer.room - 1, num_drafts) for answer in alive], device=draft.device)
    tests = torch.cat([of_tests[:, :num_drafts], of_next], dim=1)
    accepted, following = accept(probabilities(logits, sampling), chances, drafts, rooms, tests)

    outcome = zip(alive, proposed, accepted.tolist(), following.tolist(), strict=True)
    emitted = [answer.add([*row[:count], token]) for answer, row, count, token in outcome]
    for answer, count in zip(alive, emitted, strict=True):
        answer.accepted.append(count - 1)
    return [row[:count] for row, count in zip(taps, emitted, strict=True)]
