"""Rows of tokens in a whole target with its cache: decode on, verify drafts, take the refused ones back.

The one place that knows what differs between versions of transformers and between kinds of cache. All rows end in the
same column; shorter ones are padded on the left, hidden by a mask, and their positions are counted without the padding.
Where rows keep different numbers of tokens, those that keep fewer move right until all end together again.
Shapes: R rows, n tokens of a row in one pass, C columns of the cache, K taps, H hidden, V vocabulary, Hkv key and value
heads, D head_dim.
"""

import copy
import inspect
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from common.errors import ModelError

_SHIFTABLE = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer)
Tokens = Sequence[Sequence[int]]


class TargetCache:
    """Rows in a target. A context manager, because it hooks the tapped layers.

    Attributes:
        num_passes: calls of the target's forward that each row took part in so far.
    """

    def __init__(self, model: PreTrainedModel, tap_layers: Sequence[int] = ()) -> None:
        self.num_passes: list[int] = []
        self._model = model
        self._cache: Any = DynamicCache(config=model.config)
        self._keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self._cache.layers)
        for layer in self._cache.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.activate_past_recording()  # type: ignore[no-untyped-call]  # keeps what a crop must bring back
        self._padding: list[int] = []  # columns on the left of each row
        self._num_columns = 0
        self._pending: Tokens = []  # run by `extend`, not yet kept
        self._before: Any = None  # recurrent targets: without the pending tokens
        self._taps: list[Tensor] = []
        layers = self._model.get_decoder().layers  # type: ignore[no-untyped-call]
        self._hooks = [layers[layer].register_forward_hook(self._tap) for layer in tap_layers]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def prefill(self, prompts: Tokens) -> tuple[Tensor, list[Tensor]]:
        """Run the prompts in one pass, one row each.

        Returns:
            The logits [R, V] of what follows each prompt, and the taps [n, K, H] of each row.

        Raises:
            ModelError: the target has layers whose caches can hold one row only, or none at all.
        """
        self._check_layers(len(prompts))
        longest = max(map(len, prompts))
        self._padding = [longest - len(prompt) for prompt in prompts]
        self.num_passes = [1] * len(prompts)
        rows = [[0] * padding + list(prompt) for padding, prompt in zip(self._padding, prompts, strict=True)]
        logits, taps = self._forward(self._cache, rows, self._padding, num_logits=1)
        self._num_columns = longest
        for layer in self._attention_layers():
            layer.crop(0)  # sliding layers drop what left the window
        return logits[:, 0], [row[padding:] for row, padding in zip(taps, self._padding, strict=True)]

    def extend(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Run the same number of tokens after every row, in one pass; `keep` must follow.

        Returns:
            The logits [R, n, V] of what follows each token, and the taps [R, n, K, H].
        """
        self._pending = tokens
        self._before = copy.deepcopy(self._cache) if self._recurrent and len(tokens[0]) > 1 else None
        outcome = self._forward(self._cache, tokens, self._padding, num_logits=len(tokens[0]))
        self.num_passes = [passes + 1 for passes in self.num_passes]
        return outcome

    def keep(self, counts: Sequence[int]) -> None:
        """Keep the first tokens of every row, at least one, of those that `extend` ran; of a prefill all stay.

        `crop` takes a negative number of columns to remove in every version. A recurrent state cannot be cropped:
        the kept tokens run again from a copy made before, rows that keep equally many in one pass.
        """
        if not self._pending:
            return
        num_pending = len(self._pending[0])
        fewest = num_pending - max(counts)
        shifts = [num_pending - count - fewest for count in counts]
        if self._before is not None:
            self._replay(self._before, counts)
        if any(shifts):
            self._shift(shifts)
        for layer in self._attention_layers():
            layer.crop(-fewest)
        self._padding = [padding + shift for padding, shift in zip(self._padding, shifts, strict=True)]
        self._num_columns += num_pending - fewest
        self._pending, self._before = [], None
        self._cut_common_padding()

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only; also between `extend` and `keep`."""
        if len(rows) == len(self._padding):
            return
        index = torch.tensor(rows, device=self._model.device)
        for cache in filter(None, (self._cache, self._before)):
            cache.reorder_cache(index)
        self._padding = [self._padding[row] for row in rows]
        self._pending = [self._pending[row] for row in rows] if self._pending else []
        self.num_passes = [self.num_passes[row] for row in rows]

    def _check_layers(self, num_rows: int) -> None:
        strange = {type(layer).__name__ for layer in self._cache.layers if type(layer) not in _SHIFTABLE}
        if strange and (self._recurrent or num_rows > 1):
            needed = "full, sliding or linear attention" + ("" if self._recurrent else ", or one prompt at a time")
            raise ModelError(f"decoding with drafts: needed a target with {needed}, found {', '.join(sorted(strange))}")

    def _attention_layers(self) -> list[Any]:
        """Those that hold keys and values of their own."""
        layers: list[Any] = [it for it in self._cache.layers if not isinstance(it, LinearAttentionCacheLayerMixin)]
        return [layer for layer in layers if layer.is_initialized]

    def _shift(self, shifts: Sequence[int]) -> None:
        """Move each row right by its shift; what comes in on the left is padding."""
        device = self._model.device
        columns = torch.arange(self._num_columns + len(self._pending[0]), device=device)[None, :]
        origin = (columns - torch.tensor(shifts, device=device)[:, None]).clamp(min=0)[:, None, :, None]
        for layer in self._attention_layers():
            index = origin[:, :, : layer.keys.shape[2]]  # a sliding layer has fewer columns
            layer.keys, layer.values = (it.gather(2, index.expand_as(it)) for it in (layer.keys, layer.values))

    def _replay(self, before: Any, counts: Sequence[int]) -> None:
        """Give the recurrent layers the state behind the kept tokens of every row."""
        for count in sorted(set(counts) - {len(self._pending[0])}):
            rows = [row for row, kept in enumerate(counts) if kept == count]
            cache = copy.deepcopy(before)
            cache.reorder_cache(torch.tensor(rows, device=self._model.device))
            tokens = [self._pending[row][:count] for row in rows]
            self._forward(cache, tokens, [self._padding[row] for row in rows], num_logits=1)
            for layer, again in zip(self._cache.layers, cache.layers, strict=True):
                if isinstance(layer, LinearAttentionLayer):
                    _put_states(layer.conv_states, again.conv_states, rows)
                    _put_states(layer.recurrent_states, again.recurrent_states, rows)
            for row in rows:
                self.num_passes[row] += 1

    def _cut_common_padding(self) -> None:
        """Drop the columns that are padding in every row."""
        spare = min(self._padding)
        if not spare:
            return
        self._padding = [padding - spare for padding in self._padding]
        self._num_columns -= spare
        for layer in self._attention_layers():
            layer.keys, layer.values = (heads[:, :, -self._num_columns :] for heads in (layer.keys, layer.values))
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = self._num_columns

    def _forward(self, cache: Any, tokens: Tokens, padding: list[int], num_logits: int) -> tuple[Tensor, Tensor]:
        """Logits [R, num_logits, V] and taps [R, n, K, H]; without padding the target needs no mask."""
        self._taps.clear()
        device, num_tokens = self._model.device, len(tokens[0])
        ids = torch.tensor([list(row) for row in tokens], device=device)
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": True, "logits_to_keep": num_logits, self._keyword: cache}
        if any(padding):
            columns = torch.arange(self._num_columns + num_tokens, device=device)[None, :]
            places = columns - torch.tensor(padding, device=device)[:, None]
            inputs |= {"attention_mask": (places >= 0).long(), "position_ids": places[:, -num_tokens:].clamp(min=0)}
        logits: Tensor = self._model(**inputs).logits
        taps = torch.stack(self._taps, dim=2) if self._taps else logits.new_empty(len(tokens), num_tokens, 0, 0)
        return logits, taps

    def _tap(self, layer: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        self._taps.append(output if isinstance(output, Tensor) else output[0])


def _put_states(states: dict[int, Tensor | None], others: dict[int, Tensor | None], rows: list[int]) -> None:
    """Replace the rows of every state that the layer has."""
    for name, state in states.items():
        other = others[name]
        if state is not None and other is not None:
            state[rows] = other
