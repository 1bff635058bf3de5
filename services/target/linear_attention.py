"""The kernels of a hybrid target's linear-attention layers (GatedDeltaNet: Qwen3-Next, Qwen3.5, Qwen3.6).

transformers takes the delta rule from an installed flash-linear-attention, also for tensors on a CPU, where it cannot run.
The short convolution before it comes from the package causal-conv1d only, else from torch: a grouped convolution and an
activation, both through memory. flash-linear-attention holds that convolution as one Triton kernel. Both functions are
therefore replaced, in the module of transformers that calls them by name, by a choice of device.

torch.compile cannot trace kernels that tune themselves: a compiled layer would break into graphs around them. Both functions
are therefore operators of torch while a layer is compiled: torch knows only the shape of their output and compiles the layer
as one graph. The norm of queries and keys is compiled too, since its kernel tunes itself for every range of tokens.

B rows, S padded length, C channels, W width of the convolution, N heads, D head size; of keys and of values.
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
_NORM_EPS = 1e-6


def choose_kernels(decoder: PreTrainedModel, device: torch.device) -> None:
    """Let the linear-attention layers of `decoder`, if any, run on the fastest code for `device`.

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


def causal_convolution(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> torch.Tensor:
    """Replace transformers' function of that name: [B, C, S] and [C, W] -> [B, C, S]; in both the bytes lie as [B, S, C]."""
    from fla.modules.causal_conv1d import causal_conv1d  # type: ignore[import-not-found]  # GPU machines only

    convolved: torch.Tensor
    convolved, _ = causal_conv1d(hidden_states.transpose(1, 2), weight, bias, activation=activation)
    return convolved.transpose(1, 2)


def _modules_of_layers(decoder: PreTrainedModel) -> list[ModuleType]:
    """Return the modules of transformers that define the linear-attention layers of `decoder`."""
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
    given, module_name, in_graph = getattr(module, name), module.__name__, _IN_GRAPH[name]
    torch_code = inspect.unwrap(given)

    @functools.wraps(given)
    def chosen(tensor: torch.Tensor, *arguments: object, **settings: object) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return in_graph(module_name, tensor, *arguments, **settings)
        return (on_gpu if tensor.is_cuda else torch_code)(tensor, *arguments, **settings)

    setattr(module, name, chosen)


@torch.library.custom_op("headrace::causal_convolution", mutates_args=())
def _convolve(
    module_name: str, hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """Convolve [B, C, S] with [C, W] to [B, S, C], contiguous, by the function that is chosen in the module."""
    chosen = getattr(sys.modules[module_name], _CONVOLUTION)
    convolved: torch.Tensor = chosen(hidden_states, weight, bias, activation=activation)
    return convolved.transpose(1, 2).contiguous()


@torch.library.custom_op("headrace::gated_delta_rule", mutates_args=())
def _apply_delta_rule(
    module_name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Map [B, S, N, D] each, decay and step size [B, S, N], to [B, S, N, D] of the values, contiguous."""
    chosen = getattr(sys.modules[module_name], _DELTA_RULE)
    output: torch.Tensor
    output, _ = chosen(query, key, value, g=g, beta=beta)
    return output.contiguous()


_convolve.register_fake(lambda name, states, weight, bias, activation: states.new_empty(states.transpose(1, 2).shape))
_apply_delta_rule.register_fake(lambda name, query, key, value, g, beta: value.new_empty(value.shape))


def _convolve_in_graph(
    module_name: str,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> torch.Tensor:
    """Replace transformers' function of this signature while a layer is compiled."""
    convolved: torch.Tensor = _convolve(module_name, hidden_states, weight, bias, activation)
    return convolved.transpose(1, 2)


def _delta_rule_in_graph(
    module_name: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Replace transformers' function of this signature while a layer is compiled; a target keeps no state between batches."""
    assert use_qk_l2norm_in_kernel and initial_state is None and not output_final_state
    return _apply_delta_rule(module_name, _normalise(query), _normalise(key), value, g, beta), None


def _normalise(heads: torch.Tensor) -> torch.Tensor:
    """Scale each head of [B, S, N, D] to length one as flash-linear-attention does: in float32, then rounded."""
    exact = heads.float()
    return (exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + _NORM_EPS)).to(heads.dtype)


_IN_GRAPH: dict[str, Callable[..., Any]] = {_CONVOLUTION: _convolve_in_graph, _DELTA_RULE: _delta_rule_in_graph}
