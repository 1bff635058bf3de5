"""Write made-up data that a draft model can learn: cycles of token ids, repeated from a random phase."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from common.config import Config, SyntheticConfig
from common.data.dataset import Dataset
from common.errors import ConfigError, DataError
from launch.data.writer import DatasetWriter

MAX_CYCLES = 16
CYCLE_LENGTH = 8


def write_synthetic(config: Config, folder: Path) -> None:
    """Write `folder`/train and `folder`/eval as `config.data.synthetic` says; sets that are there already are kept.

    Both follow the same cycles; a token belongs to one cycle at most, so each token decides the next.
    The first quarter of a sample is its prompt, the rest is supervised.

    Raises:
        ConfigError: the shortest is longer than the longest, or the vocabulary is too small for a cycle.
    """
    synthetic = config.data.synthetic
    assert synthetic is not None
    shortest, longest, vocab_size = synthetic.min_length, synthetic.max_length, config.shape.vocab_size
    if shortest > longest:
        raise ConfigError(f"data.synthetic.min_length: needed at most data.synthetic.max_length {longest}, found {shortest}")
    if vocab_size <= CYCLE_LENGTH:
        raise ConfigError(f"data.synthetic: needed a vocabulary of more than {CYCLE_LENGTH} ids, found {vocab_size}")
    for stream, (split, num_samples) in enumerate({"train": synthetic.num_samples, "eval": synthetic.num_eval_samples}.items()):
        source = {
            "made_by": "launch.data.synthetic",
            "split": split,
            "seed": config.seed,
            "vocab_size": vocab_size,
            "mask_token_id": config.draft.mask_token_id,
            **msgspec.to_builtins(synthetic),
        }
        if not _is_there(folder / split, source):
            shutil.rmtree(folder / split, ignore_errors=True)
            with DatasetWriter(folder / split, source) as writer:
                _write(config, synthetic, num_samples, _generator(config.seed, stream + 1), writer)


def _is_there(folder: Path, source: dict[str, Any]) -> bool:
    try:
        return Dataset.open(folder).manifest.source == source
    except DataError:
        return False


def _write(
    config: Config, synthetic: SyntheticConfig, num_samples: int, random: np.random.Generator, writer: DatasetWriter
) -> None:
    cycles = _make_cycles(config.seed, config.shape.vocab_size, config.draft.mask_token_id)
    for _ in range(num_samples):
        length = int(random.integers(synthetic.min_length, synthetic.max_length, endpoint=True))
        cycle = cycles[random.integers(len(cycles))]
        phase = random.integers(CYCLE_LENGTH)
        offsets = np.arange(length)
        writer.add(cycle[(offsets + phase) % CYCLE_LENGTH], offsets >= length // 4)


def _make_cycles(seed: int, vocab_size: int, mask_token_id: int) -> npt.NDArray[np.int32]:
    """Return int32 [cycles, CYCLE_LENGTH], no id twice, never the mask id."""
    ids = np.delete(np.arange(vocab_size, dtype=np.int32), mask_token_id)
    num_cycles = min(MAX_CYCLES, len(ids) // CYCLE_LENGTH)
    chosen = _generator(seed, 0).permutation(ids)[: num_cycles * CYCLE_LENGTH]
    return chosen.reshape(num_cycles, CYCLE_LENGTH)


def _generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, stream))))
