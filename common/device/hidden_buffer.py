"""A buffer on a device for the hidden states of one batch, reused for every batch. T tokens, K taps, H hidden size."""

import math

import torch

from common.ring.layout import SlotLayout


class HiddenBuffer:
    """A staging buffer of a target, or a device buffer of a drafter; its owner guards it with marks."""

    def __init__(self, layout: SlotLayout, device: torch.device) -> None:
        elements = math.prod(layout.hidden_shape(layout.capacity_tokens))
        self._flat = torch.empty(elements, dtype=getattr(torch, layout.hidden_dtype), device=device)
        self._layout = layout
        self.device_checksum = torch.empty((), dtype=torch.int64, device=device)
        self.checksum = torch.empty((), dtype=torch.int64, pin_memory=device.type == "cuda")  # its copy on the host

    def as_in_slot(self, num_tokens: int) -> torch.Tensor:
        """Return the front of the buffer in the layout of the slot, [T, K, H] or [K, T, H], contiguous."""
        shape = self._layout.hidden_shape(num_tokens)
        return self._flat[: math.prod(shape)].view(shape)

    def hidden_states(self, num_tokens: int) -> torch.Tensor:
        """Return [T, K, H] for either layout."""
        hidden_states = self.as_in_slot(num_tokens)
        return hidden_states.transpose(0, 1) if self._layout.split else hidden_states
