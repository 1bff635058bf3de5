"""The kernels of a hybrid target's linear-attention layers (GatedDeltaNet: Qwen3-Next, Qwen3.5, Qwen3.6).

transformers takes the delta rule from flash-linear-attention where that is installed, also for tensors on a CPU, where
it cannot run. The short convolution before it comes from the package causal-conv1d alone, else from torch: a grouped
convolution and an activation, both through memory. flash-linear-attention holds the same convolution as one Triton
kernel. So both functions are replaced, in the module of transformers that calls them by name, by a choice of device.

B rows, S padded length, C channels, W width of the convolution.
"""

import functools
import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from transformers import PreTrainedModel

from common.errors import ModelError

log = logging.getLogger(__name__)

_CONVOLUTION, _DELTA_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"  # their names in transformers


def choose_kernels(decoder: PreTrainedModel, device: torch.device) -> None:
    """Let the linear-attention layers of `decoder`, where it has any, run on the fastest code there is for `device`.

    Raises:
        ModelError: on a GPU without flash-linear-attention, where transformers would run its reference code.
    """
    modules = _modules_of_layers(decoder)
    if not modules:
        return
    if device.type == "cuda":
        _need_kernels(decoder.config.model_type)
    given = device.type != "cuda" or importlib.util.find_spec("causal_conv1d") is not None
    for module in modules:
        _choose_by_device(module, _DELTA_RULE, getattr(module, _DELTA_RULE))
        _choose_by_device(module, _CONVOLUTION, getattr(module, _CONVOLUTION) if given else causal_convolution)
    source = "torch" if device.type != "cuda" else "flash-linear-attention"
    convolution = "causal-conv1d" if device.type == "cuda" and given else source
    log.info("linear attention: delta rule of %s, convolution of %s", source, convolution)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it launches a kernel that tunes itself
def causal_convolution(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> torch.Tensor:
    """[B, C, S] and [C, W] -> [B, C, S], as transformers' function of that name; the bytes lie as [B, S, C] in both."""
    from fla.modules.causal_conv1d import causal_conv1d  # type: ignore[import-not-found]  # GPU machines only

    convolved: torch.Tensor
    convolved, _ = causal_conv1d(hidden_states.transpose(1, 2), weight, bias, activation=activation)
    return convolved.transpose(1, 2)


def _modules_of_layers(decoder: PreTrainedModel) -> list[ModuleType]:
    """Where transformers defines the linear-attention layers of `decoder`."""
    names = {type(layer).__module__ for layer in decoder.modules() if type(layer).__name__.endswith("GatedDeltaNet")}
    return [sys.modules[name] for name in sorted(names)]


def _need_kernels(model_type: str) -> None:
    try:
        importlib.import_module("fla.ops.gated_delta_rule")
    except ImportError as error:
        raise ModelError(
            f"{model_type}: its linear-attention layers need flash-linear-attention on a GPU "
            f"(docker/requirements-gpu.txt), or they run more than ten times slower; found: {error}"
        ) from error


def _choose_by_device(module: ModuleType, name: str, on_gpu: Callable[..., Any]) -> None:
    """Replace a function of `module` by one that runs `on_gpu` for tensors there, and transformers' torch code elsewhere."""
    given = getattr(module, name)
    torch_code = inspect.unwrap(given)

    @functools.wraps(given)
    def chosen(tensor: torch.Tensor, *arguments: object, **settings: object) -> Any:
        return (on_gpu if tensor.is_cuda else torch_code)(tensor, *arguments, **settings)

    setattr(module, name, chosen)
