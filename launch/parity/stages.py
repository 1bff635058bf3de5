"""The stages of a drafter's forward, and the names of everything that is read in them: the same words on every side.

n rows of a document, a rows of context before a block, B block size, K taps, H hidden, D head_dim, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

STAGES = (
    "tokens",
    "loss mask",
    "taps",
    "projection",
    "rotary angles",
    "keys and values",
    "masks",
    "embeddings",
    "hidden states",
    "logits",
    "accepted tokens",
)
EXACT_STAGES = ("tokens", "loss mask", "masks", "accepted tokens")  # no numbers that could be rounded
FAR_ROW = 40000  # a block here is compared too, and angles up to here, whatever the length of the documents
FAR_POSITIONS = torch.arange(0, FAR_ROW, 2503)
OLDER_KEYS = "by the older keys"

Angles = tuple[Tensor, Tensor]  # cosine and sine, [rows, D] each


class Reading(NamedTuple):
    """One tensor of one stage."""

    where: str  # its name, and the layer, block or document that it belongs to
    values: Tensor  # [R, C], float32, int64 or bool
    scale: Tensor | None = None  # float32 [R], to which bounds are relative; None for a row's largest magnitude


Readings = Iterator[tuple[str, Reading]]  # each with its stage
Trace = Mapping[str, list[Reading]]  # by stage; a stage that was given to a drafter instead of computed is absent


def collect(readings: Iterable[tuple[str, Reading]]) -> Trace:
    """Return readings under their stages, in the order in which they came."""
    trace: dict[str, list[Reading]] = {}
    for stage, reading in readings:
        trace.setdefault(stage, []).append(reading)
    return trace


def find(trace: Trace, stage: str, where: str) -> Tensor | None:
    """Return the values of a reading, if the trace has it."""
    return next((reading.values for reading in trace.get(stage, []) if reading.where == where), None)


def block_name(document: int, row: int) -> str:
    """Return the name of the block whose anchor is at this row of a document."""
    return f"document {document}, block at row {row}"


def document_readings(
    number: int,
    is_anchor: NDArray[np.bool_],
    taps: Tensor,
    context: Tensor,
    angles: Angles,
    keys_values: Iterable[tuple[Tensor, Tensor]],
) -> Readings:
    """Name the rows of one document: anchors [n], taps [n, K, H], context [n, H], keys and values [n, heads, D] by layer."""
    where = f"document {number}"
    yield "loss mask", Reading(f"anchors, {where}", torch.from_numpy(is_anchor)[None])
    for tap in range(taps.shape[1]):
        yield "taps", Reading(f"tap {tap}, {where}", taps[:, tap])
    yield "projection", Reading(where, context)
    yield from angle_readings(angles, torch.arange(len(context)), where)
    for index, (key, value) in enumerate(keys_values):
        yield "keys and values", Reading(f"keys of layer {index}, {where}", key.flatten(1))
        yield "keys and values", Reading(f"values of layer {index}, {where}", value.flatten(1))


def start_readings(where: str, tokens: Tensor, labels: Tensor, embeddings: Tensor, angles: Angles, anchor: int) -> Readings:
    """Name the input of one block: tokens [B], labels [B - 1], embeddings [B, H]."""
    yield "tokens", Reading(where, tokens[None])
    yield "loss mask", Reading(f"labels, {where}", labels[None])
    yield "embeddings", Reading(where, embeddings)
    yield from angle_readings(angles, torch.arange(anchor, anchor + len(tokens)), where)


def layer_readings(where: str, layers: Sequence[tuple[Tensor, Tensor, Tensor]], output: Tensor) -> Readings:
    """Name the layers of one block, and the output [B, H] of the final norm.

    A layer has its mask [B, a + B], whether a row sees anything of another document or block [B], and its output [B, H].
    """
    for index, (mask, others, rows) in enumerate(layers):
        yield "masks", Reading(f"layer {index}, {where}", torch.cat([mask, others[:, None]], dim=1))
        yield "hidden states", Reading(f"layer {index}, {where}", rows)
    yield "hidden states", Reading(f"final norm, {where}", output)


def head_readings(where: str, logits: Tensor, drafts: Tensor) -> Readings:
    """Name the end of one block: logits [B - 1, V] and greedy drafts [B - 1]."""
    yield "logits", Reading(where, logits)
    yield "accepted tokens", Reading(where, drafts[None])


def far_readings(angles: Angles, older_angles: Angles, masks: Iterable[Tensor]) -> Readings:
    """Name what shows far from the start only: angles of FAR_POSITIONS, and masks past the end of a window."""
    yield from angle_readings(angles, FAR_POSITIONS, "far positions")
    yield from angle_readings(older_angles, FAR_POSITIONS, f"far positions {OLDER_KEYS}")
    for index, mask in enumerate(masks):
        yield "masks", Reading(f"layer {index}, block at row {FAR_ROW} of a long document", mask)


def angle_readings(angles: Angles, positions: Tensor, where: str) -> Readings:
    """Name cosine and sine; an angle is a product with the position, so its rounding grows with the position."""
    scale = 1.0 + positions.float() / 256
    for name, values in zip(("cosine", "sine"), angles, strict=True):
        yield "rotary angles", Reading(f"{name}, {where}", values, scale)
