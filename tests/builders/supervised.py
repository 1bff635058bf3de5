"""The supervised part of a sample as text."""

import itertools

from transformers import PreTrainedTokenizerBase

from common.data.arrow_file import Sample


def read_text(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> str:
    return str(tokenizer.decode(sample.input_ids))


def read_supervised(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> list[str]:
    """The text of every supervised stretch."""
    edges = [0, *(sample.loss_mask[1:] != sample.loss_mask[:-1]).nonzero()[0] + 1, len(sample.loss_mask)]
    spans = [slice(start, stop) for start, stop in itertools.pairwise(edges) if sample.loss_mask[start]]
    return [str(tokenizer.decode(sample.input_ids[span])) for span in spans]
