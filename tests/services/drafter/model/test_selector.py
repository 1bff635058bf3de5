"""The selector equals its formula, walks without labels, and its loss is strict: nothing where the label is no candidate."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from services.drafter.model.selector import Candidates, CandidateSelector, selector_loss, top_candidates
from tests.builders.batches import HIDDEN_SIZE, VOCAB_SIZE, dflash2, make_config

RANK, COUNT = 6, 4


def make_selector() -> CandidateSelector:
    selector, random = CandidateSelector(dflash2(make_config(), selector_rank=RANK)), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in selector.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random))
    return selector


def make_rows(num_rows: int) -> tuple[Tensor, Tensor]:
    """Return hidden rows [R, H] and logits [R, V]."""
    random = torch.Generator().manual_seed(2)
    return torch.randn(num_rows, HIDDEN_SIZE, generator=random), torch.randn(num_rows, VOCAB_SIZE, generator=random)


def score(selector: CandidateSelector, hidden: Tensor, logit: Tensor, previous: int, token: int) -> float:
    """Return the score of one candidate, from the formula."""
    state = selector.predecessor_codebook[previous] * (selector.hidden_projection.weight @ hidden)
    return (logit + state @ selector.successor_codebook[token]).item()


def test_scores_equal_the_formula() -> None:
    selector, (hidden, logits) = make_selector(), make_rows(5)
    candidates, previous = top_candidates(logits, COUNT), torch.tensor([3, 0, 31, 7, 7])
    scores = selector(hidden, candidates, previous)
    for row, column in itertools.product(range(5), range(COUNT)):
        token = int(candidates.tokens[row, column])
        expected = score(selector, hidden[row], logits[row, token], int(previous[row]), token)
        assert scores[row, column].item() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_candidates_are_the_largest_in_the_order_of_their_ids() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0, 4.0], [2.0, 2.0, 2.0, 3.0]])
    candidates = top_candidates(logits, 2)
    assert candidates.tokens[0].tolist() == [1, 3]
    assert candidates.logits[0].tolist() == [5.0, 4.0]
    assert candidates.tokens[1].tolist()[1] == 3


@pytest.mark.parametrize("vocabulary", [31, 640, 128 * 9, 128 * 9 + 37])
def test_candidates_of_long_rows_are_those_of_a_plain_selection(vocabulary: int) -> None:
    logits = torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(3))
    logits[0, -4:] += 10.0
    logits[1, 128:132] += 10.0
    found = top_candidates(logits, COUNT)
    assert torch.equal(found.tokens, logits.topk(COUNT).indices.sort(1).values)
    assert torch.equal(found.logits, logits.gather(1, found.tokens))


def test_the_selection_equals_an_exhaustive_one() -> None:
    selector, num_slots = make_selector(), 3
    hidden, logits = make_rows(2 * num_slots)
    candidates = top_candidates(logits, COUNT)
    by_block = Candidates(*(part.view(2, num_slots, COUNT) for part in candidates))
    anchors = torch.tensor([4, 9])
    found = selector.select(hidden.view(2, num_slots, -1), by_block, anchors)
    unary = logits.argmax(1).view(2, num_slots)
    for block in range(2):
        previous = int(anchors[block])
        for slot in range(num_slots):
            row = block * num_slots + slot
            scores = {
                token: score(selector, hidden[row], logits[row, token], previous, token)
                for token in candidates.tokens[row].tolist()
            }
            previous = max(scores, key=lambda token: scores[token])
            assert int(found[block, slot]) == previous
    assert not torch.equal(found, unary)


def test_a_fresh_selector_chooses_the_likeliest_token() -> None:
    selector, (hidden, logits) = make_selector(), make_rows(6)
    selector.initialise()
    candidates = Candidates(*(part.view(2, 3, COUNT) for part in top_candidates(logits, COUNT)))
    assert torch.equal(selector.select(hidden.view(2, 3, -1), candidates, torch.tensor([0, 1])), logits.argmax(1).view(2, 3))


def test_the_loss_is_a_cross_entropy_over_the_candidates_and_nothing_else() -> None:
    scores, tokens = torch.randn(3, COUNT, generator=torch.Generator().manual_seed(0)), torch.tensor([[1, 4, 6, 8]] * 3)
    losses = selector_loss(scores, tokens, torch.tensor([6, 5, 1]))
    expected = F.cross_entropy(scores[[0, 2]], torch.tensor([2, 0]), reduction="none")
    torch.testing.assert_close(losses[[0, 2]], expected)
    assert losses[1] == 0.0
