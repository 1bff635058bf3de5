"""The draft model of DFlash and DFlash 2; parameter names are those of the exported file.

Shapes: T context rows, N blocks, B block size, Q = N * B block rows, M wanted rows among them, K taps, H hidden,
Hkv key and value heads, D head_dim.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.config import Config
from common.weights import random_tensor
from services.drafter.model.attention import Attend, KeysValues
from services.drafter.model.convolution import DynamicConvolution
from services.drafter.model.layers import BlockRows, ConvolvedLayer, DraftLayer, linear, rms_norm, rotation
from services.drafter.model.selector import CandidateSelector
from services.drafter.model.visibility import LayerMask

_CPU = torch.device("cpu")
_INITIAL_DEVIATION = 0.02


class DraftModel(nn.Module):
    """DFlash (arXiv 2602.06036): target features enter every layer as keys and values, a block leaves in one pass.

    DFlash 2 adds convolutions to the layers and a selector among the likeliest tokens of each slot. Fresh, they change
    nothing: the convolutions are the identity, and the selector scores all candidates alike.

    The embedding and the head are the target's and not part of this module. On the device "meta" it has shapes only.
    """

    def __init__(self, config: Config, device: torch.device = _CPU) -> None:
        super().__init__()
        draft, hidden, self.eps = config.draft, config.shape.hidden_size, config.shape.rms_norm_eps
        self.head_dim, self.rope_theta = draft.head_dim, config.shape.rope_theta
        self.embedding_scale, self.logit_scale = config.shape.embedding_scale, config.shape.logit_scale
        self.logit_softcap = config.shape.logit_softcap
        self.is_convolved = draft.kind == "dflash2"
        self.masks = [LayerMask.of(draft, kind) for kind in draft.layer_types]
        with torch.device("meta"):
            self.fc = linear(len(draft.tap_layers) * hidden, hidden)
            self.hidden_norm = nn.RMSNorm(hidden, eps=self.eps)
            layer = ConvolvedLayer if self.is_convolved else DraftLayer
            self.layers = nn.ModuleList(layer(config) for _ in range(draft.num_layers))
            self.norm = nn.RMSNorm(hidden, eps=self.eps)
            self.candidate_selector = CandidateSelector(config) if self.is_convolved else None
        self.to(getattr(torch, draft.dtype)).to_empty(device=device)
        if device.type != "meta":
            self.initialise(config.seed)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill projections uniformly (deviation 0.02) and norms with one; equal bits on every device (`random_tensor`).

        Convolutions become the identity and the selector's successors 0, so DFlash 2 begins with the output of DFlash.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                kind = parameter.device, parameter.dtype
                parameter.copy_(random_tensor(f"draft.{name}", parameter.shape, _INITIAL_DEVIATION, seed, *kind))
        for module in self.modules():
            if isinstance(module, DynamicConvolution | CandidateSelector):
                module.initialise()

    def embed(self, tokens: Tensor, embed_weight: Tensor) -> Tensor:
        """Return the target's embedding [V, H] of tokens int64 [...], as its first layer gets it: [..., H]."""
        rows = F.embedding(tokens, embed_weight)
        return rows if self.embedding_scale == 1.0 else rows * self.embedding_scale

    def for_head(self, hidden: Tensor) -> Tensor:
        """Return hidden states [R, H] times the scale that the target gives its logits: their products with the head's rows."""
        return hidden if self.logit_scale == 1.0 else hidden * self.logit_scale

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
            wanted: int64 [M], block rows; None for all, as DFlash 2 needs it.
        """
        angles = rotation(positions, self.head_dim, self.rope_theta)
        rows, layers = embeddings.to(self.norm.weight.dtype), self._layers()
        blocks = BlockRows(positions.shape[0] // (embeddings.shape[0] - 1), num_leading=1)
        for layer, context, attend in zip(layers, context_keys_values, attends, strict=True):
            rows = layer(rows, angles, context, attend, blocks, wanted if layer is layers[-1] else None)
            blocks = BlockRows(blocks.block_size)
        return rms_norm(rows, self.norm.weight, self.eps)

    def _layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]
