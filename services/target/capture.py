"""Taps: the outputs of chosen decoder layers, handed on by forward hooks while the model runs.

B rows, S padded length, H hidden size.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from common.actor import faults

Keep = Callable[[int, torch.Tensor], None]  # number of the tap, tap [B, S, H]


class Capture:
    """Passes on the outputs of the tapped layers, before any final norm."""

    def __init__(self, layers: nn.ModuleList, tap_layers: Sequence[int]) -> None:
        self._keep: Keep | None = None
        for tap_index, layer in enumerate(tap_layers):
            layers[layer].register_forward_hook(self._make_hook(tap_index))

    def start(self, keep: Keep) -> None:
        """Let the next forward hand its taps to `keep`, each as soon as it exists, in the order of `tap_layers`."""
        self._keep = keep

    def _make_hook(self, tap_index: int) -> Callable[[nn.Module, object, object], None]:
        def hand_on(module: nn.Module, arguments: object, output: object) -> None:
            hidden_states = output[0] if isinstance(output, tuple) else output
            assert isinstance(hidden_states, torch.Tensor) and self._keep is not None
            self._keep(tap_index, hidden_states)
            faults.reach("target.mid_forward")

        return hand_on
