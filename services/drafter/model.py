"""The DFlash draft model; parameter names are those of the exported file.

Shapes: T context rows, Q block rows, K taps, H hidden, Hq query heads, Hkv key and value heads, D head_dim.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.config import Config
from services.drafter.attention import attend

KeysValues = tuple[Tensor, Tensor]  # key, normed and rotated, and value: both [Hkv, rows, D]
Rotation = tuple[Tensor, Tensor]  # cosine and sine, float32 [rows, D]


def rotation(positions: Tensor, head_dim: int, theta: float) -> Rotation:
    """Rotary angles over the whole head, always in float32 whatever the model's type.

    Args:
        positions: int64 [rows], the position of each row in its document.
        head_dim: D.
        theta: the base of the frequencies.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.float()[:, None] * (1.0 / theta**exponents)[None, :]
    angles = torch.cat([angles, angles], dim=1)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, angles: Rotation) -> Tensor:
    """Rotate [heads, rows, D], pairing channel i with channel i + D / 2."""
    first, second = heads.chunk(2, dim=-1)
    cosine, sine = angles
    return (heads * cosine + torch.cat([-second, first], dim=-1) * sine).to(heads.dtype)


def linear(in_features: int, out_features: int, dtype: torch.dtype) -> nn.Linear:
    """A projection without bias whose weight is left to `DraftModel.initialise`."""
    return nn.Linear(in_features, out_features, bias=False, dtype=dtype, device="meta").to_empty(device="cpu")


class Attention(nn.Module):
    """Block rows look at the context and at each other; only block rows ask."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        super().__init__()
        draft, hidden = config.draft, config.shape.hidden_size
        self.head_dim = draft.head_dim
        self.q_proj = linear(hidden, draft.num_attention_heads * draft.head_dim, dtype)
        self.k_proj = linear(hidden, draft.num_key_value_heads * draft.head_dim, dtype)
        self.v_proj = linear(hidden, draft.num_key_value_heads * draft.head_dim, dtype)
        self.o_proj = linear(draft.num_attention_heads * draft.head_dim, hidden, dtype)
        self.q_norm = nn.RMSNorm(draft.head_dim, eps=config.shape.rms_norm_eps, dtype=dtype)
        self.k_norm = nn.RMSNorm(draft.head_dim, eps=config.shape.rms_norm_eps, dtype=dtype)

    def keys_values(self, rows: Tensor, angles: Rotation) -> KeysValues:
        """Key and value heads of [rows, H]."""
        key = self.k_norm(self._split_heads(self.k_proj(rows)))
        return rotate(key, angles), self._split_heads(self.v_proj(rows))

    def forward(self, rows: Tensor, angles: Rotation, context: KeysValues, mask: Tensor) -> Tensor:
        """[Q, H] -> [Q, H] under a mask [Q, T + Q]."""
        query = rotate(self.q_norm(self._split_heads(self.q_proj(rows))), angles)
        key, value = self.keys_values(rows, angles)
        keys, values = torch.cat([context[0], key], dim=1), torch.cat([context[1], value], dim=1)
        output: Tensor = self.o_proj(attend(query, keys, values, mask))
        return output

    def _split_heads(self, rows: Tensor) -> Tensor:
        num_rows, width = rows.shape
        return rows.view(num_rows, width // self.head_dim, self.head_dim).transpose(0, 1)


class MLP(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = linear(hidden_size, intermediate_size, dtype)
        self.up_proj = linear(hidden_size, intermediate_size, dtype)
        self.down_proj = linear(intermediate_size, hidden_size, dtype)

    def forward(self, rows: Tensor) -> Tensor:
        """[Q, H] -> [Q, H]."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return output


class DraftLayer(nn.Module):
    """One layer: attention, then the feed-forward part, both around the residual stream of the block rows."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = config.shape.hidden_size, config.shape.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps, dtype=dtype)
        self.self_attn = Attention(config, dtype)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps, dtype=dtype)
        self.mlp = MLP(hidden, config.draft.intermediate_size, dtype)

    def forward(self, hidden: Tensor, angles: Rotation, context: KeysValues, mask: Tensor) -> Tensor:
        """[Q, H] -> [Q, H]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), angles, context, mask)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class DraftModel(nn.Module):
    """DFlash (arXiv 2602.06036): target features enter every layer as keys and values, a block leaves in one pass.

    The embedding and the head are the target's and not part of this module. `windows` maps each layer type in use
    to the window of its mask (0 for a full layer).
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        draft, hidden, eps = config.draft, config.shape.hidden_size, config.shape.rms_norm_eps
        dtype: torch.dtype = getattr(torch, draft.dtype)
        self.head_dim, self.rope_theta = draft.head_dim, config.shape.rope_theta
        self.layer_types = list(draft.layer_types)
        self.windows = {kind: draft.sliding_window if kind == "sliding_attention" else 0 for kind in draft.layer_types}
        self.fc = linear(len(draft.tap_layers) * hidden, hidden, dtype)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps, dtype=dtype)
        self.layers = nn.ModuleList(DraftLayer(config, dtype) for _ in range(draft.num_layers))
        self.norm = nn.RMSNorm(hidden, eps=eps, dtype=dtype)
        self.initialise(config.seed)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Projections from normal(0, 0.02), norms one; drawn on the CPU, so the same bits on every device."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator))

    def project_context(self, taps: Tensor) -> Tensor:
        """Target features [T, K, H], of any float type, to the context [T, H] that all layers share."""
        context: Tensor = self.hidden_norm(self.fc(taps.flatten(1).to(self.fc.weight.dtype)))
        return context

    def context_keys_values(self, context: Tensor, positions: Tensor) -> list[KeysValues]:
        """Keys and values [Hkv, T, D] of the context [T, H], one pair per layer: what inference caches.

        Args:
            context: the output of `project_context`.
            positions: int64 [T], the position of each row in its document.
        """
        angles = rotation(positions, self.head_dim, self.rope_theta)
        return [layer.self_attn.keys_values(context, angles) for layer in self._layers()]

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        context_keys_values: Sequence[KeysValues],
        masks: Mapping[str, Tensor],
    ) -> Tensor:
        """Block rows to the hidden states that the target's head turns into logits.

        Args:
            embeddings: [Q, H], the target's embedding of each block token: the anchor token, then masks.
            positions: int64 [Q], anchor position + offset.
            context_keys_values: one pair per layer, see the method of that name.
            masks: layer type -> bool [Q, T + Q], see `attention.visibility_mask`.

        Returns:
            [Q, H], after the final norm.
        """
        angles = rotation(positions, self.head_dim, self.rope_theta)
        hidden = embeddings.to(self.norm.weight.dtype)
        for layer, layer_type, context in zip(self._layers(), self.layer_types, context_keys_values, strict=True):
            hidden = layer(hidden, angles, context, masks[layer_type])
        output: Tensor = self.norm(hidden)
        return output

    def _layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]
