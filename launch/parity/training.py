"""Execute a drafter as it is trained: documents packed into one batch, all blocks at once, by the code of the services.

The inputs that layers really got are taken by forward hooks while the forward of a training step runs.
T packed rows, N blocks, B block size, Q = N * B block rows, H hidden, D head_dim.
"""

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
from launch.parity import stages
from launch.parity.probe import Document
from launch.parity.stages import Readings, Sublayer, Trace
from launch.parity.training_dflash2 import draft_blocks, read_sublayers
from services.drafter.model.anchors import Blocks, all_blocks
from services.drafter.model.attention import DenseAttention, KeysValues
from services.drafter.model.batch import PackedBatch
from services.drafter.model.frozen import load_embedding_and_head
from services.drafter.model.layers import ConvolvedLayer, DraftLayer, Rotation, rotation
from services.drafter.model.model import DraftModel
from services.drafter.model.selector import soft_cap
from services.drafter.model.step import block_hidden
from services.drafter.model.visibility import BlockAnchors, key_runs

CPU = torch.device("cpu")


class LayerCall(NamedTuple):
    """The inputs and the output of one layer."""

    inputs: Tensor  # [Q, H]
    angles: Rotation  # [Q, D] each
    context: KeysValues  # [Hkv, T, D] each
    mask: Tensor  # bool [Q, T + Q]
    sublayers: list[Sublayer]  # of DFlash 2, for all Q block rows
    outputs: Tensor  # [Q, H]


@torch.inference_mode()
def run_training(config: Config, weights: Mapping[str, Tensor], documents: list[Document], device: torch.device) -> Trace:
    """Compute every stage of every block in float32; the draft model is on the CPU, the target on `device`.

    Raises:
        ModelError: the target cannot be read.
    """
    config = _in_float32(config, documents)
    model = DraftModel(config).eval()
    model.load_state_dict(weights)
    return stages.collect(_readings(model, config, documents, device))


def _readings(model: DraftModel, config: Config, documents: list[Document], device: torch.device) -> Readings:
    tokens, masks = [document.input_ids for document in documents], [document.loss_mask for document in documents]
    batch = pack_features(config, tokens, masks, device)
    batch = replace(batch, hidden_states=batch.hidden_states.cpu(), position_ids=batch.position_ids.cpu())
    embedding, head = load_embedding_and_head(config, CPU)
    offered = next(all_blocks(batch, config))
    blocks = _choose(offered, documents, batch.cu_seqlens)
    calls, hidden = _run_layers(model, embedding, batch, blocks, config)
    yield from _document_readings(model, batch, offered, calls)
    drafts, selections = draft_blocks(model, embedding, head, batch, blocks, config)
    rows = hidden.view(len(blocks.valid), config.draft.block_size, -1)
    for number, where in _valid_blocks(batch, blocks):
        yield from _block_readings(batch, blocks, calls, config, number, where, rows[number])
        if selections:
            yield from stages.selection_readings(where, selections[number])
        logits = soft_cap(model.for_head(rows[number, 1:]) @ head.T, model.logit_softcap)
        yield from stages.head_readings(where, logits, drafts.tokens[number])
    angles = rotation(stages.FAR_POSITIONS, model.head_dim, model.rope_theta)
    yield from stages.far_readings(angles, angles, _far_masks(model, config.draft.block_size))


def _in_float32(config: Config, documents: list[Document]) -> Config:
    """Return the drafter in float32, with room for every block, that counts labels up to the first that is missing."""
    num_blocks = sum(len(document.input_ids) for document in documents)
    change = msgspec.structs.replace
    return change(
        config,
        model=change(config.model, dtype="float32"),
        draft=change(config.draft, dtype="float32"),
        train=change(config.train, anchors_per_batch=num_blocks, contiguous_prefix=True),
    )


def _choose(offered: Blocks, documents: list[Document], cu_seqlens: NDArray[np.int64]) -> Blocks:
    """Return the blocks of the documents' anchors among those that training would draft, and one that is padding."""
    wanted = [cu_seqlens[number] + row for number, document in enumerate(documents) for row in document.anchors]
    chosen = np.append(np.flatnonzero(np.isin(offered.anchors, wanted) & offered.valid), len(offered.valid) - 1)
    return replace(offered, **{name: value[chosen] for name, value in vars(offered).items()})


def _run_layers(
    model: DraftModel, embedding: Tensor, batch: PackedBatch, blocks: Blocks, config: Config
) -> tuple[list[LayerCall], Tensor]:
    """Run the forward of a step; return the calls of the layers, and the hidden states [Q, H] behind the final norm."""
    calls: list[LayerCall] = []
    attention: list[tuple[Tensor, Tensor]] = []  # input and output of the attention of every layer

    def keep_attention(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        attention.append((inputs[4].expand(inputs[0]), output))

    def keep(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        rows, angles, context, attend, of_blocks, _ = inputs
        rows, sublayers = of_blocks.expand(rows), []
        if isinstance(layer, ConvolvedLayer):
            sublayers = read_sublayers(layer, rows, of_blocks.block_size, *attention[-1])
        calls.append(LayerCall(rows, angles, context, attend.mask, sublayers, output))

    layers = [layer for layer in model.layers if isinstance(layer, DraftLayer)]
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    hooks += [layer.self_attn.register_forward_hook(keep_attention) for layer in layers]
    hidden = block_hidden(model, embedding, batch, blocks, config)
    for hook in hooks:
        hook.remove()
    return calls, hidden


def _document_readings(model: DraftModel, batch: PackedBatch, offered: Blocks, calls: list[LayerCall]) -> Readings:
    context = model.project_context(batch.hidden_states)
    is_anchor = np.zeros(len(batch.input_ids), np.bool_)
    is_anchor[offered.anchors[offered.valid]] = True
    for number in range(len(batch.sample_ids)):
        rows = slice(*batch.cu_seqlens[number : number + 2])
        angles = rotation(batch.position_ids[rows], model.head_dim, model.rope_theta)
        cached = [(key.transpose(0, 1)[rows], value.transpose(0, 1)[rows]) for key, value in (call.context for call in calls)]
        yield from stages.document_readings(number, is_anchor[rows], batch.hidden_states[rows], context[rows], angles, cached)


def _block_readings(
    batch: PackedBatch, blocks: Blocks, calls: list[LayerCall], config: Config, number: int, where: str, output: Tensor
) -> Readings:
    size, first = config.draft.block_size, calls[0]
    rows, start = slice(number * size, (number + 1) * size), int(batch.cu_seqlens[blocks.documents[number]])
    tokens = torch.tensor([int(blocks.anchor_tokens[number])] + [config.draft.mask_token_id] * (size - 1))
    labels = torch.from_numpy(np.where(blocks.label_mask[number], blocks.labels[number], -1))
    anchor, angles = int(blocks.anchors[number]), (first.angles[0][rows], first.angles[1][rows])
    yield from stages.start_readings(where, tokens, labels, first.inputs[rows], angles, anchor - start)
    own = torch.zeros(first.mask.shape[1], dtype=torch.bool)
    own[start:anchor] = own[len(batch.input_ids) :][rows] = True
    layers = []
    for call in calls:
        mask, sublayers = call.mask[rows], [Sublayer(*(part[rows] for part in sublayer)) for sublayer in call.sublayers]
        layers.append((mask[:, own], (mask & ~own).any(1), sublayers, call.outputs[rows]))
    yield from stages.layer_readings(where, layers, output)


def _far_masks(model: DraftModel, block_size: int) -> Iterator[Tensor]:
    anchors = BlockAnchors(np.array([stages.FAR_ROW]), np.zeros(1, np.int64), np.ones(1, np.bool_))
    for mask in model.masks:
        runs = key_runs(anchors, block_size, mask, np.arange(block_size))
        yield DenseAttention(runs, stages.FAR_ROW, block_size, CPU).mask


def _valid_blocks(batch: PackedBatch, blocks: Blocks) -> Iterator[tuple[int, str]]:
    """Yield the number and the name of every block that is not padding."""
    for number in np.flatnonzero(blocks.valid):
        document = int(blocks.documents[number])
        yield int(number), stages.block_name(document, int(blocks.anchors[number] - batch.cu_seqlens[document]))
