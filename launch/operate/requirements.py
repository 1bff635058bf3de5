"""Which parts of a run this machine has: the folders it reads and the GPUs it computes on. Loads no torch."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from common.config import Config
from common.errors import ConfigError

_DRIVER_TIMEOUT_S = 60  # eight GPUs without persistence mode take some ten seconds
_COUNT_GPUS = """
import ctypes
count = ctypes.c_int()
driver = ctypes.CDLL("libcuda.so.1")
driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
print(count.value)
"""


def count_gpus() -> int:
    """Return how many GPUs the actors will see, by the driver's own count; 0 without a driver.

    A child asks, so that the supervisor never initialises CUDA. The count obeys CUDA_VISIBLE_DEVICES and the devices of
    a container, which /proc/driver/nvidia and nvidia-smi do not.
    """
    line = [sys.executable, "-S", "-c", _COUNT_GPUS]
    try:
        asked = subprocess.run(line, capture_output=True, text=True, timeout=_DRIVER_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        found = f"none that answers within {_DRIVER_TIMEOUT_S} s"
        raise ConfigError(f"targets.devices: needed a working GPU driver, found {found}") from error
    return int(asked.stdout) if asked.returncode == 0 else 0


def check_devices(config: Config) -> None:
    """Raise ConfigError for the first GPU of the run that is not there."""
    for absent in _absent_devices(config):
        raise ConfigError(absent)


def find_absent(config: Config) -> list[str]:
    """Return one line per folder or GPU of the run that does not exist."""
    data = config.data
    paths = [("model.path", config.model.path), ("data.path", data.path), ("data.eval_path", data.eval_path)]
    paths += [(f"data.eval_paths.{name}", path) for name, path in data.eval_paths.items()] + [("draft.init", config.draft.init)]
    absent = [f"{key}: {path}" for key, path in paths if path and not Path(path).expanduser().exists()]
    return absent + list(_absent_devices(config))


def _absent_devices(config: Config) -> Iterator[str]:
    sides = [("targets.devices", config.targets.devices), ("drafters.devices", config.drafters.devices)]
    wanted = {key: [int(name.removeprefix("cuda:")) for name in names if name != "cpu"] for key, names in sides}
    num_gpus = count_gpus() if any(wanted.values()) else 0
    for key, indices in wanted.items():
        if max(indices, default=-1) >= num_gpus:
            yield f"{key}: needed cuda:{max(indices)}, found {num_gpus} GPUs"
