"""Acceptance by evaluation set and category: the parts add up to the total."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from common.acceptance import Acceptance, SelectorReport
from common.config import Config, DataConfig
from launch.data.writer import DatasetWriter
from services.drafter.model.acceptance import evaluate_batch, summarise, with_features_of_another_document
from services.drafter.model.batch import PackedBatch
from services.drafter.model.model import DraftModel
from services.drafter.training.evaluator import Evaluator
from services.drafter.training.run_state import RunState
from tests.builders.batches import dflash2, document_alone, frozen_weights, make_batch, make_config, randomise

LENGTHS = [20, 9, 14, 30, 12]
SETS = {"code": ["python", "", "python"], "chat": ["", ""]}


def alone(values: torch.Tensor) -> torch.Tensor:
    """Return the sum over a group of one."""
    return values


@pytest.fixture(params=["dflash", "dflash2"])
def config(tmp_path: Path, request: pytest.FixtureRequest) -> Config:
    for name, categories in SETS.items():
        with DatasetWriter(tmp_path / name, {}) as writer:
            for category in categories:
                writer.add([1, 2], [1, 1], category)
    data = DataConfig(path="unused", eval_paths={name: str(tmp_path / name) for name in SETS})
    config = msgspec.structs.replace(make_config(anchors_per_batch=64), data=data)
    return dflash2(config, selector_top_k=12) if request.param == "dflash2" else config


def batch_of(sample_ids: list[int]) -> PackedBatch:
    batch = make_batch([LENGTHS[sample_id] for sample_id in sample_ids], seed=sample_ids[0])
    return replace(batch, sample_ids=np.array(sample_ids))


def totals(found: Acceptance) -> tuple[int, int]:
    return found.num_rounds, found.num_tokens


def test_every_sample_counts_in_its_set_and_category(config: Config) -> None:
    model = randomise(DraftModel(config))
    evaluator = Evaluator(model, frozen_weights(), config)
    batches = [batch_of([0, 3]), batch_of([4, 1]), batch_of([2])]
    expected = np.zeros((len(LENGTHS), 4), dtype=np.int64)
    control = np.zeros(4, dtype=np.int64)
    for batch in batches:
        expected[batch.sample_ids] += evaluate_batch(model, *frozen_weights(), batch, config).chosen
        control += evaluate_batch(model, *frozen_weights(), with_features_of_another_document(batch), config).chosen.sum(0)
    for _ in range(2):  # the second time from the start again
        evaluator.begin()
        for batch in batches:
            evaluator.add(batch)
        rounds, stopping = evaluator.close(alone, stopping=True)
        assert stopping
    found = evaluator.summarise(rounds, step=7)
    assert found.step == 7
    assert totals(found) == totals(summarise(expected.sum(0)))
    assert found.acceptance_other_prompt == summarise(control).acceptance
    rows = dict(found.rows())
    assert list(rows) == ["code", "code/python", "chat"]  # sets in their order; no name, no category
    for name, samples in (("code", [0, 1, 2]), ("code/python", [0, 2]), ("chat", [3, 4])):
        of_samples = msgspec.structs.asdict(summarise(expected[samples].sum(0)))
        assert {key: getattr(rows[name], key) for key in of_samples} == of_samples
    assert sum(totals(rows[name])[0] for name in ("code", "chat")) == found.num_rounds
    assert found.num_tokens == sum(length - 3 for length in LENGTHS)  # two of the prompt, and the prefill's own


def test_a_rank_that_receives_the_run_state_has_the_evaluation(config: Config) -> None:
    evaluator = Evaluator(randomise(DraftModel(config)), frozen_weights(), config)
    evaluator.add(batch_of([0, 1, 2, 3, 4]))
    rounds, stopping = evaluator.close(alone, stopping=False)
    sender, receiver = (RunState(evaluator.make_rounds(), evaluator.summarise) for _ in range(2))
    sender.resume(12, None)
    evaluation = sender.record_evaluation(rounds, step=3)
    receiver.load_state_dict(sender.state_dict())
    assert not stopping and receiver.evaluation == evaluation == evaluator.summarise(rounds, step=3)
    assert (evaluation.selector is not None) == (config.draft.kind == "dflash2")


def test_ranks_and_batches_do_not_change_an_evaluation(config: Config) -> None:
    """Two ranks with parts of the documents, one by one, count what one rank counts in one batch."""
    documents = batch_of([0, 1, 2, 3, 4])
    alone_on_it, first, second = (Evaluator(randomise(DraftModel(config)), frozen_weights(), config) for _ in range(3))
    alone_on_it.add(documents)
    for document in range(len(LENGTHS)):
        (second if document in (1, 4) else first).add(document_alone(documents, document))
    rounds, _ = alone_on_it.close(alone, stopping=False)
    of_second = torch.from_numpy(np.append(second.rounds, 1))  # it stops
    together, stopping = first.close(lambda mine: mine + of_second, stopping=False)
    of_control = 3  # a document alone in a batch gets zeros, others the features of the next
    kept = torch.arange(len(rounds)) != of_control
    assert stopping and torch.equal(together[kept], rounds[kept])
    found = first.summarise(together, step=1)
    if config.draft.kind == "dflash":
        assert found.selector is None
        return
    unary, oracle, recalled, labels = evaluate_batch(
        randomise(DraftModel(config)), *frozen_weights(), documents, config
    ).of_selector
    assert found.selector == SelectorReport(
        acceptance_unary=summarise(unary).acceptance,
        acceptance_oracle=summarise(oracle).acceptance,
        recall_per_position=(recalled[1:] / labels[1:]).tolist(),
    )
    assert found.selector.acceptance_oracle > found.acceptance
