"""A whole target model with its cache: decode on, verify drafts, take the refused ones back.

The one place that knows what differs between versions of transformers and between kinds of cache.
Shapes: n rows of one pass, K taps, H hidden.
"""

import copy
import inspect
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin


class TargetCache:
    """One sequence in a target. A context manager, because it hooks the tapped layers.

    Attributes:
        num_passes: calls of the target's forward so far.
    """

    def __init__(self, model: PreTrainedModel, tap_layers: Sequence[int] = ()) -> None:
        self.num_passes = 0
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self._cache.layers)
        if not self._recurrent:  # sliding layers then keep what a crop must bring back
            self._cache.activate_past_recording()  # type: ignore[no-untyped-call]
        self._verified: list[int] = []
        self._before: Any = None
        self._taps: list[Tensor] = []
        layers = self._model.get_decoder().layers  # type: ignore[no-untyped-call]
        self._hooks = [layers[layer].register_forward_hook(self._tap) for layer in tap_layers]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def append(self, tokens: Sequence[int]) -> tuple[int, Tensor]:
        """Run tokens that stay, in one pass.

        Returns:
            The target's own next token, and the taps [n, K, H] of these rows.
        """
        next_tokens, taps = self._forward(tokens, num_logits=1)
        if not self._recurrent:
            self._cache.crop(0)  # sliding layers drop what left the window
        return next_tokens[0], taps

    def verify(self, tokens: Sequence[int]) -> tuple[list[int], Tensor]:
        """Run tokens of which some may be wrong, in one pass; `keep` must follow.

        Returns:
            The target's own next token after each of the n tokens, and the taps [n, K, H] of these rows.
        """
        self._verified = list(tokens)
        self._before = copy.deepcopy(self._cache) if self._recurrent else None
        return self._forward(tokens, num_logits=len(tokens))

    def keep(self, num_rows: int) -> None:
        """Keep the first `num_rows` of the verified rows.

        `crop` takes a negative number of rows to remove in every version. A recurrent state cannot be
        cropped: it is put back and the kept rows run again, which costs one more pass.
        """
        num_refused = len(self._verified) - num_rows
        if self._before is None:
            self._cache.crop(-num_refused)
        elif num_refused:
            self._cache = self._before
            self._forward(self._verified[:num_rows], num_logits=1)

    def _forward(self, tokens: Sequence[int], num_logits: int) -> tuple[list[int], Tensor]:
        self.num_passes += 1
        self._taps.clear()
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([list(tokens)], device=self._model.device),
            "use_cache": True,
            "logits_to_keep": num_logits,
            self._keyword: self._cache,
        }
        logits: Tensor = self._model(**inputs).logits
        taps = torch.stack(self._taps, dim=1) if self._taps else logits.new_empty(len(tokens), 0, 0)
        return logits[0].argmax(dim=-1).tolist(), taps

    def _tap(self, layer: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        self._taps.append(hidden[0])
