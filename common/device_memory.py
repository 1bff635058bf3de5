"""What a process may have of a device's memory, and what it had at most."""

import torch

GIB = 2**30


def allowed_bytes(device: torch.device) -> int:
    """What this process has or can still get of a GPU, by the device and by its own limit."""
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    return min(free + torch.cuda.memory_reserved(device), int(total * share))


def describe_peak(device: torch.device) -> str:
    """For the end of a line in a log; empty for a CPU."""
    if device.type != "cuda":
        return ""
    peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)
    return f"; at most {peak / GIB:.1f} GiB of device memory in use, {reserved / GIB:.1f} GiB reserved"
