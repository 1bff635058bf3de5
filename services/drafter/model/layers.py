"""The layers of the draft model: plain ones, and those of DFlash 2 with convolutions around both sublayers.

Shapes: T context rows, N blocks, B block size, Q = N * B block rows, M wanted rows among them, H hidden,
Hq query heads, Hkv key and value heads, D head_dim.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.config import Config
from services.drafter.kernels.fused import fused, fused_and_recomputed
from services.drafter.model.attention import Attend, KeysValues
from services.drafter.model.convolution import DynamicConvolution, convolve

Rotation = tuple[Tensor, Tensor]  # cosine and sine, float32 [rows, D]
_MIXED = 2  # first rows of a block that one convolution makes different from block to block


def rotation(positions: Tensor, head_dim: int, theta: float) -> Rotation:
    """Return the rotary angles of positions [rows] over the whole head, in float32 for every type of model."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.float()[:, None] * (1.0 / theta**exponents)[None, :]
    angles = torch.cat([angles, angles], dim=1)
    return angles.cos(), angles.sin()


class BlockRows(NamedTuple):
    """The rows of N blocks: each of its own, or, before the first layer, only the distinct ones.

    Distinct rows [L * N + 1, W] are the rows of slot 0 of every block, then those of slot 1 .. L - 1, then the one row that
    all later slots of all blocks share. They are projected once.
    """

    block_size: int
    num_leading: int | None = None  # L; None where every row is its own

    def expand(self, rows: Tensor) -> Tensor:
        """Return block rows [N * B, W]."""
        if self.num_leading is None:
            return rows
        leading = rows[:-1].view(self.num_leading, -1, rows.shape[1]).transpose(0, 1)  # [N, L, W]
        masks = rows[-1:, None].expand(len(leading), self.block_size - self.num_leading, -1)
        return torch.cat([leading, masks], dim=1).flatten(0, 1)

    def is_first(self, num_rows: int, device: torch.device) -> Tensor:
        """Return which of the block rows are the first of their block: bool [num_rows, 1]."""
        return (torch.arange(num_rows, device=device) % self.block_size == 0)[:, None]


def take(rows: Tensor, wanted: Tensor | None) -> Tensor:
    return rows if wanted is None else rows.index_select(0, wanted)


@fused
def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(rows, weight.shape, weight, eps)


@fused
def norm_and_rotate(heads: Tensor, weight: Tensor, cosine: Tensor, sine: Tensor, eps: float) -> Tensor:
    """Norm each head of [rows, heads, D], then rotate it, pairing channel i with channel i + D / 2."""
    heads = F.rms_norm(heads, weight.shape, weight, eps)
    first, second = heads.chunk(2, dim=-1)
    rotated = heads * cosine[:, None] + torch.cat([-second, first], dim=-1) * sine[:, None]
    return rotated.to(heads.dtype)


@fused
def finish_layer(
    residual: Tensor, attended: Tensor, output: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float
) -> Tensor:
    """Compute the rest of a layer from the output of its heads: [rows, H]; `output` to `down` are weights."""
    hidden = residual + F.linear(attended, output)
    normed = F.rms_norm(hidden, norm.shape, norm, eps)
    return hidden + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)


@fused_and_recomputed
def enter_convolved_layer(
    rows: Tensor, is_first: Tensor, norm: Tensor, base: Tensor, projection: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Norm the rows [rows, H] and convolve them: what enters attention, and the kernels of both convolutions."""
    normed = F.rms_norm(rows, norm.shape, norm, eps)
    kernels = F.linear(normed, projection)
    return convolve(normed, kernels, base, 0, is_first), kernels


@fused_and_recomputed
def finish_convolved_layer(
    residual: Tensor,
    attended: Tensor,
    kernels: Tensor,
    is_first: Tensor,
    attention_base: Tensor,
    mlp_base: Tensor,
    mlp_projection: Tensor,
    output: Tensor,
    norm: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    eps: float,
) -> Tensor:
    """Compute the rest of a convolved layer: [rows, H]; `kernels` are those of attention, see `convolve`."""
    hidden = residual + convolve(F.linear(attended, output), kernels, attention_base, 1, is_first)
    normed = F.rms_norm(hidden, norm.shape, norm, eps)
    kernels = F.linear(normed, mlp_projection)
    mixed = convolve(normed, kernels, mlp_base, 0, is_first)
    fed = F.linear(F.silu(F.linear(mixed, gate)) * F.linear(mixed, up), down)
    return hidden + convolve(fed, kernels, mlp_base, 1, is_first)


def linear(in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=False)


class Attention(nn.Module):
    """Attention of block rows over the context and the block rows; context rows have no queries."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        draft, hidden = config.draft, config.shape.hidden_size
        self.head_dim, self.eps = draft.head_dim, config.shape.rms_norm_eps
        self.q_proj = linear(hidden, draft.num_attention_heads * draft.head_dim)
        self.k_proj = linear(hidden, draft.num_key_value_heads * draft.head_dim)
        self.v_proj = linear(hidden, draft.num_key_value_heads * draft.head_dim)
        self.o_proj = linear(draft.num_attention_heads * draft.head_dim, hidden)
        self.q_norm = nn.RMSNorm(draft.head_dim, eps=self.eps)
        self.k_norm = nn.RMSNorm(draft.head_dim, eps=self.eps)

    def keys_values(self, rows: Tensor, angles: Rotation, blocks: BlockRows | None = None) -> KeysValues:
        """Return key and value heads of context rows [T, H], or of the rows of `blocks`."""
        projected = self.k_proj(rows), self.v_proj(rows)
        key, value = (self._split_heads(heads if blocks is None else blocks.expand(heads)) for heads in projected)
        return norm_and_rotate(key, self.k_norm.weight, *angles, self.eps).transpose(0, 1), value.transpose(0, 1)

    def forward(
        self, rows: Tensor, angles: Rotation, context: KeysValues, attend: Attend, blocks: BlockRows, wanted: Tensor | None
    ) -> Tensor:
        """Return the heads' output [M, Hq * D] for the wanted rows, before `o_proj`."""
        query = self._split_heads(take(blocks.expand(self.q_proj(rows)), wanted))
        own_angles = take(angles[0], wanted), take(angles[1], wanted)
        query = norm_and_rotate(query, self.q_norm.weight, *own_angles, self.eps).transpose(0, 1)
        return attend(query, context, self.keys_values(rows, angles, blocks))

    def _split_heads(self, rows: Tensor) -> Tensor:
        return rows.view(rows.shape[0], rows.shape[1] // self.head_dim, self.head_dim)


class MLP(nn.Module):
    """The weights of the gated feed-forward part of a layer; `finish_layer` computes it."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden_size, intermediate_size)
        self.up_proj = linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight


class DraftLayer(nn.Module):
    """One layer: attention, then the feed-forward part, both around the residual stream of the block rows."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, self.eps = config.shape.hidden_size, config.shape.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps=self.eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=self.eps)
        self.mlp = MLP(hidden, config.draft.intermediate_size)

    def forward(
        self, rows: Tensor, angles: Rotation, context: KeysValues, attend: Attend, blocks: BlockRows, wanted: Tensor | None
    ) -> Tensor:
        """Return the wanted block rows after this layer, [M, H]; all rows are keys.

        `rows` are block rows [Q, H] or distinct ones, as `blocks` says. `attend` is the attention of the wanted rows.
        """
        normed = rms_norm(rows, self.input_layernorm.weight, self.eps)
        attended = self.self_attn(normed, angles, context, attend, blocks, wanted)
        weights = self.self_attn.o_proj.weight, self.post_attention_layernorm.weight, *self.mlp.weights()
        return finish_layer(take(blocks.expand(rows), wanted), attended, *weights, self.eps)


class ConvolvedLayer(DraftLayer):
    """A layer of DFlash 2: what enters and leaves either sublayer is convolved within its block."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        hidden, group_size = config.shape.hidden_size, config.draft.conv_group_size
        self.attention_conv = DynamicConvolution(hidden, group_size)
        self.mlp_conv = DynamicConvolution(hidden, group_size)

    def forward(
        self, rows: Tensor, angles: Rotation, context: KeysValues, attend: Attend, blocks: BlockRows, wanted: Tensor | None
    ) -> Tensor:
        """Return all block rows after this layer, [Q, H]; each row reads the row before it, so `wanted` must be None."""
        assert wanted is None, "a convolved layer computes all rows"
        mixed, kernels, mixed_blocks = self._enter(rows, blocks)
        attended = self.self_attn(mixed, angles, context, attend, mixed_blocks, wanted)
        residual = blocks.expand(rows)
        weights = self.self_attn.o_proj.weight, self.post_attention_layernorm.weight, *self.mlp.weights()
        return finish_convolved_layer(
            residual,
            attended,
            kernels,
            blocks.is_first(len(residual), rows.device),
            self.attention_conv.base_kernel,
            *self.mlp_conv.weights(),
            *weights,
            self.eps,
        )

    def _enter(self, rows: Tensor, blocks: BlockRows) -> tuple[Tensor, Tensor, BlockRows]:
        """Return the convolved rows that enter attention, the kernels of all block rows, and which rows the former are.

        Distinct rows stay so: they become those of slot 0, those of slot 1, and one that all later slots share.
        """
        weights = self.input_layernorm.weight, *self.attention_conv.weights(), self.eps
        if blocks.num_leading is None:
            return *enter_convolved_layer(rows, blocks.is_first(len(rows), rows.device), *weights), blocks
        short = BlockRows(_MIXED + 1, blocks.num_leading)
        rows = short.expand(rows)
        mixed, kernels = enter_convolved_layer(rows, short.is_first(len(rows), rows.device), *weights)
        by_slot, of_slot = (part.view(-1, _MIXED + 1, part.shape[1]).unbind(1) for part in (mixed, kernels))
        kernels = blocks.expand(torch.cat([of_slot[0], of_slot[1][:1]]))
        return torch.cat([*by_slot[:_MIXED], by_slot[_MIXED][:1]]), kernels, BlockRows(blocks.block_size, _MIXED)
