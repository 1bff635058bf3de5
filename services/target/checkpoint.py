"""A model of transformers from its folder, whose quantized weights are dequantized one after the other while they are read."""

from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.auto_factory import _get_model_class

from common.dequantize import open_dequantized
from common.quantization import read_rule


def load_pretrained(
    model_class: Any,
    folder: Path,
    config: PretrainedConfig,
    device_map: dict[str, torch.device],
    dtype: torch.dtype | None,
    **settings: Any,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a class of transformers, or the one that an Auto class chooses for `config`; return it with the loader's report.

    Without a dtype it is that of the folder. The loader of transformers gets no quantization and a state dict of slices, which
    give the dequantized weight when they are read.

    Raises:
        ModelError, SafetensorError: as `open_dequantized`; further errors as from_pretrained of transformers.
    """
    settings |= {"device_map": device_map, "output_loading_info": True}
    loaded: tuple[PreTrainedModel, dict[str, Any]]
    if read_rule(folder) is None:
        loaded = model_class.from_pretrained(folder, config=config, dtype=dtype or "auto", local_files_only=True, **settings)
        return loaded
    if mapping := getattr(model_class, "_model_mapping", None):
        model_class = _get_model_class(config, mapping)  # type: ignore[no-untyped-call]
    if model_class.config_class is not type(config):  # the decoder in a multimodal wrapper
        config = config.get_text_config()
    for key in ("quantization_config", "compression_config"):
        config.__dict__.pop(key, None)  # or transformers would quantize the model again
    wanted: Any = dtype or config.dtype or torch.bfloat16
    weights = open_dequantized(folder, next(iter(device_map.values())), wanted)
    loaded = model_class.from_pretrained(None, config=config, state_dict=weights, dtype=wanted, **settings)
    return loaded
