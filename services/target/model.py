"""The frozen target: a decoder cut off after its last tapped layer, which hands on its taps while it runs.

B rows, S padded length, H hidden size, K taps, V vocabulary.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common.actor import faults
from common.config import Config
from common.device.stopwatch import Stopwatch
from common.errors import ModelError
from services.target.architecture import find_layers, layer_kinds, needs_no_mask, one_stream
from services.target.experts import group_experts
from services.target.loading import load_decoder
from services.target.sinks import use_sinks
from services.target.stages import Enter, Handover, make_stages

Keep = Callable[[int, torch.Tensor], None]  # index of the tap, tap [B, S, H]

_NUM_CHECKED = 64  # rows of the embedding
_NUM_COMPILED = 16  # versions of a layer's code; torch gives up at 8
_ATTENTION = "causal_sdpa"

log = logging.getLogger(__name__)


class _StopForwardError(Exception):
    pass


def _stop_forward(*_: object) -> None:
    raise _StopForwardError


class Capture:
    """Passes on the outputs of the tapped layers, and ends the forward after the last: nothing reads past it."""

    def __init__(self, layers: nn.ModuleList, tap_layers: Sequence[int]) -> None:
        self._keep: Keep | None = None
        self._last = len(tap_layers) - 1
        for tap_index, layer in enumerate(tap_layers):
            layers[layer].register_forward_hook(self._make_hook(tap_index))

    def start(self, keep: Keep) -> None:
        """Let the next forward hand its taps to `keep`, each as soon as it exists, in the order of `tap_layers`."""
        self._keep = keep

    def _make_hook(self, tap_index: int) -> Callable[[nn.Module, object, object], None]:
        def hand_on(module: nn.Module, arguments: object, output: object) -> None:
            hidden_states = output[0] if isinstance(output, tuple) else output
            assert isinstance(hidden_states, torch.Tensor) and self._keep is not None
            self._keep(tap_index, one_stream(hidden_states))
            faults.reach("target.mid_forward")
            if tap_index == self._last:
                raise _StopForwardError

        return hand_on


def _ignore(stage_index: int) -> None:
    pass


class TargetModel:
    """Hidden states of the tapped layers. Rows are right-padded; causal layers need no mask for that."""

    def __init__(
        self, decoder: PreTrainedModel, tap_layers: list[int], devices: Sequence[torch.device], first_layers: Sequence[int]
    ) -> None:
        decoder.train(False).requires_grad_(False)
        _leave_out_masks(decoder)
        if decoder.device.type == "cuda":  # transformers' own code is right, and slow on a GPU
            use_sinks(decoder)
            group_experts(decoder)
        self.decoder = decoder
        self._layers = find_layers(decoder).layers
        self._tap_layers = tap_layers
        self._capture = Capture(self._layers, tap_layers)
        self._enter: Enter = _ignore
        self._handovers: list[Handover] = []
        self.assign(devices, first_layers)

    @classmethod
    def load(cls, config: Config, *devices: torch.device) -> "TargetModel":
        """Load the embedding and the layers up to the last tap of `config.model.path`, or make them from the seed.

        Raises:
            ModelError: the folder or its weights are missing or damaged, or the architecture or quantization is not supported.
            ConfigError: the weights do not fit into the memory of several devices.
        """
        decoder, first_layers = load_decoder(config, devices)
        model = cls(decoder, config.draft.tap_layers, devices, first_layers)
        model._check_embedding(config.shape.embedding_scale, devices[0])
        return model

    def assign(self, devices: Sequence[torch.device], first_layers: Sequence[int]) -> None:
        """Make one stage per device, and move layers that lie elsewhere; all that is no layer stays on the first device."""
        for handover in self._handovers:
            handover.remove()
        self.stages = make_stages(devices, first_layers, self._tap_layers)
        self._handovers = []
        for index, stage in enumerate(self.stages):
            layers = self._layers[stage.layers.start : stage.layers.stop]
            layers.to(stage.device)
            if index:
                self._handovers.append(Handover(list(layers), stage, len(devices) + 1, partial(self._report_entry, index)))

    @torch.inference_mode()
    def _check_embedding(self, scale: float, device: torch.device) -> None:
        """Raise ModelError unless the first layer reads rows of the embedding, times `scale`, as a draft model does.

        Some families round the scale to the type of the rows first.
        """
        embedding: Any = self.decoder.get_input_embeddings()
        input_ids = torch.arange(min(_NUM_CHECKED, self.vocab_size), device=device)
        found, rows = one_stream(_first_input(self.decoder, self._layers[0], input_ids[None]))[0], embedding.weight[input_ids]
        if not any(torch.equal(found, rows * factor) for factor in (scale, torch.tensor(scale, dtype=rows.dtype).item())):
            kind = self.decoder.config.model_type
            raise ModelError(f"model.path: needed a target whose first layer reads its embedding times {scale:g}, found {kind}")

    def _report_entry(self, stage_index: int) -> None:
        self._enter(stage_index)

    @property
    def vocab_size(self) -> int:
        return int(self.decoder.config.vocab_size)

    @torch.inference_mode()
    def run(self, input_ids: torch.Tensor, keep: Keep, enter: Enter = _ignore) -> None:
        """Launch the forward of int64 [B, S]; `keep` gets every tap [B, S, H] in the model's dtype as soon as it exists.

        Layers are causal: padding after a row's real tokens changes nothing before it, so it may hold any id. The launching
        thread never waits for the device. `enter` is called on the device and stream of each stage but the first, before its
        layers.
        """
        self._capture.start(keep)
        self._enter = enter
        try:
            self.decoder(input_ids=input_ids, use_cache=False)
        except _StopForwardError:
            pass
        finally:
            for handover in self._handovers:
                handover.end()
            if self._handovers:
                self.stages[0].use()

    def forward(self, input_ids: torch.Tensor) -> list[torch.Tensor]:
        """Run int64 [B, S]; returns K tensors [B, S, H] in the model's dtype, one per tap in ascending order."""
        taps: list[torch.Tensor] = []
        self.run(input_ids, lambda tap_index, tap: taps.append(tap))
        return taps

    def time_layers(self, input_ids: torch.Tensor) -> list[float]:
        """Run int64 [B, S] and wait for it; return the device's seconds of each layer, with the embedding in the first."""
        watches = [Stopwatch(input_ids.device)]

        def begin(layer: nn.Module, arguments: object) -> None:
            if len(watches) == 1:
                watches[0].lap("s")
            watches.append(Stopwatch(input_ids.device))

        def end(layer: nn.Module, arguments: object, output: object) -> None:
            watches[-1].lap("s")

        with ExitStack() as hooks:
            for layer in self._layers:
                hooks.enter_context(layer.register_forward_pre_hook(begin))
                hooks.enter_context(layer.register_forward_hook(end, prepend=True))  # before the one that ends the forward
            self.run(input_ids, lambda tap_index, tap: None)
        self.synchronize()
        embedding_s, first_s, *others_s = (watch.laps_s()["s"] for watch in watches)
        return [embedding_s + first_s, *others_s]

    def synchronize(self) -> None:
        """Wait until every device has done all that was launched."""
        for stage in self.stages:
            if stage.device.type == "cuda":
                torch.cuda.synchronize(stage.device)

    def tune(self, input_ids: torch.Tensor) -> None:
        """Launch the first layers only, up to one of every kind, so that kernels tune themselves for this shape.

        Of several stages all layers are launched: each device loads its kernels itself.
        """
        kinds = layer_kinds(self.decoder.config)[: len(self._layers)]
        depth = max(kinds.index(kind) for kind in set(kinds)) + 1 if len(self.stages) == 1 else len(kinds)
        with self._layers[depth - 1].register_forward_hook(_stop_forward):
            self.run(input_ids, lambda tap_index, tap: None)

    def compile_layers(self) -> None:
        """Compile the forward of each layer when it first runs, for all shapes at once; its hooks stay outside.

        Layers of one kind share their compiled code. Each kind is compiled for several rows and again for a single one, and
        once more if the first shape was a special case, such as as many rows as the rotary angles have channels.
        """
        torch._dynamo.config.recompile_limit = _NUM_COMPILED * len(self.stages)
        for layer in self._layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)


def _leave_out_masks(decoder: PreTrainedModel) -> None:
    """Keep transformers from making masks, which right-padded rows do not need.

    Under the name `sdpa` transformers looks for packed rows in the position ids and waits for the device, in every forward.
    An attention function without a mask function of its name gets no mask, and SDPA without a mask is causal. A decoder with
    sliding or chunked attention needs its masks, and so keeps that wait.
    """
    config: PretrainedConfig = decoder.config
    if config._attn_implementation == "sdpa" and needs_no_mask(config):
        AttentionInterface.register(_ATTENTION, sdpa_attention_forward)
        decoder.set_attn_implementation(_ATTENTION)
    else:
        log.info("%s attends within windows: its masks are made anew in every forward", config.model_type)


def _first_input(decoder: PreTrainedModel, layer: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """Run the decoder on int64 [B, S] up to `layer`, and return the hidden states that it is given."""
    found: list[torch.Tensor] = []

    def stop(module: nn.Module, arguments: tuple[torch.Tensor, ...], settings: dict[str, torch.Tensor]) -> None:
        found.append(arguments[0] if arguments else settings["hidden_states"])
        raise _StopForwardError

    hook = layer.register_forward_pre_hook(stop, with_kwargs=True)
    with suppress(_StopForwardError):
        decoder(input_ids=input_ids, use_cache=False)
    hook.remove()
    return one_stream(found[0])
