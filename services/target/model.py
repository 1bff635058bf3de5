"""The frozen target: a decoder cut off after its last tapped layer.

B rows, S padded length, H hidden size, K taps, V vocabulary.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from common.config import Config
from common.errors import ModelError
from services.target.attention import layer_kinds, leave_out_masks
from services.target.capture import Capture, Keep
from services.target.loading import load_decoder

_NUM_CHECKED = 64  # rows of the embedding
_NUM_COMPILED = 16  # versions of a layer's code; torch gives up at 8


class TargetModel:
    """Hidden states of the tapped layers. Rows are right-padded; causal layers need no mask for that."""

    def __init__(self, decoder: PreTrainedModel, tap_layers: list[int]) -> None:
        layers = getattr(decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ModelError(f"model.path: needed a decoder with a list `layers`, found {type(decoder).__name__}")
        decoder.train(False).requires_grad_(False)
        decoder.norm = nn.Identity()  # not needed: nothing reads past the last tapped layer
        leave_out_masks(decoder)
        self.decoder = decoder
        self._layers = layers
        self._capture = Capture(layers, tap_layers)

    @classmethod
    def load(cls, config: Config, device: torch.device) -> "TargetModel":
        """Load `config.model.path`, or make it from the seed, on `device`.

        Only the embedding and the layers up to the last tap are there: later layers and the head are not read.

        Raises:
            ModelError: the folder or its weights are missing, damaged or quantized, or the architecture is not supported.
        """
        model = cls(load_decoder(config, device), config.draft.tap_layers)
        model._check_embedding(device)
        return model

    @torch.inference_mode()
    def _check_embedding(self, device: torch.device) -> None:
        """Raise ModelError unless the first layer reads rows of the embedding as they are, as a draft model does."""
        embedding: Any = self.decoder.get_input_embeddings()
        input_ids = torch.arange(min(_NUM_CHECKED, self.vocab_size), device=device)
        found = _first_input(self.decoder, self._layers[0], input_ids[None])
        if not torch.equal(found, embedding.weight[None, input_ids]):
            kind = self.decoder.config.model_type
            raise ModelError(
                f"model.path: needed a target that does not change its embedding before the first layer, found {kind}"
            )

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.decoder.config.vocab_size)

    @torch.inference_mode()
    def run(self, input_ids: torch.Tensor, keep: Keep) -> None:
        """Launch the forward of int64 [B, S]; `keep` gets every tap [B, S, H] in the model's dtype as soon as it exists.

        Layers are causal: padding after a row's real tokens changes nothing before it, so it may hold any id. The launching
        thread never waits for the device.
        """
        self._capture.start(keep)
        self.decoder(input_ids=input_ids, use_cache=False)

    def forward(self, input_ids: torch.Tensor) -> list[torch.Tensor]:
        """Run int64 [B, S]; returns K tensors [B, S, H] in the model's dtype, one per tap in ascending order."""
        taps: list[torch.Tensor] = []
        self.run(input_ids, lambda tap_index, tap: taps.append(tap))
        return taps

    @torch.inference_mode()
    def touch(self, input_ids: torch.Tensor) -> None:
        """Launch the first layers only, up to one of every kind, so that kernels tune themselves for this shape."""
        kinds = layer_kinds(self.decoder.config)
        depth = max(kinds.index(kind) for kind in set(kinds)) + 1
        self._capture.start(lambda tap_index, tap: None)
        self.decoder.layers = self._layers[:depth]
        try:
            self.decoder(input_ids=input_ids, use_cache=False)
        finally:
            self.decoder.layers = self._layers

    def compile_layers(self) -> None:
        """Compile the forward of each layer when it first runs, for all shapes at once; its hooks stay outside.

        Layers of one kind share what was compiled. Each kind is compiled for several rows and again for a single one, and
        once more where the first shape was a special case, such as as many rows as the rotary angles have channels.
        """
        torch._dynamo.config.recompile_limit = _NUM_COMPILED
        for layer in self._layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)


class _StopForwardError(Exception):
    """Ends a forward whose rest is not needed."""


def _first_input(decoder: PreTrainedModel, layer: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """Run the decoder on int64 [B, S] up to `layer`, and return the hidden states that it is given."""
    found: list[torch.Tensor] = []

    def stop(module: nn.Module, arguments: tuple[torch.Tensor, ...], settings: dict[str, torch.Tensor]) -> None:
        found.append(arguments[0] if arguments else settings["hidden_states"])
        raise _StopForwardError

    hook = layer.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        decoder(input_ids=input_ids, use_cache=False)
    except _StopForwardError:
        return found[0]
    finally:
        hook.remove()
    raise AssertionError(f"{type(decoder).__name__} does not run its first layer")
