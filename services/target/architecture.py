"""Find the layers of any decoder of transformers and their kinds, and build it without the last ones."""

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import MODEL_MAPPING, PretrainedConfig, PreTrainedModel

from common.errors import ModelError

_OLDER_KINDS = ("layers_block_type", "block_types")  # of configurations from before layer_types
_MASKLESS = {"full_attention", "linear_attention", "attention", "mamba", "hybrid", "conv", "mlp", "moe"}


class LayerList(NamedTuple):
    """The list of a decoder's layers, and the module that holds it under a name."""

    owner: nn.Module
    name: str

    @property
    def layers(self) -> nn.ModuleList:
        layers: nn.ModuleList = getattr(self.owner, self.name)
        return layers

    def replace(self, layers: nn.ModuleList) -> None:
        """Let the decoder run these layers only."""
        setattr(self.owner, self.name, layers)


def find_layers(decoder: nn.Module) -> LayerList:
    """Return the outermost list of modules that is as long as the configuration says or, of a cut decoder, shorter.

    Raises:
        ModelError: there is none.
    """
    config: Any = decoder.config
    longest = config.get_text_config(decoder=True).num_hidden_layers
    lists = [(path, module) for path, module in decoder.named_modules() if isinstance(module, nn.ModuleList)]
    lists = [(path, module) for path, module in lists if 1 <= len(module) <= longest and _are_layers(module)]
    if not lists:
        raise ModelError(f"model.path: needed a decoder with one list of layers, found {type(decoder).__name__}")
    path, _ = min(lists, key=lambda found: found[0].count("."))
    owner, _, name = path.rpartition(".")
    return LayerList(decoder.get_submodule(owner), name)


def _are_layers(modules: nn.ModuleList) -> bool:
    return all(type(module).__name__.endswith(("Layer", "Block")) for module in modules)


def make_cut_class(config: PretrainedConfig, num_layers: int) -> type[PreTrainedModel]:
    """Return the class of the decoder of `config` which keeps the first `num_layers` layers only.

    The configuration stays whole: it also decides which layers share keys, are dense or slide, and how wide tables with a
    part for each layer are. Weights of the other layers are never made where the class is built on the meta device.
    """
    whole: Any = MODEL_MAPPING[type(config)]

    def build(self: Any, config: PretrainedConfig, *arguments: Any, **settings: Any) -> None:
        whole.__init__(self, config, *arguments, **settings)
        found = find_layers(self)
        found.replace(found.layers[:num_layers])

    return type(whole.__name__, (whole,), {"__init__": build, "__module__": whole.__module__})


def attention_of(decoder: type[PreTrainedModel]) -> str:
    """Return the attention of transformers that is right for a class; scores with a cap or a sink are not for SDPA."""
    return "sdpa" if decoder._supports_sdpa else "eager"


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """Return the kind of each layer in transformers' names; older configurations have one kind for all."""
    for key in ("layer_types", *_OLDER_KINDS):
        if kinds := getattr(config, key, None):
            return list(kinds)
    one = "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
    return [one] * int(config.num_hidden_layers)


def needs_no_mask(config: PretrainedConfig) -> bool:
    """Return whether every layer attends to all earlier tokens, or not at all; some read sliding_window beside their kinds."""
    return set(layer_kinds(config)) <= _MASKLESS and getattr(config, "sliding_window", None) is None


def one_stream(hidden_states: torch.Tensor) -> torch.Tensor:
    """Return [B, S, H] of a layer's output, which hyper-connections make [B, S, M, H]: the mean, as engines hand it on."""
    return hidden_states.mean(dim=2) if hidden_states.dim() == 4 else hidden_states
