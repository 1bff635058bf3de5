"""Chains of memory-bound operations as single kernels on a GPU; plain calls on the CPU.

Each function is compiled by itself and used by every layer, so the first step takes seconds and not minutes; torch
keeps what it compiled on disk for the next start.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
import torch._functorch.config
from torch import Tensor, nn

P = ParamSpec("P")
Out = TypeVar("Out")
_NUM_COMPILED = 64  # versions of a function: for 0, 1 or more rows, with or without gradients; torch stops compiling after 8
# Autotuning copies the arguments that a function changes to the host first: 20 GiB for the optimizer of the 27B draft.
_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"triton.autotune_pointwise": False}


# Lets the compiler compute any memory-bound result again for the backward pass, not only those of operations it has on a list.
RECOMPUTE = {"ban_recompute_not_in_allowlist": False, "ban_recompute_used_far_apart": False}


def fused(function: Callable[P, Out]) -> Callable[P, Out]:
    """Compile a function of tensors if the first one is on a GPU.

    The first dimension of every tensor of two or more dimensions, except parameters, counts rows and may change from call
    to call without another compilation.
    """
    return _fused(function, recompute=False)


def fused_and_recomputed(function: Callable[P, Out]) -> Callable[P, Out]:
    """Compile as `fused` does; the backward pass computes memory-bound results again instead of reading saved ones."""
    return _fused(function, recompute=True)


def _fused(function: Callable[P, Out], *, recompute: bool) -> Callable[P, Out]:

    @functools.cache
    def compiled() -> Callable[..., Any]:
        torch._dynamo.config.recompile_limit = _NUM_COMPILED
        return torch.compile(function, options=_OPTIONS)

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> Out:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        if not tensors[0].is_cuda:
            return function(*arguments, **named)
        for tensor in tensors:
            if tensor.dim() > 1 and not isinstance(tensor, nn.Parameter):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        with torch._functorch.config.patch(RECOMPUTE) if recompute else nullcontext():
            output: Out = compiled()(*arguments, **named)
        return output

    return call
