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
    "convolutions",
    "hidden states",
    "logits",
    "candidates",
    "selection",
    "accepted tokens",
)
ONLY_DFLASH2 = ("convolutions", "candidates", "selection")
EXACT_STAGES = ("tokens", "loss mask", "masks", "accepted tokens")  # no numbers that could be rounded
FAR_ROW = 40000  # a block here is compared too, and angles up to here, whatever the length of the documents
FAR_POSITIONS = torch.arange(0, FAR_ROW, 2503)
OLDER_KEYS = "by the older keys"

Angles = tuple[Tensor, Tensor]  # cosine and sine, [rows, D] each
_LAYER_PARTS = (  # of DFlash 2, in the order of a layer's forward, and the stage of each
    ("attention input", "hidden states"),
    ("attention coefficients", "convolutions"),
    ("attention side 0", "convolutions"),
    ("attention output", "hidden states"),
    ("attention side 1", "convolutions"),
    ("mlp input", "hidden states"),
    ("mlp coefficients", "convolutions"),
    ("mlp side 0", "convolutions"),
    ("mlp output", "hidden states"),
    ("mlp side 1", "convolutions"),
)


class Reading(NamedTuple):
    """One tensor of one stage."""

    where: str  # its name, and the layer, block or document that it belongs to
    values: Tensor  # [R, C], float32, int64 or bool
    scale: Tensor | None = None  # float32 [R], to which bounds are relative; None for a row's largest magnitude


class Sublayer(NamedTuple):
    """The rows of one block around attention or the MLP; [B, H] but for the coefficients."""

    input: Tensor  # normed
    coefficients: Tensor  # [B, 2 * 2 * H / conv_group_size], laid out side, tap, group
    side_0: Tensor  # what is convolved before it
    output: Tensor  # before it is convolved
    side_1: Tensor  # what is added to the residual stream


class Selection(NamedTuple):
    """The choices of the selector in one block of S slots."""

    tokens: Tensor  # int64 [S, K], candidates in the order of their ids
    logits: Tensor  # [S, K], of the candidates
    predecessors: Tensor  # int64 [S], the token before each slot
    scores: Tensor  # [S, K], of the candidates behind that token
    drafts: Tensor  # int64 [S], the tokens chosen


Readings = Iterator[tuple[str, Reading]]  # each with its stage
Trace = Mapping[str, list[Reading]]  # by stage; a stage that was given to a drafter instead of computed is absent


class Executed(NamedTuple):
    """A drafter with its trace; tensors and tap layers as in launch.parity.reference."""

    trace: Trace
    tensors: Mapping[str, Tensor]
    tap_layers: list[int]


def collect(readings: Iterable[tuple[str, Reading]]) -> Trace:
    """Return readings under their stages, in the order in which they came."""
    trace: dict[str, list[Reading]] = {}
    for stage, reading in readings:
        trace.setdefault(stage, []).append(reading)
    return trace


def find(trace: Trace, stage: str, where: str) -> Tensor | None:
    """Return the values of a reading, if the trace has it."""
    return next((reading.values for reading in trace.get(stage, []) if reading.where == where), None)


def get(trace: Trace, stage: str, where: str) -> Tensor:
    """Return the values of a reading that the trace must have."""
    values = find(trace, stage, where)
    assert values is not None, f"{stage}: needed the reading {where!r}, found none"
    return values


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


Layer = tuple[Tensor, Tensor, Sequence[Sublayer], Tensor]


def layer_readings(where: str, layers: Sequence[Layer], output: Tensor) -> Readings:
    """Name the layers of one block, and the output [B, H] of the final norm.

    A layer has its mask [B, a + B], whether a row sees anything of another document or block [B], the sublayers of DFlash 2
    (attention and MLP; none of plain DFlash), and its output [B, H].
    """
    for index, (mask, others, sublayers, rows) in enumerate(layers):
        yield "masks", Reading(f"layer {index}, {where}", torch.cat([mask, others[:, None]], dim=1))
        values = [tensor for sublayer in sublayers for tensor in sublayer]
        for (part, stage), tensor in zip(_LAYER_PARTS[: len(values)], values, strict=True):
            yield stage, Reading(f"layer {index}, {part}, {where}", tensor)
        yield "hidden states", Reading(f"layer {index}, {where}", rows)
    yield "hidden states", Reading(f"final norm, {where}", output)


def head_readings(where: str, logits: Tensor, drafts: Tensor) -> Readings:
    """Name the end of one block: logits [B - 1, V] and greedy drafts [B - 1]."""
    yield "logits", Reading(where, logits)
    yield "accepted tokens", Reading(where, drafts[None])


def selection_readings(where: str, selection: Selection) -> Readings:
    """Name what the selector of DFlash 2 did in one block; its drafts are named by `head_readings`."""
    yield "candidates", Reading(f"tokens, {where}", selection.tokens)
    yield "candidates", Reading(f"logits, {where}", selection.logits.sort(dim=1, descending=True).values)
    yield "selection", Reading(f"scores, {where}", selection.scores)
    yield "selection", Reading(f"predecessors, {where}", selection.predecessors[None])


def forward_order(stage: str, where: str) -> tuple[int, int, int]:
    """Return when a reading was computed in the forward: layers of DFlash 2 alternate between two stages."""
    if stage not in ("convolutions", "hidden states"):
        return STAGES.index(stage), 0, 0
    layer, part = (*where.split(", "), "")[:2]
    parts = [name for name, _ in _LAYER_PARTS]
    number = int(layer.removeprefix("layer ")) if layer.startswith("layer ") else 10**6  # the final norm
    return STAGES.index("convolutions"), number, parts.index(part) if part in parts else len(parts)


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
