"""The loss of a batch against its definition, learning, and no wait for the GPU."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from common.config import Config
from services.drafter.model.acceptance import evaluate_batch, matching_prefix, summarise, with_features_of_another_document
from services.drafter.model.anchors import all_blocks, choose_blocks
from services.drafter.model.batch import PackedBatch
from services.drafter.model.loss import DPACE_SMOOTHING, decay_weights
from services.drafter.model.model import DraftModel
from services.drafter.model.step import block_hidden, block_loss, predict_blocks
from services.drafter.model.step_sums import StepSums
from services.drafter.training.optimizer import MasterAdamW
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


def test_sums_equal_their_definition() -> None:
    config, batch, (embed, head) = make_config(anchors_per_batch=8), make_batch([9, 5]), frozen_weights()
    model = DraftModel(config)
    blocks = choose_blocks(batch, 0, config)
    sums = block_loss(model, embed, head, batch, blocks, config)
    hidden = block_hidden(model, embed, batch, blocks, config).view(-1, BLOCK_SIZE, HIDDEN_SIZE)
    decay = decay_weights(BLOCK_SIZE, config.train.decay_gamma)
    expected = StepSums(torch.zeros(StepSums.size(BLOCK_SIZE)))
    for block, slot in np.argwhere(blocks.label_mask):
        logits, label = head @ hidden[block, slot + 1], torch.tensor(blocks.labels[block, slot])
        expected.loss.add_(decay[slot] * F.cross_entropy(logits, label).detach())
        expected.weight.add_(decay[slot])
        expected.correct[slot] += logits.argmax() == label
        expected.recalled[slot] += logits.argmax() == label
        expected.labels[slot] += 1
    accepted = matching_prefix((hidden[:, 1:] @ head.T).argmax(-1).numpy(), blocks)
    for view in (expected.accepted, expected.accepted_unary, expected.accepted_oracle):
        view.fill_(int(accepted[blocks.valid].sum()))
    torch.testing.assert_close(sums.values.detach(), expected.values)
    predictions = predict_blocks(model, embed, head, batch, blocks, config)
    assert torch.equal(predictions.tokens, (hidden[:, 1:] @ head.T).argmax(-1))


def test_padding_adds_nothing_to_loss_and_gradients() -> None:
    batch, (embed, head) = make_batch([9, 5]), frozen_weights()
    results = []
    for size in (8, 32):
        config = make_config(anchors_per_batch=size)
        model = DraftModel(config)
        sums = block_loss(model, embed, head, batch, next(all_blocks(batch, config)), config)
        sums.loss.backward()  # type: ignore[no-untyped-call]
        results.append([sums.values.detach(), *(parameter.grad for parameter in model.parameters())])
    for few, many in zip(*results, strict=True):
        torch.testing.assert_close(few, many)


def test_a_batch_without_labels_gives_zero_gradients() -> None:
    config, batch, (embed, head) = make_config(), make_batch([2, 2]), frozen_weights()
    model = DraftModel(config)
    sums = block_loss(model, embed, head, batch, choose_blocks(batch, 0, config), config)
    sums.loss.backward()  # type: ignore[no-untyped-call]
    assert not sums.values.any()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def knowing_batch(device: str = "cpu") -> PackedBatch:
    """Random text whose taps at row t are the embeddings of tokens t + 2 and t + 3, for a draft to learn to read."""
    batch, (embed, _) = make_batch([24, 17, 30, 12], seed=1, device=device), frozen_weights()
    ahead = np.minimum(np.arange(len(batch.input_ids))[:, None] + [2, 3], len(batch.input_ids) - 1)
    return replace(batch, hidden_states=embed[torch.from_numpy(batch.input_ids[ahead])].to(device))


def train(model: DraftModel, batch: PackedBatch, config: Config, num_steps: int) -> None:
    embed, head = frozen_weights(device=str(batch.hidden_states.device))
    optimizer = MasterAdamW(model, config.train, num_steps, BLOCK_SIZE)
    for step in range(num_steps):
        blocks = choose_blocks(batch, step, config)
        sums = block_loss(model, embed, head, batch, blocks, config)
        optimizer.gradients.accumulate(sums)
        optimizer.step(step)


def acceptance_length(model: DraftModel, batch: PackedBatch, config: Config) -> float:
    return summarise(evaluate_batch(model, *frozen_weights(), batch, config).chosen.sum(0)).acceptance


def test_a_draft_model_learns_to_read_the_features() -> None:
    config, batch = make_config(learning_rate=3e-3, anchors_per_batch=64), knowing_batch()
    model = DraftModel(config)
    untrained = acceptance_length(model, batch, config)
    train(model, batch, config, num_steps=200)
    trained = acceptance_length(model, batch, config)
    foreign = acceptance_length(model, with_features_of_another_document(batch), config)
    assert untrained < 1.3
    assert trained > 2.5
    assert foreign < trained - 1.0


def test_the_same_seed_gives_the_same_bits() -> None:
    config, batch = make_config(), make_batch([20, 30])
    models = [DraftModel(config), DraftModel(config)]
    for model in models:
        train(model, batch, config, num_steps=3)
    states = [model.state_dict() for model in models]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("loss", ["decay", "dpace"])
def test_the_loss_of_packed_documents_is_the_sum_of_their_losses(loss: str) -> None:
    config, batch, (embed, head) = make_config(loss=loss, anchors_per_batch=64), make_batch([9, 5, 14]), frozen_weights()
    model = DraftModel(config)
    parts = [batch, *(document_alone(batch, document) for document in range(3))]
    sums = []
    for part in parts:
        blocks = choose_blocks(part, 0, config)
        sums.append(block_loss(model, embed, head, part, blocks, config).values.detach())
    torch.testing.assert_close(sums[0], torch.stack(sums[1:]).sum(0))
    assert sums[0][0] > 0


def test_dpace_divides_by_anchors_and_weighs_early_slots_more() -> None:
    config, batch, (embed, head) = make_config(loss="dpace"), make_batch([9, 5]), frozen_weights()
    model = DraftModel(config)
    blocks = choose_blocks(batch, 0, config)
    sums = block_loss(model, embed, head, batch, blocks, config)
    assert sums.weight == blocks.valid.sum()
    hidden = block_hidden(model, embed, batch, blocks, config).view(-1, BLOCK_SIZE, HIDDEN_SIZE).detach()
    expected = 0.0
    for block in np.flatnonzero(blocks.valid):
        labels = torch.from_numpy(blocks.labels[block])
        losses = F.cross_entropy(hidden[block, 1:] @ head.T, labels, reduction="none").tolist()
        num_labels = int(blocks.label_mask[block].sum())
        smoothed = [(1 - DPACE_SMOOTHING) * math.exp(-each) + DPACE_SMOOTHING for each in losses]
        weights = [sum(math.prod(smoothed[: j + 1]) for j in range(i, num_labels)) for i in range(num_labels)]
        assert weights == sorted(weights, reverse=True)
        expected += sum(weight * each for weight, each in zip(weights, losses, strict=False))
    assert sums.loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
@pytest.mark.parametrize("layers", [["sliding_attention"], ["sliding_attention", "full_attention", "full_attention"]])
@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_a_gpu_computes_what_the_cpu_computes(layers: list[str], kind: str) -> None:
    results = []
    for device in ("cpu", "cuda"):
        config = dflash2(make_config(layers, head_dim=16, anchors_per_batch=64), kind=kind)
        batch, (embed, head) = make_batch([24, 17, 30, 12], device=device), frozen_weights(device=device)
        model = randomise(DraftModel(config), 0.05).to(device)
        blocks = choose_blocks(batch, 0, config)
        sums = block_loss(model, embed, head, batch, blocks, config)
        sums.loss.backward()  # type: ignore[no-untyped-call]
        results.append(
            [
                sums.values.detach().cpu(),
                *(parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None),
            ]
        )
    assert len(results[0]) == len(results[1]) == 1 + len(list(model.parameters()))
    for cpu, gpu in zip(*results, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-3, atol=1e-3 * float(cpu.abs().max()))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_a_training_step_never_waits_for_the_gpu(kind: str) -> None:
    plain = make_config(dtype="bfloat16", head_dim=16, anchors_per_batch=64)
    config, batch = dflash2(plain, kind=kind), knowing_batch("cuda")
    model = DraftModel(config).to("cuda")
    embed, head = (weight.bfloat16() for weight in frozen_weights(device="cuda"))
    optimizer = MasterAdamW(model, config.train, 4, BLOCK_SIZE)
    try:
        for step in range(4):
            torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step may set things up
            blocks = choose_blocks(batch, step, config)
            sums = block_loss(model, embed, head, batch, blocks, config)
            optimizer.gradients.accumulate(sums)
            result = optimizer.step(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.loss.isfinite()
