"""The sequence of a run as a pure function."""

import resource
from collections import Counter

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from common.config import Config
from common.errors import DataError
from services.exchange.plan import Plan, plan_hash, samples_per_batch
from tests.builders.small_runs import make_config, make_plan

BUCKETS = (128, 256, 512, 1024, 1536, 2048)
MAX_PADDING_SHARE = 0.02  # measured: 0.0087 for 20,000 of these lengths
NONE = np.zeros(0, np.int32)


def drawn_lengths(count: int) -> NDArray[np.int32]:
    """Skewed like conversations: the median near 500 tokens, cut at 2048."""
    lengths = np.random.Generator(np.random.Philox(7)).lognormal(6.2, 0.8, count)
    return np.clip(lengths, 1, BUCKETS[-1]).astype(np.int32)


def large_config(seed: int = 0, epochs: int = 2) -> Config:
    return make_config(buckets=BUCKETS, max_tokens=16384, samples=64, batches_per_step=6, epochs=epochs, seed=seed)


def sequence(plan: Plan) -> list[list[int]]:
    return [plan.sample_ids(batch) for batch in range(plan.num_batches)]


def test_the_same_inputs_give_the_same_plan_and_another_seed_another() -> None:
    lengths = drawn_lengths(500)
    first, again, other = (sequence(Plan(large_config(seed), lengths, NONE)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_batches_can_be_read_in_any_order() -> None:
    config = large_config(epochs=5)
    forward, backward = (Plan(config, drawn_lengths(300), NONE) for _ in range(2))
    batches = range(forward.num_batches)
    assert sequence(forward) == [backward.sample_ids(batch) for batch in reversed(batches)][::-1]


def test_every_sample_stands_in_every_epoch_once_and_epochs_differ() -> None:
    plan = Plan(large_config(epochs=3), drawn_lengths(700), NONE)
    epochs: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for batch in range(plan.num_batches):
        if ids := plan.sample_ids(batch):
            epochs[plan.info(batch).epoch] += ids
    for ids in epochs.values():
        assert sorted(ids) == list(range(700))
    assert epochs[0] != epochs[1] != epochs[2]
    assert [len(plan.epoch(epoch)) for epoch in range(3)] == [plan.batches_per_epoch] * 3


def test_budgets_and_buckets_are_kept_even_by_padded_rows() -> None:
    config, lengths = large_config(), drawn_lengths(3000)
    plan = Plan(config, lengths, NONE)
    buckets = np.searchsorted(BUCKETS, lengths)
    for ids in plan.epoch(0):
        assert 1 <= len(ids) <= config.plan.max_samples_per_batch
        assert len(ids) * lengths[ids].max() <= config.plan.max_tokens_per_batch
        assert len(set(buckets[ids].tolist())) == 1
        assert len(ids) <= samples_per_batch(config.plan, int(buckets[ids[0]]))


def test_rows_of_a_batch_have_little_padding() -> None:
    lengths = drawn_lengths(20000)
    padded = sum(len(ids) * int(lengths[ids].max()) for ids in Plan(large_config(), lengths, NONE).epoch(0))
    assert 1 - int(lengths.sum()) / padded < MAX_PADDING_SHARE


def test_a_length_at_the_bound_of_a_bucket_belongs_to_it() -> None:
    config = make_config(buckets=(4, 8), max_tokens=8, samples=64)
    plan = make_plan(config, np.array([4, 5, 4, 8], np.int32), NONE)
    assert sorted(sorted(ids.tolist()) for ids in plan.epoch(0)) == [[0, 2], [1], [3]]


def test_evaluations_stand_before_after_and_between_the_steps() -> None:
    config = make_config(batches_per_step=2, every_steps=2, epochs=2)  # 11 samples in batches of 2; 3 held out
    plan = make_plan(config)
    assert (plan.batches_per_epoch, plan.num_steps) == (6, 6)
    groups = [plan.info(batch) for batch in range(0, plan.num_batches, 2)]
    kinds = [(info.kind, info.step) for info in groups]
    steps = [("train", step) for step in range(6)]
    assert kinds == [("eval", 0), *steps[:2], ("eval", 2), *steps[2:4], ("eval", 4), *steps[4:], ("eval", 6)]
    assert all(info.closes for info in groups)
    held_out = [plan.sample_ids(batch) for batch in range(plan.num_batches) if plan.info(batch).kind == "eval"]
    assert held_out == [[0, 1], [2]] * 4
    assert [plan.info(batch).batch for batch in range(plan.num_batches)] == list(range(plan.num_batches))


def test_without_a_rhythm_evaluations_are_first_and_last_and_without_data_there_are_none() -> None:
    plan = make_plan(make_config())
    assert [plan.info(batch).kind for batch in range(0, plan.num_batches, 2)] == ["eval", "train", "train", "train", "eval"]
    plan = make_plan(make_config(every_steps=1), eval_lengths=NONE)
    assert [plan.info(batch).kind for batch in range(plan.num_batches)] == ["train"] * 6


def test_an_evaluation_of_several_groups_is_closed_by_its_last_and_filled_with_padding() -> None:
    plan = make_plan(make_config(batches_per_step=2), eval_lengths=np.full(5, 6, np.int32))
    infos = [plan.info(batch) for batch in range(4)]
    assert [info.kind for info in infos] == ["eval"] * 4
    assert [info.closes for info in infos] == [False, False, True, True]
    assert [plan.sample_ids(batch) for batch in range(4)] == [[0, 1], [2, 3], [4], []]
    assert plan.info(4).kind == "train"


def test_the_last_step_is_filled_with_padding() -> None:
    plan = make_plan(make_config(batches_per_step=4), eval_lengths=NONE)  # six batches
    assert (plan.num_steps, plan.num_batches) == (2, 8)
    assert [bool(ids) for ids in sequence(plan)] == [True] * 6 + [False] * 2
    assert [plan.info(batch).step for batch in range(8)] == [0] * 4 + [1] * 4
    assert plan.sample_ids(0) and plan.info(7).kind == "train"


def test_steps_run_on_over_the_end_of_an_epoch() -> None:
    plan = make_plan(make_config(batches_per_step=4, epochs=2), eval_lengths=NONE)
    assert [plan.info(batch).epoch for batch in range(plan.num_batches)] == [0] * 6 + [1] * 6
    assert plan.num_steps == 3


def test_the_drafters_of_a_step_have_about_as_much_to_do() -> None:
    """Two long samples have 1,024 anchors, four and more have 2,048; the epoch does not end with a step."""
    config = make_config(buckets=(2048, 8192), max_tokens=16384, samples=64, batches_per_step=6, epochs=2)
    random = np.random.Generator(np.random.Philox(7))
    lengths = np.where(np.arange(2003) < 600, 8000, random.integers(300, 2048, 2003)).astype(np.int32)
    plan = Plan(config, lengths, NONE)
    assert plan.batches_per_epoch % 6

    def anchors(batch: int) -> int:
        return sum(min(512, int(lengths[sample])) for sample in plan.sample_ids(batch)[:4])

    steps = [[anchors(batch) for batch in range(first, first + 6)] for first in range(0, plan.num_batches, 6)]
    slowest = sum(max(step[rank] + step[rank + 3] for rank in range(3)) for step in steps)
    assert 2.93 < sum(map(sum, steps)) / slowest <= 3  # 2.48 in the order in which they were drawn


def test_both_halves_of_a_step_hold_batches_alike_also_over_the_end_of_an_epoch() -> None:
    config = make_config(buckets=(2048, 8192), max_tokens=16384, samples=64, batches_per_step=6, epochs=3)
    plan = Plan(config, np.array([8000] * 60 + [1000] * 400, np.int32), NONE)
    assert plan.batches_per_epoch == 80  # 13 steps and 2 batches
    sizes = [len(plan.sample_ids(batch)) for batch in range(240)]
    halves = [set(sizes[start : start + 3]) for start in range(0, 240, 3)]
    assert sum(len(half) > 1 for half in halves) <= 2 * 3  # around what is left over of an epoch, and where sizes meet
    assert {2, 8} == set(sizes)
    assert sizes[:80] != sizes[80:160]


def test_steps_of_an_odd_number_of_batches_are_drawn_by_chance() -> None:
    config = make_config(buckets=(2048, 8192), max_tokens=16384, samples=64, batches_per_step=3, epochs=1)
    plan = Plan(config, np.array([8000] * 60 + [1000] * 400, np.int32), NONE)
    steps = [{len(plan.sample_ids(batch)) for batch in range(first, first + 3)} for first in range(0, 78, 3)]
    assert {2, 8} in steps


def test_a_sample_of_length_0_is_in_no_batch() -> None:
    lengths = np.array([3, 0, 8, 5, 0, 2], np.int32)
    plan = make_plan(make_config(epochs=2), lengths, np.array([0, 4], np.int32))
    assert [sorted(np.concatenate(plan.epoch(epoch)).tolist()) for epoch in range(2)] == [[0, 2, 3, 5]] * 2
    assert [plan.sample_ids(batch) for batch in range(2)] == [[1], []]


def test_shapes_are_the_largest_batch_of_every_number_of_rows() -> None:
    config = make_config(buckets=(64, 256, 512), max_tokens=512, samples=5)
    lengths = np.array([10, 33, 30, 7, 9, 20, 1, 200, 180, 170], np.int32)  # seven of 64, three of 256, none of 512
    plan = make_plan(config, lengths, np.array([12, 0, 500], np.int32))
    assert {(shape.num_rows, shape.length) for shape in plan.shapes} == {
        (5, 40),
        (2, 40),
        (2, 200),
        (1, 200),
        (1, 16),
        (1, 504),
    }
    assert len(plan.shapes) == 6


def test_no_batch_is_larger_than_the_shapes_say() -> None:
    config, lengths = large_config(), drawn_lengths(3000)
    plan = Plan(config, lengths, drawn_lengths(70))
    known = {(shape.num_rows, int(np.searchsorted(BUCKETS, shape.length))): shape.length for shape in plan.shapes}
    assert len(known) <= 2 * 2 * len(BUCKETS)
    for ids in (*plan.epoch(0), *plan.epoch(1)):
        longest = lengths[ids].max()
        assert known[len(ids), int(np.searchsorted(BUCKETS, longest))] >= longest


@pytest.mark.parametrize("key", ["data.path", "data.eval_path"])
def test_a_sample_longer_than_the_last_bucket_is_named(key: str) -> None:
    long, fine = np.array([3, 8, 9, 2], np.int32), np.array([3], np.int32)
    with pytest.raises(DataError, match=rf"{key}: needed samples of at most 8 tokens .* found sample 2 of 9 tokens"):
        Plan(make_config(), *((long, fine) if key == "data.path" else (fine, long)))


def test_every_shape_is_counted_over_an_epoch() -> None:
    lengths, eval_lengths = drawn_lengths(500), drawn_lengths(9)
    plan = Plan(large_config(), lengths, eval_lengths)
    sizes = Counter(len(batch) for batch in plan.epoch(0))
    assert sum(shape.num_batches for shape in plan.shapes) == plan.batches_per_epoch
    for num_rows, num_batches in sizes.items():
        assert sum(shape.num_batches for shape in plan.shapes if shape.num_rows == num_rows) == num_batches
    assert any(shape.num_batches == 0 for shape in plan.shapes)  # of held-out rows alone
    assert plan.tokens_per_batch == pytest.approx(lengths.sum() / len(plan.epoch(0)))


def test_the_hash_names_the_sequence() -> None:
    config = make_config()
    name = plan_hash(config, "data", "held out")
    others = [
        plan_hash(config, "other", "held out"),
        plan_hash(config, "data", ""),
        plan_hash(make_config(seed=1), "data", "held out"),
        plan_hash(make_config(samples=1), "data", "held out"),
        plan_hash(make_config(every_steps=3), "data", "held out"),
    ]
    assert len(name) == 16 and plan_hash(make_config(), "data", "held out") == name
    assert len({name, *others}) == 6
    assert plan_hash(make_config(num_targets=3, num_slots=7), "data", "held out") == name
    tuned = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, learning_rate=1.0))
    assert plan_hash(tuned, "data", "held out") == name


def test_a_million_samples_make_a_plan() -> None:
    lengths = drawn_lengths(1_100_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = Plan(large_config(), lengths, NONE)
    sizes = Counter(len(ids) for ids in plan.epoch(0))
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert sum(size * count for size, count in sizes.items()) == 1_100_000
    assert grown_mib < 300
