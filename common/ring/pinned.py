"""Page-locking shared memory for the GPU, once per ring and process; nothing to do without CUDA."""

import torch

from common.errors import HeadraceError

_registered: list[torch.Tensor] = []  # never unmapped: another mapping at the same addresses could not be registered


def register(memory: torch.Tensor) -> None:
    """Let the GPU copy to and from `memory` at full speed, until the process ends; it stays mapped that long.

    The pages should be populated (0.05 s per GiB then, 0.45 otherwise). torch's host allocator does
    not track this memory: whoever copies asynchronously owns the event that ends the copy.

    Raises:
        HeadraceError: it is registered already, or the driver refused.
    """
    if not torch.cuda.is_available() or memory.nbytes == 0:
        return
    if memory.is_pinned():  # asked first: CUDA would tell the error a second time, at somebody else's next launch
        raise HeadraceError(f"memory of {memory.nbytes} bytes: needed to be registered once, found registered already")
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if error != 0:
        raise HeadraceError(f"cudaHostRegister of {memory.nbytes} bytes: error {error}; is `ulimit -l` too small?")
    _registered.append(memory)
