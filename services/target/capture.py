"""Taps: the outputs of chosen decoder layers, taken by forward hooks while the model runs.

B rows, S padded length, H hidden size.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from common import faults


class Capture:
    """Keeps what the tapped layers return until `take`, the raw layer outputs before any final norm."""

    def __init__(self, layers: nn.ModuleList, tap_layers: Sequence[int]) -> None:
        self._tap_layers = list(tap_layers)
        self._outputs: dict[int, torch.Tensor] = {}
        for layer in self._tap_layers:
            layers[layer].register_forward_hook(self._make_hook(layer))

    def take(self) -> list[torch.Tensor]:
        """One tensor [B, S, H] per tap, in the order of `tap_layers`; they are forgotten here."""
        taps = [self._outputs.pop(layer) for layer in self._tap_layers]
        assert not self._outputs
        return taps

    def _make_hook(self, layer: int) -> Callable[[nn.Module, object, object], None]:
        def keep(module: nn.Module, arguments: object, output: object) -> None:
            hidden_states = output[0] if isinstance(output, tuple) else output
            assert isinstance(hidden_states, torch.Tensor)
            self._outputs[layer] = hidden_states
            faults.reach("target.mid_forward")

        return keep
