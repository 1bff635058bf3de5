"""Choose the documents and blocks that are executed. n tokens of a document."""

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.data.dataset import Dataset
from common.errors import DataError

NUM_ANCHORS = 3  # of each document
_GENERATED_LENGTHS = (19, 33, 48)
_GENERATED_PROMPT = 5  # tokens that are not supervised


class Document(NamedTuple):
    """One sample: its tokens, which of them are supervised, and the rows whose blocks are drafted."""

    input_ids: NDArray[np.int64]  # [n]
    loss_mask: NDArray[np.bool_]  # [n]
    anchors: list[int]  # ascending


def candidates(loss_mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Mark the rows where a block may start: a supervised row that another one follows. [n]"""
    offered: NDArray[np.bool_] = loss_mask & np.append(loss_mask[1:], False)
    return offered


def read_documents(folder: Path, num_documents: int, max_tokens: int) -> list[Document]:
    """Return the first samples that have a block, each cut to `max_tokens` or just behind its first answer's start.

    Raises:
        DataError: unreadable, or no sample with a block.
    """
    dataset = Dataset.open(folder)
    documents: list[Document] = []
    for number in range(dataset.num_samples):
        sample = dataset.read(number)
        length = max(max_tokens, int(sample.loss_mask.argmax()) + 2 * NUM_ANCHORS)
        document = _document(sample.input_ids[:length].astype(np.int64), sample.loss_mask[:length])
        documents += [document] if document.anchors else []
        if len(documents) == num_documents:
            break
    if not documents:
        raise DataError(f"{folder}: needed a sample with two supervised tokens in a row, found none")
    return documents


def make_documents(vocab_size: int, forbidden: Collection[int], longest: int, seed: int) -> list[Document]:
    """Make documents of random ids, for a folder without data; none has a `forbidden` id, such as the mask token."""
    random = np.random.default_rng(seed)
    ids = np.setdiff1d(np.arange(vocab_size), np.array(sorted(forbidden), np.int64))
    lengths = [*_GENERATED_LENGTHS, max(longest, _GENERATED_LENGTHS[-1])]
    return [_document(random.choice(ids, length), np.arange(length) >= _GENERATED_PROMPT) for length in lengths]


def _document(input_ids: NDArray[np.int64], loss_mask: NDArray[np.bool_]) -> Document:
    """Return a document with blocks at the first, the last and evenly spread candidates between."""
    rows = np.flatnonzero(candidates(loss_mask))
    chosen = np.unique(np.linspace(0, len(rows) - 1, NUM_ANCHORS).round().astype(int))
    return Document(input_ids, loss_mask, rows[chosen].tolist() if len(rows) else [])
