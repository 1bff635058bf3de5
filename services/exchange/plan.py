"""The samples of every batch: a pure function of the data sets, the seed and the plan settings.

The run is one sequence of batches, cut into groups of G = plan.batches_per_step:

    | evaluation | step 1 | step 2 | ... | step n | evaluation | step n+1 | ... | last step | evaluation |
      e groups     1 group  1 group                  e groups

Batch b has index b % G in group b // G. Numbers without samples (the end of an evaluation, the end of the last
step) are padding: the rank joins the collectives with zero gradients.

An epoch: the samples of each length bucket are shuffled, sorted by length within windows so that
batches have little padding, cut into batches of a fixed number of samples per bucket, and the
batches of all buckets are shuffled. So every epoch has the same number of batches. A length of 0
marks a sample that no batch may hold.

Drafters wait for each other in every step, and a batch of few samples has fewer anchors. So with an even G the
batches are sorted by their samples and tokens and cut into teams of G / 2; the teams are shuffled, and a step is two
of them. Each of G / 2 drafters then has about as much work as any other.
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

_SCHEME = 2  # version of the sequence: increase it whenever the same settings give another one
_WINDOW_BATCHES = 32
_HASH_BYTES = 16

Batches = list[NDArray[np.int64]]  # the sample ids of each batch


class _Group(NamedTuple):
    kind: BatchKind
    first: int  # number of its first batch among the batches of its kind
    step: int  # optimizer steps before it
    closes: bool


class Plan:
    """The sequence of a run."""

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
        """Describe a batch of the sequence."""
        group, number = self._locate(batch)
        epoch = number // self.batches_per_epoch if group.kind == "train" else 0
        return BatchInfo(batch, group.kind, epoch, group.step, group.closes)

    def sample_ids(self, batch: int) -> list[int]:
        """Return the samples of a batch, in order; [] for padding."""
        group, number = self._locate(batch)
        if group.kind == "eval":
            return self._eval_batches[number].tolist() if number < len(self._eval_batches) else []
        epoch, index = divmod(number, self.batches_per_epoch)
        return self.epoch(epoch)[index].tolist() if epoch < self._settings.epochs else []

    def num_samples(self, num_steps: int) -> int:
        """Count the samples of the first steps; a sample counts again in every epoch."""
        epochs, rest = divmod(num_steps * self._settings.batches_per_step, self.batches_per_epoch)
        if epochs >= self._settings.epochs:
            epochs, rest = self._settings.epochs, 0
        per_epoch = sum(len(ids) for ids, _ in self._buckets)
        return epochs * per_epoch + (sum(map(len, self.epoch(epochs)[:rest])) if rest else 0)

    def epoch(self, epoch: int) -> Batches:
        """Return all training batches of an epoch, in order; the two latest epochs are cached."""
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
        number, index = divmod(batch, self._settings.batches_per_step)
        group = self._groups[number]
        return group, group.first + index

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
    """Return 16 bytes that identify the sequence: two runs with the same hash have the same batches."""
    identity = [_SCHEME, fingerprint, eval_fingerprint, config.seed, config.plan, config.evaluation]
    return hashlib.blake2b(msgspec.json.encode(identity, order="deterministic"), digest_size=_HASH_BYTES).digest()


def samples_per_batch(settings: PlanConfig, bucket: int) -> int:
    """Return the number of rows in a batch of that bucket: even rows of full length fit into the token budget."""
    return min(settings.max_samples_per_batch, settings.max_tokens_per_batch // settings.bucket_lengths[bucket])


def _bucket(lengths: NDArray[np.int32], settings: PlanConfig, key: str) -> list[tuple[NDArray[np.int64], NDArray[np.int32]]]:
    """Return (sample ids, lengths) per bucket; sample ids ascending, those of length 0 left out."""
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
    smallest. `first` is the number of the first batch in the run; batches that fill no team stay before and after all teams.
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
    """Return the largest batch of each number of rows in a bucket: full batches, and the remainder; training buckets first."""
    shapes: Counter[tuple[int, int]] = Counter()
    num_buckets = len(settings.bucket_lengths)
    for index, (ids, lengths) in enumerate(buckets):
        size, is_training = samples_per_batch(settings, index % num_buckets), index < num_buckets
        for num_rows, num_batches in ((size, len(ids) // size), (len(ids) % size, 1)):
            if num_rows and num_batches:
                longest = int(padded_lengths(lengths.max(), settings.bucket_lengths))
                shapes[num_rows, longest] += num_batches if is_training else 0
    return [BatchShape(*shape, num_batches) for shape, num_batches in sorted(shapes.items())]


def _cut(ids: NDArray[np.int64], size: int) -> Batches:
    return [ids[start : start + size] for start in range(0, len(ids), size)]
