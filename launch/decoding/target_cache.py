"""The cache of a whole target for one text: extend the text, verify drafts, take refused tokens back.

No other module knows the versions of transformers and the kinds of cache layers.
Shapes: n tokens of a pass, K taps, H hidden, V vocabulary.
"""

import copy
import inspect
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from common.errors import ModelError
from services.target.architecture import find_layers, one_stream

# Classes of cache layers for which tests prove in float64 that refused tokens leave nothing behind.
_KNOWN_LAYERS = {
    "DummyLayer",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
}


class TargetCache:
    """A target that has seen a text. A context manager, because it hooks the tapped layers.

    Attributes:
        num_passes: calls of the target's forward so far.
    """

    def __init__(self, model: PreTrainedModel, tap_layers: Sequence[int] = ()) -> None:
        """Begin an empty text; ModelError where the target has cache layers that cannot take tokens back."""
        self.num_passes = 0
        self._model = model
        self._cache: Any = DynamicCache(config=model.config)
        _refuse_unknown_layers(model, self._cache.layers)
        parameters = inspect.signature(model.forward).parameters
        self._keyword = "cache" if "cache" in parameters else "past_key_values"
        self._recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self._cache.layers)
        for layer in self._cache.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.activate_past_recording()  # type: ignore[no-untyped-call]  # keeps the columns that a crop must bring back
        self._length = 0  # tokens in the cache, pending ones included
        self._pending: Sequence[int] = []  # run by `extend`, not yet kept
        self._before: Any = None  # recurrent targets: the cache without the pending tokens
        self._taps: list[Tensor] = []
        layers = find_layers(self._model.get_decoder()).layers  # type: ignore[no-untyped-call]
        self._hooks = [layers[layer].register_forward_hook(self._tap) for layer in tap_layers]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def prefill(self, prompt: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run the prompt in one pass; return the logits [V] of the next token, and the taps [n, K, H]."""
        logits, taps = self._forward(prompt, num_logits=1)
        self._crop(0)  # sliding layers drop the columns that left the window
        return logits[0], taps

    def extend(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run tokens after the text in one pass; `keep` must follow.

        Returns:
            The logits [n, V] of the token after each one, and the taps [n, K, H].
        """
        self._pending = tokens
        self._before = copy.deepcopy(self._cache) if self._recurrent and len(tokens) > 1 else None
        return self._forward(tokens, num_logits=len(tokens))

    def keep(self, count: int) -> None:
        """Keep the first tokens, at least one, of those that `extend` ran; all tokens of a prefill stay.

        A recurrent state cannot be cropped: the kept tokens run again from the copy of the cache that `extend` made.
        """
        tokens, before = self._pending, self._before
        self._pending, self._before = [], None
        if before is not None and count < len(tokens):
            self._cache = before
            self._length -= len(tokens)
            self._forward(tokens[:count], num_logits=1)
            self._crop(0)
        elif tokens:
            self._crop(len(tokens) - count)

    def _crop(self, count: int) -> None:
        """Remove so many columns from the end of every layer that holds keys and values only."""
        self._length -= count
        for layer in self._cache.layers:
            if not isinstance(layer, LinearAttentionCacheLayerMixin) and layer.is_initialized:
                layer.crop(-count)  # every version takes a negative number of columns to remove

    def _forward(self, tokens: Sequence[int], num_logits: int) -> tuple[Tensor, Tensor]:
        """Return logits [num_logits, V] and taps [n, K, H].

        Positions are given, because Bamba in transformers begins at 0 in every pass that is not given any.
        """
        self.num_passes += 1
        self._taps.clear()
        ids = torch.tensor([list(tokens)], device=self._model.device)
        positions = torch.arange(self._length, self._length + len(tokens), device=self._model.device)[None]
        inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions, self._keyword: self._cache}
        logits: Tensor = self._model(**inputs, use_cache=True, logits_to_keep=num_logits).logits[0]
        self._length += len(tokens)
        taps = torch.stack(self._taps, dim=1) if self._taps else logits.new_empty(len(tokens), 0, 0)
        return logits, taps

    def _tap(self, layer: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        self._taps.append(one_stream(output if isinstance(output, Tensor) else output[0])[0])


def _refuse_unknown_layers(model: PreTrainedModel, layers: Sequence[object]) -> None:
    if unknown := {type(layer).__name__ for layer in layers} - _KNOWN_LAYERS:
        raise ModelError(
            f"{model.config.model_type}: needed a cache whose layers are known to take refused tokens back, "
            f"found {', '.join(sorted(unknown))}"
        )
