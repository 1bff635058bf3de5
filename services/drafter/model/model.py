"""The DFlash draft model; parameter names are those of the exported file.

Shapes: T context rows, N blocks, B block size, Q = N * B block rows, M wanted rows among them, K taps, H hidden,
Hq query heads, Hkv key and value heads, D head_dim.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.config import Config
from common.weights import random_tensor
from services.drafter.kernels.fused import fused
from services.drafter.model.attention import Attend, KeysValues

Rotation = tuple[Tensor, Tensor]  # cosine and sine, float32 [rows, D]
Expand = Callable[[Tensor], Tensor]  # distinct rows to block rows
_CPU = torch.device("cpu")
_INITIAL_DEVIATION = 0.02


def rotation(positions: Tensor, head_dim: int, theta: float) -> Rotation:
    """Return the rotary angles of positions [rows] over the whole head, in float32 for every type of model."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.float()[:, None] * (1.0 / theta**exponents)[None, :]
    angles = torch.cat([angles, angles], dim=1)
    return angles.cos(), angles.sin()


def in_blocks(rows: Tensor, block_size: int) -> Tensor:
    """Expand one row per anchor and the row shared by all mask slots, [N + 1, W], to block rows [N * B, W]."""
    masks = rows[-1:, None].expand(rows.shape[0] - 1, block_size - 1, -1)
    return torch.cat([rows[:-1, None], masks], dim=1).flatten(0, 1)


def identity(rows: Tensor) -> Tensor:
    return rows


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

    def keys_values(self, rows: Tensor, angles: Rotation, expand: Expand = identity) -> KeysValues:
        """Return key and value heads of [rows, H]."""
        key, value = (self._split_heads(expand(project(rows))) for project in (self.k_proj, self.v_proj))
        return norm_and_rotate(key, self.k_norm.weight, *angles, self.eps).transpose(0, 1), value.transpose(0, 1)

    def forward(
        self, rows: Tensor, angles: Rotation, context: KeysValues, attend: Attend, expand: Expand, wanted: Tensor | None
    ) -> Tensor:
        """Return the heads' output [M, Hq * D] for the wanted rows, before `o_proj`."""
        query = self._split_heads(take(expand(self.q_proj(rows)), wanted))
        own_angles = take(angles[0], wanted), take(angles[1], wanted)
        query = norm_and_rotate(query, self.q_norm.weight, *own_angles, self.eps).transpose(0, 1)
        return attend(query, context, self.keys_values(rows, angles, expand))

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
        self, rows: Tensor, angles: Rotation, context: KeysValues, attend: Attend, expand: Expand, wanted: Tensor | None
    ) -> Tensor:
        """Return the wanted block rows after this layer, [M, H]; all rows are keys.

        `rows` are block rows [Q, H], or distinct rows that `expand` turns into block rows after the projections, so that
        equal rows are projected once. `attend` is the attention of the wanted rows.
        """
        normed = rms_norm(rows, self.input_layernorm.weight, self.eps)
        attended = self.self_attn(normed, angles, context, attend, expand, wanted)
        weights = self.self_attn.o_proj.weight, self.post_attention_layernorm.weight, *self.mlp.weights()
        return finish_layer(take(expand(rows), wanted), attended, *weights, self.eps)


class DraftModel(nn.Module):
    """DFlash (arXiv 2602.06036): target features enter every layer as keys and values, a block leaves in one pass.

    The embedding and the head are the target's and not part of this module. On the device "meta" it has shapes only.
    """

    def __init__(self, config: Config, device: torch.device = _CPU) -> None:
        super().__init__()
        draft, hidden, self.eps = config.draft, config.shape.hidden_size, config.shape.rms_norm_eps
        self.head_dim, self.rope_theta = draft.head_dim, config.shape.rope_theta
        self.windows = [draft.sliding_window if kind == "sliding_attention" else 0 for kind in draft.layer_types]  # 0: full
        with torch.device("meta"):
            self.fc = linear(len(draft.tap_layers) * hidden, hidden)
            self.hidden_norm = nn.RMSNorm(hidden, eps=self.eps)
            self.layers = nn.ModuleList(DraftLayer(config) for _ in range(draft.num_layers))
            self.norm = nn.RMSNorm(hidden, eps=self.eps)
        self.to(getattr(torch, draft.dtype)).to_empty(device=device)
        if device.type != "meta":
            self.initialise(config.seed)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill projections uniformly (deviation 0.02) and norms with one; equal bits on every device (`random_tensor`)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                kind = parameter.device, parameter.dtype
                parameter.copy_(random_tensor(f"draft.{name}", parameter.shape, _INITIAL_DEVIATION, seed, *kind))

    def project_context(self, taps: Tensor) -> Tensor:
        """Project target features [T, K, H], of any float type, to the context [T, H] that all layers share."""
        return rms_norm(self.fc(taps.flatten(1).to(self.fc.weight.dtype)), self.hidden_norm.weight, self.eps)

    def context_keys_values(self, context: Tensor, positions: Tensor) -> Iterator[KeysValues]:
        """Yield keys and values [Hkv, T, D] of the context [T, H] at positions [T], one pair per layer; inference caches them.

        Pairs are computed lazily, so a backward pass finishes all gradients of a layer before it reaches the previous layer.
        """
        angles = rotation(positions, self.head_dim, self.rope_theta)
        return (layer.self_attn.keys_values(context, angles) for layer in self._layers())

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        context_keys_values: Iterable[KeysValues],
        attends: Sequence[Attend],
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states [M, H] of block rows, after the final norm, that the target's head turns into logits.

        Every layer but the last computes all block rows, because they are keys of the next layer.

        Args:
            embeddings: [N + 1, H], the target's embedding of every anchor token, then that of the mask token.
            positions: int64 [Q], anchor position + offset.
            context_keys_values: one pair per layer, see the method of that name.
            attends: one per layer; that of the last layer attends for the wanted rows only.
            wanted: int64 [M], block rows; None for all.
        """
        angles = rotation(positions, self.head_dim, self.rope_theta)
        rows, layers = embeddings.to(self.norm.weight.dtype), self._layers()
        expand: Expand = partial(in_blocks, block_size=positions.shape[0] // (embeddings.shape[0] - 1))
        for layer, context, attend in zip(layers, context_keys_values, attends, strict=True):
            rows = layer(rows, angles, context, attend, expand, wanted if layer is layers[-1] else None)
            expand = identity
        return rms_norm(rows, self.norm.weight, self.eps)

    def _layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]
