"""A drafter as it is trained: documents packed into one batch, all blocks at once, by the code of the services.

What the layers were really given is taken by forward hooks while the forward of a training step runs.
T packed rows, N blocks, B block size, Q = N * B block rows, K taps, H hidden, D head_dim.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from common.config import Config
from launch.decoding.target_features import pack_features
from launch.parity.plain import FAR_ROW, FAR_STEP, name_angles, named, with_others
from launch.parity.probe import Document
from launch.parity.stages import Reading, Trace, collect
from services.drafter.model.anchors import Blocks, all_blocks
from services.drafter.model.attention import DenseAttention, KeysValues
from services.drafter.model.batch import PackedBatch
from services.drafter.model.frozen import load_embedding_and_head
from services.drafter.model.model import DraftModel, Rotation, rotation
from services.drafter.model.step import block_hidden, predict_blocks
from services.drafter.model.visibility import BlockAnchors, key_runs

CPU = torch.device("cpu")


class LayerCall(NamedTuple):
    """What one layer was given and what it returned."""

    inputs: Tensor  # [Q, H]
    angles: Rotation  # [Q, D] each
    context: KeysValues  # [Hkv, T, D] each
    mask: Tensor  # bool [Q, T + Q]
    outputs: Tensor  # [Q, H]


@torch.inference_mode()
def run_training(config: Config, weights: Mapping[str, Tensor], documents: list[Document], device: torch.device) -> Trace:
    """Every stage of every block in float32, with the weights rounded to bfloat16 as an export holds them.

    Args:
        config: of the run.
        weights: by parameter name, of any float type.
        documents: what to run it on.
        device: of the target; the draft model is on the CPU.

    Raises:
        ModelError: the target cannot be read.
    """
    config = _in_float32(config, documents)
    model = DraftModel(config).eval()
    model.load_state_dict({name: weight.bfloat16().float() for name, weight in weights.items()})
    batch, frozen = _pack(config, documents, device), load_embedding_and_head(config, CPU)
    offered = next(all_blocks(batch, config))
    blocks = _choose(offered, documents, batch.cu_seqlens)
    calls, hidden = _run_layers(model, frozen[0], batch, blocks, config)
    predictions = predict_blocks(model, *frozen, batch, blocks, config)

    return collect(
        itertools.chain(
            _document_readings(model, batch, offered, calls),
            _block_readings(batch, blocks, calls, config),
            _head_readings(hidden, frozen[1], predictions, batch, blocks),
            _far_readings(model, config.draft.block_size),
        )
    )


def _in_float32(config: Config, documents: list[Document]) -> Config:
    """The same drafter in float32, with room for every block, which counts labels up to the first that is missing."""
    num_blocks = sum(len(document.input_ids) for document in documents)
    change = msgspec.structs.replace
    return change(
        config,
        model=change(config.model, dtype="float32"),
        draft=change(config.draft, dtype="float32"),
        train=change(config.train, anchors_per_batch=num_blocks, contiguous_prefix=True),
    )


def _pack(config: Config, documents: list[Document], device: torch.device) -> PackedBatch:
    """The documents through the target, on the CPU."""
    tokens, masks = [document.input_ids for document in documents], [document.loss_mask for document in documents]
    batch = pack_features(config, tokens, masks, device)
    return replace(batch, hidden_states=batch.hidden_states.cpu(), position_ids=batch.position_ids.cpu())


def _choose(offered: Blocks, documents: list[Document], cu_seqlens: NDArray[np.int64]) -> Blocks:
    """Of the blocks that training would draft those of the probe, and one that is padding."""
    wanted = [cu_seqlens[number] + row for number, document in enumerate(documents) for row in document.anchors]
    chosen = np.append(np.flatnonzero(np.isin(offered.anchors, wanted) & offered.valid), len(offered.valid) - 1)
    return replace(offered, **{name: value[chosen] for name, value in vars(offered).items()})


def _run_layers(
    model: DraftModel, embedding: Tensor, batch: PackedBatch, blocks: Blocks, config: Config
) -> tuple[list[LayerCall], Tensor]:
    """The forward of a step: what each layer saw, and the hidden states [Q, H] behind the final norm."""
    calls: list[LayerCall] = []

    def keep(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        rows, angles, context, attend, place, _ = inputs
        calls.append(LayerCall(place(rows), angles, context, attend.mask, output))

    hooks = [layer.register_forward_hook(keep) for layer in model.layers]
    hidden = block_hidden(model, embedding, batch, blocks, config)
    for hook in hooks:
        hook.remove()
    return calls, hidden


def _document_readings(
    model: DraftModel, batch: PackedBatch, offered: Blocks, calls: list[LayerCall]
) -> Iterator[tuple[str, Reading]]:
    context, positions = model.project_context(batch.hidden_states), batch.position_ids
    is_anchor = torch.zeros(1, len(batch.input_ids), dtype=torch.bool)
    is_anchor[0, offered.anchors[offered.valid]] = True
    for number in range(len(batch.sample_ids)):
        where, rows = f"document {number}", slice(*batch.cu_seqlens[number : number + 2])
        yield "loss mask", Reading(f"anchors, {where}", is_anchor[:, rows])
        for tap in range(batch.hidden_states.shape[1]):
            yield "taps", Reading(f"tap {tap}, {where}", batch.hidden_states[rows, tap])
        yield "projection", Reading(where, context[rows])
        yield from _angle_readings(model, positions[rows], where)
        for index, call in enumerate(calls):
            key, value = (heads.transpose(0, 1)[rows].flatten(1) for heads in call.context)
            yield "keys and values", Reading(f"keys of layer {index}, {where}", key)
            yield "keys and values", Reading(f"values of layer {index}, {where}", value)


def _block_readings(
    batch: PackedBatch, blocks: Blocks, calls: list[LayerCall], config: Config
) -> Iterator[tuple[str, Reading]]:
    size = config.draft.block_size
    for number, where in _places(batch, blocks):
        rows, start = slice(number * size, (number + 1) * size), int(batch.cu_seqlens[blocks.documents[number]])
        tokens = [int(blocks.anchor_tokens[number])] + [config.draft.mask_token_id] * (size - 1)
        labels = np.where(blocks.label_mask[number], blocks.labels[number], -1)
        yield "tokens", Reading(where, torch.tensor([tokens]))
        yield "loss mask", Reading(named("labels", where), torch.from_numpy(labels)[None])
        yield "embeddings", Reading(where, calls[0].inputs[rows])
        positions = batch.position_ids[blocks.anchors[number]] + torch.arange(size)
        yield from name_angles(calls[0].angles[0][rows], calls[0].angles[1][rows], positions, where)
        own = torch.zeros(calls[0].mask.shape[1], dtype=torch.bool)
        own[start : int(blocks.anchors[number])] = own[len(batch.input_ids) :][rows] = True
        for index, call in enumerate(calls):
            mask = call.mask[rows]
            yield "masks", Reading(f"layer {index}, {where}", with_others(mask[:, own], (mask & ~own).any(1)))
            yield "hidden states", Reading(f"layer {index}, {where}", call.outputs[rows])


def _head_readings(
    hidden: Tensor, head: Tensor, predictions: Tensor, batch: PackedBatch, blocks: Blocks
) -> Iterator[tuple[str, Reading]]:
    rows = hidden.view(len(blocks.valid), -1, hidden.shape[1])
    for number, where in _places(batch, blocks):
        yield "hidden states", Reading(named("final norm", where), rows[number])
        yield "logits", Reading(where, rows[number, 1:] @ head.T)
        yield "accepted tokens", Reading(where, predictions[number][None])


def _far_readings(model: DraftModel, block_size: int) -> Iterator[tuple[str, Reading]]:
    """As `plain.far_readings`."""
    positions = torch.arange(0, FAR_ROW, FAR_STEP)
    yield from _angle_readings(model, positions, "far positions")
    yield from _angle_readings(model, positions, "far positions by the older keys")
    places = BlockAnchors(np.array([FAR_ROW]), np.zeros(1, np.int64), np.ones(1, np.bool_))
    for index, window in enumerate(model.windows):
        runs = key_runs(places, block_size, window, np.arange(block_size))
        mask = DenseAttention(runs, FAR_ROW, block_size, CPU).mask
        yield "masks", Reading(f"layer {index}, block at row {FAR_ROW} of a long document", mask)


def _angle_readings(model: DraftModel, positions: Tensor, where: str) -> Iterator[tuple[str, Reading]]:
    yield from name_angles(*rotation(positions, model.head_dim, model.rope_theta), positions, where)


def _places(batch: PackedBatch, blocks: Blocks) -> Iterator[tuple[int, str]]:
    """The number of every block that is not padding, and the words for its place."""
    for number in np.flatnonzero(blocks.valid):
        document = blocks.documents[number]
        yield int(number), f"document {document}, block at row {blocks.anchors[number] - batch.cu_seqlens[document]}"
