"""Read what DFlash 2 adds to the forward of training, by the code of the services: what layers and the selector really got.

N blocks, B block size, Q = N * B block rows, S = B - 1 slots, K candidates, H hidden, D head_dim.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.config import Config
from launch.parity.stages import Selection, Sublayer
from services.drafter.model.anchors import Blocks
from services.drafter.model.batch import PackedBatch
from services.drafter.model.convolution import DynamicConvolution, convolve
from services.drafter.model.layers import BlockRows, ConvolvedLayer, rms_norm
from services.drafter.model.model import DraftModel
from services.drafter.model.selector import Candidates
from services.drafter.model.step import Drafts, predict_blocks


def read_sublayers(layer: ConvolvedLayer, rows: Tensor, block_size: int, mixed: Tensor, attended: Tensor) -> list[Sublayer]:
    """Return the sublayers of a layer that ran.

    A layer is one fused function behind its attention, so what lies inside is computed again by the same `convolve` from the
    layer's own input and attention; the layer's real output is another reading.

    Args:
        layer: the layer.
        rows: [Q, H], its input.
        block_size: B.
        mixed: [Q, H], the input that attention really got.
        attended: [Q, heads * D], the output that it really gave, before `o_proj`.
    """
    is_first = BlockRows(block_size).is_first(len(rows), rows.device)
    entering = rms_norm(rows, layer.input_layernorm.weight, layer.eps)
    attention = _sublayer(layer.attention_conv, entering, mixed, layer.self_attn.o_proj(attended), is_first)
    entering = rms_norm(rows + attention.side_1, layer.post_attention_layernorm.weight, layer.eps)
    base, projection = layer.mlp_conv.weights()
    mixed = convolve(entering, F.linear(entering, projection), base, 0, is_first)
    fed = layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(mixed)) * layer.mlp.up_proj(mixed))
    return [attention, _sublayer(layer.mlp_conv, entering, mixed, fed, is_first)]


def _sublayer(module: DynamicConvolution, entering: Tensor, mixed: Tensor, output: Tensor, is_first: Tensor) -> Sublayer:
    base, projection = module.weights()
    coefficients = F.linear(entering, projection)
    return Sublayer(entering, coefficients, mixed, output, convolve(output, coefficients, base, 1, is_first))


def draft_blocks(
    model: DraftModel, embedding: Tensor, head: Tensor, batch: PackedBatch, blocks: Blocks, config: Config
) -> tuple[Drafts, list[Selection]]:
    """Draft every block; return what the selector got and gave, too, block by block: nothing for plain DFlash."""
    calls: list[tuple[Candidates, Tensor, Tensor]] = []

    def keep(_: nn.Module, inputs: tuple[Any, ...], scores: Tensor) -> None:
        calls.append((inputs[1], inputs[2], scores))

    hook = model.candidate_selector.register_forward_hook(keep) if model.candidate_selector is not None else None
    drafts = predict_blocks(model, embedding, head, batch, blocks, config)
    if hook is None:
        return drafts, []
    hook.remove()
    tokens = torch.stack([candidates.tokens for candidates, _, _ in calls], dim=1)  # [N, S, K]
    logits = torch.stack([candidates.logits for candidates, _, _ in calls], dim=1)
    predecessors = torch.stack([previous for _, previous, _ in calls], dim=1)  # [N, S]
    scores = torch.stack([scores for _, _, scores in calls], dim=1)
    parts = (tokens, logits, predecessors, scores, drafts.tokens)
    return drafts, [Selection(*of_block) for of_block in zip(*parts, strict=True)]
