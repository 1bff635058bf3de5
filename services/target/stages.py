"""The stages of a target: consecutive layers on a device of their own each, through which batches follow each other.

    stage 0   [batch 2        ][batch 3        ]     the launching thread launches a whole batch, stage by stage, and waits for
    stage 1   . . [batch 1        ][batch 2    ]     nothing: stage 1 runs batch 1 while stage 0 runs batch 2

A stage's layers receive what they need from other stages through `Handover`. A target on one device is one stage, without it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from common.device.copy_stream import CopyStream, Mark, mark_computation
from common.device.memory import GIB
from common.errors import ConfigError
from common.ring.memory import round_up
from services.target.architecture import find_layers

_ALIGNMENT_BYTES = 512

Enter = Callable[[int], None]  # index of the stage whose work is launched from now on


class Stage:
    """Consecutive layers on a device, the taps among them, and the streams of computation and of copies to slots."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None, layers: range, taps: range) -> None:
        self.device = device
        self.stream = stream  # None on a CPU
        self.layers = layers
        self.taps = taps  # indices of taps
        self.copies = CopyStream(device)

    def use(self) -> None:
        """Make the device and the stream the current ones of the launching thread."""
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)


def make_stages(devices: Sequence[torch.device], first_layers: Sequence[int], tap_layers: Sequence[int]) -> list[Stage]:
    """Cut the layers up to the last tap into one stage per device. A device that comes again gets a stream of its own."""
    stages: list[Stage] = []
    for device, first, end in zip(devices, first_layers, [*first_layers[1:], tap_layers[-1] + 1], strict=True):
        stream = None
        if device.type == "cuda":
            is_taken = device in [stage.device for stage in stages]
            stream = torch.cuda.Stream(device) if is_taken else torch.cuda.current_stream(device)  # type: ignore[no-untyped-call]
        taps = [index for index, layer in enumerate(tap_layers) if first <= layer < end]
        first_tap = taps[0] if taps else 0
        stages.append(Stage(device, stream, range(first, end), range(first_tap, first_tap + len(taps))))
    return stages


def count_layer_bytes(decoder: Any) -> list[int]:
    """Return the bytes of each layer's weights, with those outside the layers, such as the embedding, in the first."""
    num_bytes = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in find_layers(decoder).layers]
    num_bytes[0] += sum(parameter.nbytes for parameter in decoder.parameters()) - sum(num_bytes)
    return num_bytes


def split(costs: Sequence[float], num_bytes: Sequence[int], rooms: Sequence[float]) -> list[int] | None:
    """Return the first layer of each stage such that the costliest stage costs least and each fits into its room.

    Args:
        costs: of each layer.
        num_bytes: of each layer.
        rooms: bytes for layers on each device; as many stages are made, each of one layer at least.
    """
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # end of the layers that are placed -> cost, first layers
    for room in rooms:
        found: dict[int, tuple[float, list[int]]] = {}
        for first, (highest, first_layers) in best.items():
            cost, used = 0.0, 0
            for layer in range(first, len(costs)):
                cost, used = cost + costs[layer], used + num_bytes[layer]
                if used > room:
                    break
                candidate = (max(highest, cost), [*first_layers, first])
                found[layer + 1] = min(found.get(layer + 1, candidate), candidate)
        best = found
    return best[len(costs)][1] if len(costs) in best else None


def split_by_bytes(num_bytes: Sequence[int], devices: Sequence[torch.device], rooms: Sequence[float]) -> list[int]:
    """Return the first layer of each stage before anything is measured: equal shares of the weights.

    Raises:
        ConfigError: the weights do not fit into the rooms, in bytes; the message says how many layers would.
    """
    if (first_layers := split(num_bytes, num_bytes, rooms)) is not None:
        return first_layers
    counts = range(len(num_bytes) - 1, 0, -1)
    fitting = next((count for count in counts if split(num_bytes[:count], num_bytes[:count], rooms)), 0)
    free = ", ".join(f"{room / GIB:.1f} GiB on {device}" for device, room in zip(devices, rooms, strict=True))
    raise ConfigError(
        f"targets.devices: needed {sum(num_bytes) / GIB:.1f} GiB for the weights of {len(num_bytes)} layers, "
        f"found {free}: room for {fitting} layers"
    )


class Handover:
    """Brings the arguments of a stage's layers to its device: hidden states once, masks and rotary angles once.

    A copy runs behind the computation that it reads, on a buffer that the stage's forward of `num_slots` batches ago has
    finished with. Only streams wait. Buffers are made in the warm-up, which runs the largest shapes.
    """

    def __init__(self, layers: Sequence[nn.Module], stage: Stage, num_slots: int, enter: Callable[[], None]) -> None:
        self._stage = stage
        self._enter = enter
        self._buffers: list[torch.Tensor] = []  # of the arguments in the order of their arrival: bytes [slots, N]
        self._free = [Mark(None)] * num_slots  # guards the slot's part of every buffer
        self._turn = 0  # slot of this forward
        self._brought: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of the original, which must live as long
        self._num_brought = 0
        self._arrivals = CopyStream(stage.device)
        hooks = [self._receive_all, *[self._receive_others] * (len(layers) - 1)]
        self._handles = [
            layer.register_forward_pre_hook(hook, with_kwargs=True) for layer, hook in zip(layers, hooks, strict=True)
        ]

    def end(self) -> None:
        """End a forward, whether it reached this stage or not."""
        self._free[self._turn] = Mark(self._stage.stream)
        self._turn = (self._turn + 1) % len(self._free)
        self._brought.clear()
        self._num_brought = 0

    def remove(self) -> None:
        """Take the hooks off the layers."""
        for handle in self._handles:
            handle.remove()

    def _receive_all(self, layer: nn.Module, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """Bring everything, also the hidden states, to the first layer; the launching thread then works for this stage."""
        received = tree_map_only(torch.Tensor, self._bring, (arguments, settings))
        self._stage.use()
        self._enter()
        return received

    def _receive_others(self, layer: nn.Module, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """Bring everything but the hidden states, which the layer before made here."""
        own = {"hidden_states": settings["hidden_states"]} if "hidden_states" in settings else {}
        first, others = arguments[: 1 - len(own)], arguments[1 - len(own) :]
        others, settings = tree_map_only(torch.Tensor, self._bring, (others, settings | dict.fromkeys(own)))
        return (*first, *others), settings | own

    def _bring(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._brought:
            self._brought[id(tensor)] = tensor, self._copy(tensor)
        return self._brought[id(tensor)][1]

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to a buffer of this forward. torch copies between GPUs on the current stream of the source."""
        source = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        copy = self._buffer(tensor.nbytes)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._num_brought += 1
        with self._arrivals.after(mark_computation(tensor.device)), self._arrivals.after(self._free[self._turn]):
            copy.copy_(tensor.contiguous(), non_blocking=True)
        arrived = self._arrivals.mark()
        arrived.hold(self._stage.stream)
        arrived.hold(source)  # which may use the original's memory for something else
        return copy

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        """Return the next buffer of this forward; a new or larger one is made for all slots at once."""
        if self._num_brought == len(self._buffers):
            self._buffers.append(torch.empty(len(self._free), 0, dtype=torch.uint8, device=self._stage.device))
        if self._buffers[self._num_brought].shape[1] < num_bytes:
            shape = len(self._free), round_up(num_bytes, _ALIGNMENT_BYTES)
            self._buffers[self._num_brought] = torch.empty(shape, dtype=torch.uint8, device=self._stage.device)
            self._free = [Mark(self._stage.stream)] * len(self._free)  # whose kernels may have used this memory before
        return self._buffers[self._num_brought][self._turn]
