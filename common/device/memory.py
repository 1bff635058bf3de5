"""The device of a process, and the limit and the peak of its memory there."""

import torch

from common.errors import ConfigError

GIB = 2**30


def take_device(name: str, key: str) -> torch.device:
    """Return the device that the setting `key` names, a GPU as the current one of this thread; ConfigError without it."""
    device = torch.device(name)
    if device.type == "cuda":
        num_gpus = torch.cuda.device_count()
        if (device.index or 0) >= num_gpus:
            raise ConfigError(f"{key}: needed {name}, found {num_gpus} GPUs that torch {torch.__version__} can use")
        torch.cuda.set_device(device)
    return device


def take_devices(entry: str, key: str) -> list[torch.device]:
    """Return the devices of a target, joined by "+", the first as the current one of this thread; ConfigError without one."""
    names = entry.split("+")
    devices = [take_device(name, key) for name in names]
    take_device(names[0], key)
    return devices


def allowed_bytes(device: torch.device) -> int:
    """Return the bytes that this process has or can still get of a GPU, by the device and by its own limit."""
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    return min(free + torch.cuda.memory_reserved(device), int(total * share))


def describe_peak(device: torch.device) -> str:
    """Return the end of a log line, empty for a CPU."""
    if device.type != "cuda":
        return ""
    peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)
    return f"; at most {peak / GIB:.1f} GiB of device memory in use, {reserved / GIB:.1f} GiB reserved"
