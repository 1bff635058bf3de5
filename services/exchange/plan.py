"""Which samples make which batch: a pure function of the data sets, the seed and the plan settings.

The run is one sequence of batches, cut into groups of G = plan.batches_per_step:

    | evaluation | step 1 | step 2 | ... | step n | evaluation | step n+1 | ... | last step | evaluation |
      e groups     1 group  1 group                  e groups

Batch b is place b % G of group b // G. Places without a batch (the end of an evaluation, the end of
the last step) are padding: the rank takes part with nothing of its own.

An epoch: the samples of each length bucket are shuffled, sorted by length within windows so that
batches have little padding, cut into batches of a fixed number of samples per bucket, and the
batches of all buckets are shuffled. So every epoch has the same number of batches. A length of 0
marks a sample that no batch may hold.

Drafters wait for each other in every step, and a batch of few samples has fewer anchors. So with an even G the
batches are sorted by what they hold and cut into teams of G / 2; the teams are shuffled, and a step is two
of them. So each of G / 2 drafters has about as much to do as any other.
"""

import hashlib
from collections import Counter
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.actor.messages import BatchInfo, BatchKind, BatchShape
from common.config import Config, PlanConfig
from common.data.padding import padded_lengths
from common.errors import DataError

_SCHEME = 2  # of the sequence: one more whenever the same settings give another
_WINDOW_BATCHES = 32
_HASH_BYTES = 16

Batches = list[NDArray[np.int64]]  # the sample ids of each batch


class _Group(NamedTuple):
    kind: BatchKind
    first: int  # number of its first batch among the batches of its kind
    step: int  # optimizer steps before it
    closes: bool


class Plan:
    """The sequence of a run; asked by number."""

    def __init__(self, config: Config, lengths: NDArray[np.int32], eval_lengths: NDArray[np.int32]) -> None:
        self._settings = config.plan
        self._seed = config.seed
        self._lengths = lengths
        self._buckets = _bucket(lengths, config.plan, "data.path")
        self._epochs: dict[int, Batches] = {}
        self.batches_per_epoch = sum(
            -(-len(ids) // samples_per_batch(config.plan, bucket)) for bucket, (ids, _) in enumerate(self._buckets)
        )
        num_tokens = sum(int(lengths.sum()) for _, lengths in self._buckets)
        self.tokens_per_batch = num_tokens / max(1, self.batches_per_epoch)
        self._eval_batches = _eval_batches(eval_lengths, config.plan)
        self.shapes = _shapes([*self._buckets, *_bucket(eval_lengths, config.plan, "data.eval_path")], config.plan)
        self.num_steps = -(-self.batches_per_epoch * config.plan.epochs // config.plan.batches_per_step)
        self._groups = self._lay_out(config.evaluation.every_steps)
        self.num_batches = len(self._groups) * config.plan.batches_per_step

    def info(self, batch: int) -> BatchInfo:
        """What stands at place `batch` of the sequence."""
        group, number = self._locate(batch)
        epoch = number // self.batches_per_epoch if group.kind == "train" else 0
        return BatchInfo(batch, group.kind, epoch, group.step, group.closes)

    def sample_ids(self, batch: int) -> list[int]:
        """The samples of a batch, in order; [] where the place is padding."""
        group, number = self._locate(batch)
        if group.kind == "eval":
            return self._eval_batches[number].tolist() if number < len(self._eval_batches) else []
        epoch, place = divmod(number, self.batches_per_epoch)
        return self.epoch(epoch)[place].tolist() if epoch < self._settings.epochs else []

    def num_samples(self, num_steps: int) -> int:
        """How many samples the first steps train on; one that comes again in a later epoch counts again."""
        epochs, rest = divmod(num_steps * self._settings.batches_per_step, self.batches_per_epoch)
        if epochs >= self._settings.epochs:
            epochs, rest = self._settings.epochs, 0
        per_epoch = sum(len(ids) for ids, _ in self._buckets)
        return epochs * per_epoch + (sum(map(len, self.epoch(epochs)[:rest])) if rest else 0)

    def epoch(self, epoch: int) -> Batches:
        """All training batches of an epoch, in order. The two latest epochs asked for are kept."""
        if epoch not in self._epochs:
            while len(self._epochs) >= 2:
                del self._epochs[next(iter(self._epochs))]
            random = np.random.Generator(np.random.Philox(np.random.SeedSequence([self._seed, epoch])))
            batches = _shuffled_batches(self._buckets, self._settings, random)
            team_size, rest = divmod(self._settings.batches_per_step, 2)
            if not rest:
                batches = _in_teams(batches, self._lengths, epoch * self.batches_per_epoch, team_size, random)
            self._epochs[epoch] = batches
        return self._epochs[epoch]

    def _locate(self, batch: int) -> tuple[_Group, int]:
        index, place = divmod(batch, self._settings.batches_per_step)
        group = self._groups[index]
        return group, group.first + place

    def _lay_out(self, every_steps: int) -> list[_Group]:
        size = self._settings.batches_per_step
        eval_groups = -(-len(self._eval_batches) // size)
        groups: list[_Group] = []
        for step in range(self.num_steps + 1):
            if step in (0, self.num_steps) or (every_steps and step % every_steps == 0):
                groups += [_Group("eval", i * size, step, i == eval_groups - 1) for i in range(eval_groups)]
            if step < self.num_steps:
                groups.append(_Group("train", step * size, step, True))
        return groups


def plan_hash(config: Config, fingerprint: str, eval_fingerprint: str) -> bytes:
    """16 bytes that name the sequence: two runs with the same hash have the same batches."""
    identity = [_SCHEME, fingerprint, eval_fingerprint, config.seed, config.plan, config.evaluation]
    return hashlib.blake2b(msgspec.json.encode(identity, order="deterministic"), digest_size=_HASH_BYTES).digest()


def samples_per_batch(settings: PlanConfig, bucket: int) -> int:
    """Rows of a batch of that bucket, so that even rows of full length fit into the token budget."""
    return min(settings.max_samples_per_batch, settings.max_tokens_per_batch // settings.bucket_lengths[bucket])


def _bucket(lengths: NDArray[np.int32], settings: PlanConfig, key: str) -> list[tuple[NDArray[np.int64], NDArray[np.int32]]]:
    """(sample ids, lengths) per bucket; sample ids ascending, those of length 0 left out."""
    longest = settings.bucket_lengths[-1]
    if len(lengths) and int(lengths.max()) > longest:
        raise DataError(
            f"{key}: needed samples of at most {longest} tokens (the longest of plan.bucket_lengths), "
            f"found sample {int(lengths.argmax())} of {int(lengths.max())} tokens"
        )
    buckets = np.searchsorted(np.asarray(settings.bucket_lengths), lengths)
    buckets[lengths == 0] = -1
    members = [np.flatnonzero(buckets == bucket) for bucket in range(len(settings.bucket_lengths))]
    return [(ids, lengths[ids]) for ids in members]


def _shuffled_batches(
    buckets: list[tuple[NDArray[np.int64], NDArray[np.int32]]], settings: PlanConfig, random: np.random.Generator
) -> Batches:
    batches: Batches = []
    for bucket, (ids, lengths) in enumerate(buckets):
        size = samples_per_batch(settings, bucket)
        order = random.permutation(len(ids))
        window = np.arange(len(ids)) // (size * _WINDOW_BATCHES)
        order = order[np.lexsort((lengths[order], window))]
        batches += _cut(ids[order], size)
    return [batches[i] for i in random.permutation(len(batches))]


def _in_teams(batches: Batches, lengths: NDArray[np.int32], first: int, size: int, random: np.random.Generator) -> Batches:
    """Reorder the batches into teams of batches of about equal size, each from a multiple of `size` on.

    Every second team is reversed: of the two teams of a step the first begins with its largest batch, the second with its
    smallest.

    Args:
        batches: of an epoch, shuffled.
        lengths: of all samples.
        first: number of the first batch in the run; batches that fill no team stay before and after all teams.
        size: of a team.
        random: draws the order of the teams.
    """
    num_before = min(-first % size, len(batches))
    num_teams = (len(batches) - num_before) // size
    ungrouped, grouped = batches[num_teams * size :], batches[: num_teams * size]
    largest_first = sorted(grouped, key=lambda ids: (len(ids), int(lengths[ids].sum())), reverse=True)
    reordered = ungrouped[:num_before]
    for index, rank in enumerate(random.permutation(num_teams), start=(first + num_before) // size):
        team = largest_first[rank * size : (rank + 1) * size]
        reordered += reversed(team) if index % 2 else team
    return reordered + ungrouped[num_before:]


def _eval_batches(lengths: NDArray[np.int32], settings: PlanConfig) -> Batches:
    buckets = _bucket(lengths, settings, "data.eval_path")
    return [batch for bucket, (ids, _) in enumerate(buckets) for batch in _cut(ids, samples_per_batch(settings, bucket))]


def _shapes(buckets: list[tuple[NDArray[np.int64], NDArray[np.int32]]], settings: PlanConfig) -> list[BatchShape]:
    """The largest batch of each number of rows that a bucket has: full ones, and the one that is left over."""
    shapes: Counter[tuple[int, int]] = Counter()
    for place, (ids, lengths) in enumerate(buckets):
        size, is_training = (
            samples_per_batch(settings, place % len(settings.bucket_lengths)),
            place < len(settings.bucket_lengths),
        )
        for num_rows, num_batches in ((size, len(ids) // size), (len(ids) % size, 1)):
            if num_rows and num_batches:
                longest = int(padded_lengths(lengths.max(), settings.bucket_lengths))
                shapes[num_rows, longest] += num_batches if is_training else 0
    return [BatchShape(*shape, num_batches) for shape, num_batches in sorted(shapes.items())]


def _cut(ids: NDArray[np.int64], size: int) -> Batches:
    return [ids[start : start + size] for start in range(0, len(ids), size)]
