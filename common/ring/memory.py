"""Anonymous shared memory that no process can leak: memfds created by start_all, inherited by its children.

A memfd has no name, needs no resource tracker, ignores the size of /dev/shm, outlives any child
and vanishes with its last holder.
"""

import fcntl
import mmap
import os
from pathlib import Path

from common.errors import ConfigError, SharedMemoryError

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 * 1024 * 1024
_CONTROL_GROUP = Path("/sys/fs/cgroup")
_MADV_POPULATE_WRITE = 23  # linux/mman.h; Python 3.11 has no name for it


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def create(name: str, num_bytes: int) -> int:
    """Allocate `num_bytes` in full and return an inheritable file descriptor.

    Allocating now makes too little memory an error here instead of SIGBUS at a later write;
    the seals make a buggy truncate an error instead of SIGBUS in every process.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"{name}: needed {num_bytes} bytes of shared memory: {error.strerror}") from error
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def attach(fd: int, name: str = "memory", num_bytes: int | None = None) -> mmap.mmap:
    """Map all of the memory behind `fd`, shared and writable, with every page present.

    Raises:
        SharedMemoryError: it is not of `num_bytes`.
    """
    size = os.fstat(fd).st_size
    if num_bytes not in (None, size):
        raise SharedMemoryError(f"{name}: needed {num_bytes} bytes, found {size}")
    mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    mapping.madvise(_MADV_POPULATE_WRITE)
    return mapping


def check_available(num_bytes: int) -> None:
    """Raise ConfigError if the machine or the control group cannot hold `num_bytes` more."""
    available = _available_bytes(_CONTROL_GROUP)
    if num_bytes > available:
        raise ConfigError(
            f"ring.num_slots x targets.devices x plan.max_tokens_per_batch: needed {num_bytes / 2**30:.2f} GiB "
            f"of shared memory, found {available / 2**30:.2f} GiB available"
        )


def _available_bytes(group: Path) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            machine = int(line.split()[1]) * 1024
            break
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return machine
    cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))  # given up when needed
    return min(machine, limit - used + cached)
