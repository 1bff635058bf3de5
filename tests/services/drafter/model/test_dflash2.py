"""DFlash 2 begins as DFlash, keeps to its blocks and documents, and its gradients are those of the dense formulas."""

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.config import Config, TrainConfig
from services.drafter.model.acceptance import evaluate_batch
from services.drafter.model.anchors import all_blocks, choose_blocks
from services.drafter.model.layers import ConvolvedLayer
from services.drafter.model.loss import decay_weights, frozen_head_loss, selector_weight
from services.drafter.model.model import DraftModel
from services.drafter.model.selector import selector_loss
from services.drafter.model.step import block_hidden, block_loss, predict_blocks
from services.drafter.model.step_sums import StepSums
from tests.builders.batches import (
    BLOCK_SIZE,
    HIDDEN_SIZE,
    dflash2,
    document_alone,
    frozen_weights,
    make_batch,
    make_config,
    randomise,
)

LAYERS = [["full_attention"], ["sliding_attention", "full_attention", "sliding_attention"]]


def plain_of(config: Config) -> Config:
    return msgspec.structs.replace(config, draft=msgspec.structs.replace(config.draft, kind="dflash"))


@pytest.mark.parametrize("layer_types", LAYERS)
@pytest.mark.parametrize("block_size", [2, 4])
def test_a_fresh_one_computes_what_dflash_does_bit_for_bit(layer_types: list[str], block_size: int) -> None:
    config = dflash2(make_config(layer_types, anchors_per_batch=8), block_size=block_size)
    batch, (embed, head) = make_batch([9, 5]), frozen_weights()
    blocks = choose_blocks(batch, 0, config)
    hidden = [block_hidden(DraftModel(kind), embed, batch, blocks, kind) for kind in (config, plain_of(config))]
    assert torch.equal(*hidden)
    found, plain = (predict_blocks(DraftModel(kind), embed, head, batch, blocks, kind) for kind in (config, plain_of(config)))
    assert torch.equal(found.tokens, plain.tokens)
    sums = [block_loss(DraftModel(kind), embed, head, batch, blocks, kind, 0.0) for kind in (config, plain_of(config))]
    assert sums[0].loss == sums[1].loss
    assert sums[0].selector_loss > 0.0


def dense_hidden(model: DraftModel, config: Config) -> Tensor:
    batch, (embed, _) = make_batch([9, 5]), frozen_weights()
    return block_hidden(model, embed, batch, next(all_blocks(batch, config)), config)


@pytest.mark.parametrize("layer_types", LAYERS)
def test_distinct_rows_of_the_first_layer_stand_for_all(layer_types: list[str]) -> None:
    """A first layer that computes every row by itself gives the same."""
    config = dflash2(make_config(layer_types, anchors_per_batch=16))
    model = randomise(DraftModel(config))
    found = dense_hidden(model, config)
    with pytest.MonkeyPatch.context() as patch:
        layer = ConvolvedLayer
        enter = layer._enter

        def enter_all(self, rows, blocks):  # type: ignore[no-untyped-def]
            return enter(self, blocks.expand(rows), type(blocks)(blocks.block_size))

        patch.setattr(layer, "_enter", enter_all)
        torch.testing.assert_close(dense_hidden(model, config), found, rtol=1e-4, atol=1e-5)


def test_rows_see_only_their_block_and_document() -> None:
    config = dflash2(make_config(anchors_per_batch=32))
    model, (embed, head) = randomise(DraftModel(config)), frozen_weights()
    batch = make_batch([9, 5])
    whole = StepSums(torch.zeros(StepSums.size(BLOCK_SIZE)))
    for document in range(2):
        part = document_alone(batch, document)
        whole.values.add_(block_loss(model, embed, head, part, next(all_blocks(part, config)), config).values.detach())
    packed = block_loss(model, embed, head, batch, next(all_blocks(batch, config)), config)
    torch.testing.assert_close(packed.values.detach(), whole.values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("loss", ["decay", "dpace"])
@pytest.mark.parametrize("contiguous_prefix", [True, False])
def test_the_loss_is_its_definition_with_one_divisor(loss: str, contiguous_prefix: bool) -> None:
    config = dflash2(make_config(anchors_per_batch=8, loss=loss, contiguous_prefix=contiguous_prefix))
    batch, (embed, head) = make_batch([9, 7]), frozen_weights()
    batch.loss_mask[5] = False
    model, blocks = randomise(DraftModel(config), 0.1), choose_blocks(batch, 0, config)
    alone, both = (block_loss(model, embed, head, batch, blocks, config, weight) for weight in (0.0, 0.5))
    torch.testing.assert_close(both.loss, alone.loss + 0.5 * both.selector_loss)
    assert both.weight == alone.weight

    hidden = block_hidden(model, embed, batch, blocks, config).view(-1, BLOCK_SIZE, HIDDEN_SIZE).detach()
    expected, recalled, decay = 0.0, 0, decay_weights(BLOCK_SIZE, config.train.decay_gamma)
    for block, slot in np.argwhere(blocks.label_mask):
        logits, label = head @ hidden[block, slot + 1], int(blocks.labels[block, slot])
        tokens = logits.topk(config.draft.selector_top_k).indices
        previous = int(batch.input_ids[blocks.anchors[block] + slot])
        selector = model.candidate_selector
        assert selector is not None
        state = selector.predecessor_codebook[previous] * (selector.hidden_projection.weight @ hidden[block, slot + 1])
        scores = logits[tokens] + selector.successor_codebook[tokens] @ state
        if label in tokens.tolist():
            recalled += 1
            expected += (decay[slot] * F.cross_entropy(scores, (tokens == label).nonzero()[0, 0])).item()
    assert both.recalled.detach().sum().item() == recalled > 0
    if loss == "decay":
        assert both.selector_loss.detach().item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("chunk_rows", [3, 100])
def test_gradients_through_the_candidates_equal_those_of_dense_logits(chunk_rows: int, softcap: float) -> None:
    random = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(11, 8, generator=random), torch.randn(20, 8, generator=random)
    labels, mix = torch.randint(0, 20, (11,), generator=random), torch.randn(11, 4, generator=random)

    def total(losses: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
        return (losses * 0.3 + selector_loss(logits + mix, tokens, labels)).sum()

    dense = hidden.clone().requires_grad_()
    logits = softcap * torch.tanh(dense @ head.T / softcap) if softcap else dense @ head.T
    tokens = (dense @ head.T).topk(4).indices.sort(1).values
    total(F.cross_entropy(logits, labels, reduction="none"), logits.gather(1, tokens), tokens).backward()  # type: ignore[no-untyped-call]
    hidden.requires_grad_()
    losses, _, candidates = frozen_head_loss(hidden, head, labels, chunk_rows, 4, softcap)
    total(losses, candidates.logits, candidates.tokens).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(candidates.tokens, tokens)
    assert hidden.grad is not None and dense.grad is not None
    torch.testing.assert_close(hidden.grad, dense.grad, rtol=1e-4, atol=1e-5)


def test_a_backward_pass_reaches_every_parameter_also_without_labels_and_at_weight_0() -> None:
    config, (embed, head) = dflash2(make_config()), frozen_weights()
    for lengths, weight in (([2, 2], 1.0), ([9], 0.0), ([9], 1.0)):
        model, batch = DraftModel(config), make_batch(lengths)
        sums = block_loss(model, embed, head, batch, choose_blocks(batch, 0, config), config, weight)
        sums.loss.backward()  # type: ignore[no-untyped-call]
        assert all(parameter.grad is not None for parameter in model.parameters())
    selector = model.candidate_selector
    assert selector is not None and selector.successor_codebook.grad is not None
    assert selector.successor_codebook.grad.any()
    of_projection = selector.hidden_projection.weight.grad
    assert of_projection is not None and not of_projection.any()  # the successors are 0: from the second step on


def test_evaluation_drafts_without_the_labels() -> None:
    config, (embed, head) = dflash2(make_config(anchors_per_batch=32)), frozen_weights()
    model, batch = randomise(DraftModel(config)), make_batch([12, 9])
    blocks = next(all_blocks(batch, config))
    drafts = predict_blocks(model, embed, head, batch, blocks, config)
    shuffled = type(blocks)(**{**vars(blocks), "labels": blocks.labels[::-1].copy(), "tokens": blocks.tokens[::-1].copy()})
    again = predict_blocks(model, embed, head, batch, shuffled, config)
    assert torch.equal(drafts.tokens, again.tokens)
    assert not torch.equal(drafts.tokens, drafts.unary)
    assert (drafts.candidates == drafts.tokens[..., None]).any(2).all()
    rounds = evaluate_batch(model, embed, head, batch, config)
    assert rounds.of_selector.shape == (4, BLOCK_SIZE)
    unary, oracle = ((row * np.arange(1, BLOCK_SIZE + 1)).sum() / row.sum() for row in rounds.of_selector[:2])
    assert oracle >= unary >= 1.0


@pytest.mark.parametrize(("step", "expected"), [(0, 0.0), (9, 0.0), (10, 0.1), (14, 0.5), (19, 1.0), (99, 1.0)])
def test_the_selector_is_ramped_up(step: int, expected: float) -> None:
    train = TrainConfig(selector_weight=1.0, selector_warmup_ratio=0.1, selector_ramp_ratio=0.1)
    assert selector_weight(step, 100, train) == pytest.approx(expected)
    assert selector_weight(step, 100, TrainConfig(selector_weight=0.7)) == 0.7
