"""Convolved layers keep little more for the backward pass than plain ones, as the compiler of a GPU would split them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from services.drafter.kernels.fused import RECOMPUTE
from services.drafter.model import layers
from services.drafter.model.convolution import Mix
from services.drafter.model.layers import enter_convolved_layer, finish_convolved_layer, finish_layer

ROWS, HIDDEN, WIDE, GROUP = 256, 128, 432, 16


def tensor(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16, requires_grad=True)


def saved_units(function: Callable[..., Any], *arguments: Any) -> float:
    """Return what a compiled function saves beside its arguments, in tensors of [ROWS, HIDDEN]."""
    own = {argument.data_ptr() for argument in arguments if isinstance(argument, Tensor)}
    saved: dict[int, int] = {}

    def keep(found: Tensor) -> Tensor:
        saved[found.data_ptr()] = found.nbytes
        return found

    plain: Any = function
    compiled = torch.compile(plain.__wrapped__, backend="aot_eager_decomp_partition", dynamic=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda found: found):
        compiled(*arguments, 1e-6)  # type: ignore[no-untyped-call]
    return sum(size for address, size in saved.items() if address not in own) / (ROWS * HIDDEN * 2)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_convolved_layers_save_three_tensors_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def convolve_as_on_a_gpu(rows: Tensor, kernels: Tensor, base: Tensor, side: int, is_first: Tensor) -> Tensor:
        output: Tensor = Mix.apply(rows, kernels.view(ROWS, 2, 2, -1)[:, side], base[side], is_first)  # type: ignore[no-untyped-call]
        return output

    monkeypatch.setattr(layers, "convolve", convolve_as_on_a_gpu)
    rows, norm, base = tensor(ROWS, HIDDEN), tensor(HIDDEN), tensor(2, 2, HIDDEN)
    projection, kernels = tensor(4 * HIDDEN // GROUP, HIDDEN), tensor(ROWS, 4 * HIDDEN // GROUP)
    weights = tensor(HIDDEN, HIDDEN), norm, tensor(WIDE, HIDDEN), tensor(WIDE, HIDDEN), tensor(HIDDEN, WIDE)
    is_first = (torch.arange(ROWS) % 8 == 0)[:, None]
    torch.compiler.reset()
    plain = saved_units(finish_layer, rows, tensor(ROWS, HIDDEN), *weights)
    convolved = rows, tensor(ROWS, HIDDEN), kernels, is_first, base, tensor(2, 2, HIDDEN), projection, *weights
    with torch._functorch.config.patch(RECOMPUTE):
        finish = saved_units(finish_convolved_layer, *convolved)
        enter = saved_units(enter_convolved_layer, rows, is_first, norm, base, projection)
    torch.compiler.reset()
    assert finish + enter - plain < 4.0  # one of them, what enters attention, is saved by a plain layer too, outside
