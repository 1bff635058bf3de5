"""Sampling with drafts draws from the target's own distribution: exact probabilities of a tiny vocabulary, chi-square.

Shapes: n samples, m tokens of each, V vocabulary.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from launch.decoding.answer import Limits
from launch.decoding.block_drafter import BlockDrafter, Drafts
from launch.decoding.sampling import GREEDY, Sampling, accept, draw, probabilities
from launch.decoding.speculate import decode, speculate
from services.drafter.model.model import DraftModel
from tests.builders.batches import randomise
from tests.builders.small_decodings import begin
from tests.builders.targets import make_target

VOCABULARY, NUM_TOKENS, NUM_SAMPLES, NUM_DECODED = 4, 3, 4000, 200
PROMPT = [1, 3, 0]
TINY = {"vocab_size": VOCABULARY, "initializer_range": 0.15}
SAMPLING = Sampling(1.3, top_p=0.8)
Accept = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[int, int]]
Draft = Callable[[Tensor], Drafts]
SELECTOR = ("draft.kind=dflash2", "draft.conv_group_size=8", "draft.selector_rank=6", "draft.selector_top_k=3")


def exact_next(target: Any, text: list[int], sampling: Sampling) -> NDArray[np.float64]:
    """Probabilities [V] of the token after a text, worked out by hand."""
    logits = target(torch.tensor([text]), use_cache=False).logits[0, -1].double().numpy() / sampling.temperature
    chances = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    kept, weight = np.zeros(VOCABULARY), 0.0
    for token in np.argsort(-chances):
        if weight < sampling.top_p:
            kept[token] = chances[token]
        weight += chances[token]
    following: NDArray[np.float64] = kept / kept.sum()
    return following


@torch.inference_mode()
def exact_joint(target: Any, sampling: Sampling) -> NDArray[np.float64]:
    """Probabilities [V ** m] of the first tokens of an answer."""
    joint = np.ones((VOCABULARY,) * NUM_TOKENS)
    for texts in (product(range(VOCABULARY), repeat=length) for length in range(NUM_TOKENS)):
        for text in texts:
            following = exact_next(target, [*PROMPT, *text], sampling)
            joint[text] *= following.reshape(-1, *[1] * (NUM_TOKENS - 1 - len(text)))
    return joint.ravel()


def count(samples: list[list[int]]) -> NDArray[np.int64]:
    """Count each answer: [V ** m]."""
    numbers = np.ravel_multi_index(np.array(samples).T, (VOCABULARY,) * NUM_TOKENS)
    return np.bincount(numbers, minlength=VOCABULARY**NUM_TOKENS)


def chi_square(counts: NDArray[np.int64], joint: NDArray[np.float64]) -> tuple[float, float]:
    """The statistic, cells of fewer than five expected taken together, and what it exceeds once in a thousand times."""
    expected = joint * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    freedom = len(observed) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3  # Wilson and Hilferty 1931
    return float(((observed - expected) ** 2 / expected).sum()), float(limit)


def draw_answers(
    random: np.random.Generator, accept_drafts: Accept, draft: Draft, num_samples: int = NUM_SAMPLES
) -> tuple[list[list[int]], NDArray[np.float64]]:
    """Return answers made in rounds of two drafts for a made-up target, and their exact probabilities [V ** m]."""
    p = [random.dirichlet(np.ones(VOCABULARY), (VOCABULARY,) * length) for length in range(NUM_TOKENS)]
    answers = []
    for _ in range(num_samples):
        drafts, q = draft(torch.from_numpy(random.random(2)))
        first, second = drafts.tolist()
        target = torch.from_numpy(np.stack([p[0], p[1][first], p[2][first, second]]))
        accepted, following = accept_drafts(target, q, drafts, torch.from_numpy(random.random(3)))
        answer = [*drafts[:accepted].tolist(), following]
        while len(answer) < NUM_TOKENS:
            answer.append(int(random.choice(VOCABULARY, p=p[len(answer)][tuple(answer)])))
        answers.append(answer)
    joint: NDArray[np.float64] = p[0][:, None, None] * p[1][:, :, None] * p[2]
    return answers, joint.ravel()


def wrong(target: Tensor, draft: Tensor, drafts: Tensor, uniforms: Tensor) -> tuple[int, int]:
    """Follow a refused draft by a draw from p instead of from what p has over q."""
    accepted, _ = accept(target, draft, drafts, uniforms)
    return accepted, int(draw(target[accepted], uniforms[-1]))


@pytest.mark.parametrize("accept_drafts", [accept, wrong])
def test_accepted_drafts_are_distributed_as_the_target(accept_drafts: Accept) -> None:
    q = torch.from_numpy(np.random.default_rng(4).dirichlet(np.ones(VOCABULARY), 2))
    answers, joint = draw_answers(np.random.default_rng(3), accept_drafts, lambda uniforms: Drafts(draw(q, uniforms), q))
    statistic, limit = chi_square(count(answers), joint)
    assert statistic < limit if accept_drafts is accept else statistic > 2 * limit


def tiny_selector(folder: Path) -> tuple[DraftModel, BlockDrafter]:
    """A random DFlash 2 that drafts two tokens of a vocabulary of four after PROMPT, with three candidates each."""
    config, target = make_target(folder, "qwen3", *SELECTOR, "draft.mask_token_id=3", "draft.block_size=3", **TINY)
    model = randomise(DraftModel(config), 0.2)
    assert model.candidate_selector is not None
    model.candidate_selector.successor_codebook.data *= 20.0  # so that much depends on the draft before
    drafter = BlockDrafter(model, config.draft, target)
    drafter.append(torch.randn(len(PROMPT), 2, 32, generator=torch.Generator().manual_seed(0)))
    return model, drafter


@torch.inference_mode()
def test_a_selector_draws_each_slot_from_its_candidates_after_the_draft_before(tmp_path: Path) -> None:
    (model, drafter), random = tiny_selector(tmp_path), np.random.default_rng(0)
    selector, head = model.candidate_selector, drafter._head.weight
    assert selector is not None
    hidden = drafter.hidden(1)[1:]
    seen: dict[tuple[int, ...], set[int]] = {}
    for _ in range(60):
        drafts, q = drafter.draft(1, SAMPLING, torch.from_numpy(random.random(2)))
        previous = 1
        for slot, token in enumerate(drafts.tolist()):
            logits = head @ hidden[slot]
            state = selector.predecessor_codebook[previous] * (selector.hidden_projection.weight @ hidden[slot])
            scores = (logits + selector.successor_codebook @ state).double() / SAMPLING.temperature
            scores[logits.argmin()] = -torch.inf  # of four tokens all but one are candidates
            torch.testing.assert_close(q[slot], scores.softmax(0), atol=1e-6, rtol=1e-5)
            assert q[slot].count_nonzero() == 3 and q[slot, token] > 0.0  # top_p of 0.8 leaves no candidate out
            seen.setdefault((slot, previous), set()).add(token)
            previous = token
    assert seen.keys() == {(0, 1), *((1, first) for first in seen[0, 1])} and len(seen) == 4  # after each of three drafts
    greedy, one_hot = drafter.draft(1, GREEDY, torch.from_numpy(random.random(2)))
    assert torch.equal(one_hot.nonzero()[:, 1], greedy) and one_hot.sum() == 2.0


@torch.inference_mode()
@pytest.mark.parametrize("forgets", [False, True])
def test_drafts_of_a_selector_are_accepted_as_the_target_wants(tmp_path: Path, forgets: bool) -> None:
    """With the distribution of another draft before it, the test of the ratio would be wrong."""
    _, drafter = tiny_selector(tmp_path)
    other = drafter.draft(1, SAMPLING, torch.tensor([0.001, 0.5], dtype=torch.float64)).chances

    def draft(uniforms: Tensor) -> Drafts:
        found = drafter.draft(1, SAMPLING, uniforms)
        return Drafts(found.tokens, other) if forgets else found

    answers, joint = draw_answers(np.random.default_rng(5), accept, draft, 1000)
    statistic, limit = chi_square(count(answers), joint)
    assert statistic > limit if forgets else statistic < limit


@pytest.mark.parametrize("settings", [(), SELECTOR])
def test_answers_with_drafts_are_distributed_as_the_targets_own(tmp_path: Path, settings: tuple[str, ...]) -> None:
    config, target = make_target(tmp_path, "qwen3", "draft.mask_token_id=3", *settings, **TINY)
    joint, draft, limits = exact_joint(target, SAMPLING), begin(config), Limits(NUM_TOKENS, (), SAMPLING)
    seeds = [[11, number] for number in range(NUM_DECODED)]
    fast = [speculate(target, draft, config.draft, PROMPT, limits, seed) for seed in seeds]
    for decodings in (fast, [decode(target, PROMPT, limits, seed) for seed in seeds]):
        counts = count([answer.tokens for answer in decodings])
        statistic, limit = chi_square(counts, joint)
        assert statistic < limit
        assert not counts[joint == 0].any()
    accepted = [number for answer in fast for number in answer.accepted]
    assert 0.1 < sum(accepted) / len(accepted) < 0.9  # of at most one draft a round: both outcomes were really met


def test_the_same_seed_gives_the_same_answer(tmp_path: Path) -> None:
    config, target = make_target(tmp_path, "llama")
    draft, limits = DraftModel(config), Limits(20, (), Sampling(1.0))
    first, again, other = (speculate(target, draft, config.draft, [5], limits, seed) for seed in ([1], [1], [2]))
    assert first == again
    assert first != other


def test_greedy_puts_everything_on_the_most_likely_token() -> None:
    logits = torch.tensor([[0.1, 3.0, 2.9], [5.0, 1.0, 5.0]])
    assert probabilities(logits, GREEDY).tolist() == [[0, 1, 0], [1, 0, 0]]
    nearly = probabilities(logits[:1], Sampling(1e-3))
    torch.testing.assert_close(nearly, probabilities(logits[:1], GREEDY))


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.log(torch.tensor([0.2, 0.5, 0.25, 0.05]))
    for top_p, kept in ((0.4, [1]), (0.6, [1, 2]), (0.8, [0, 1, 2]), (0.97, [0, 1, 2, 3])):
        found = probabilities(logits, Sampling(1.0, top_p))
        assert found.nonzero().flatten().tolist() == kept
        assert found.sum().item() == pytest.approx(1.0)


def test_draws_by_inversion() -> None:
    weights = torch.tensor([0.0, 2.0, 0.0, 6.0, 0.0], dtype=torch.float64)
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(weights.expand(4, 5), uniforms).tolist() == [1, 1, 3, 3]


def test_equal_distributions_keep_every_draft() -> None:
    chances = torch.full((4, 3), 1 / 3, dtype=torch.float64)
    assert accept(chances, chances[:3], torch.tensor([0, 1, 2]), torch.full((4,), 0.9).double()) == (3, 2)
    assert accept(chances[:1], chances[:0], torch.tensor([], dtype=torch.int64), torch.full((1,), 0.1).double()) == (0, 0)
