"""The configuration of a run as its processes read it: resolved once, its input checked before anything is written."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from common.config import Config
from common.data.dataset import Dataset
from common.drafter_files import fingerprint_drafter
from common.errors import ConfigError, DataError, ModelError
from common.run_dir import DATA
from launch.data.vocabulary import fingerprint_vocabulary

_DRIVER_TIMEOUT_S = 60  # eight GPUs without persistence mode take some ten seconds
_READ_GPUS = """
import ctypes
count, memory = ctypes.c_int(), ctypes.c_size_t()
driver = ctypes.CDLL("libcuda.so.1")
driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
for device in range(count.value):
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    print(memory.value)
"""


def resolve(config: Config, run_dir: Path) -> Config:
    """Return the configuration that the processes read, which run in another working directory.

    Paths become absolute, made-up data lie in the run directory, and the contents of draft.init get a name, so that
    a resumed or restarted run begins from the same drafter.

    Raises:
        CheckpointError: draft.init is no drafter folder.
    """
    replace, data, draft = msgspec.structs.replace, config.data, config.draft
    if data.synthetic is not None:
        data = replace(data, path=str(run_dir / DATA / "train"), eval_path=str(run_dir / DATA / "eval"))
    else:
        sets = {name: _absolute(path) for name, path in data.eval_paths.items()}
        data = replace(data, path=_absolute(data.path), eval_path=_absolute(data.eval_path), eval_paths=sets)
    if draft.init:
        folder = _absolute(draft.init)
        draft = replace(draft, init=folder, init_fingerprint=fingerprint_drafter(Path(folder)))
    return replace(config, data=data, draft=draft, model=replace(config.model, path=_absolute(config.model.path)))


def check_input(config: Config) -> None:
    """Check model, devices and data of a resolved configuration.

    Raises:
        ModelError: the folder of the target holds no weights. They are not opened here.
        ConfigError: a GPU of the run does not exist.
        DataError: a data set is missing or damaged, has no supervised token, or holds ids of another tokenizer.
    """
    folder = Path(config.model.path)
    if not config.model.random_init and not any(folder.glob("*.safetensors")):
        raise ModelError(f"model.path: needed *.safetensors in {folder}, found none (model.random_init = true needs none)")
    for absent in _absent_devices(config):
        raise ConfigError(absent)
    if config.data.synthetic is None:
        for key, path in _data_paths(config).items():
            _check_data_set(config, key, Dataset.open(Path(path)))


def find_absent(config: Config) -> list[str]:
    """Return one line per folder or GPU of the run that does not exist."""
    paths = {"model.path": config.model.path, **_data_paths(config), "draft.init": config.draft.init}
    absent = [f"{key}: {path}" for key, path in paths.items() if path and not Path(path).expanduser().exists()]
    return absent + list(_absent_devices(config))


def read_gpus() -> list[int]:
    """Return the bytes of memory of each GPU that the actors will see, by the driver's own count; none without a driver.

    A child process asks, so that the supervisor never initialises CUDA. The count obeys CUDA_VISIBLE_DEVICES and the
    devices of a container, which /proc/driver/nvidia and nvidia-smi do not.
    """
    line = [sys.executable, "-S", "-c", _READ_GPUS]
    try:
        found = subprocess.run(line, capture_output=True, text=True, timeout=_DRIVER_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        late = f"none that answers within {_DRIVER_TIMEOUT_S} s"
        raise ConfigError(f"targets.devices: needed a working GPU driver, found {late}") from error
    return [int(num_bytes) for num_bytes in found.stdout.split()] if found.returncode == 0 else []


def _absent_devices(config: Config) -> Iterator[str]:
    devices = {"targets.devices": config.targets.devices, "drafters.devices": config.drafters.devices}
    indices = {key: [int(number) for number in re.findall(r"cuda:(\d+)", "+".join(names))] for key, names in devices.items()}
    num_gpus = len(read_gpus()) if any(indices.values()) else 0
    for key, wanted in indices.items():
        if max(wanted, default=-1) >= num_gpus:
            yield f"{key}: needed cuda:{max(wanted)}, found {num_gpus} GPUs"


def _data_paths(config: Config) -> dict[str, str]:
    """Return the path of every data set by its key."""
    data = config.data
    sets = {f"data.eval_paths.{name}": path for name, path in data.eval_paths.items()}
    paths = {"data.path": data.path, "data.eval_path": data.eval_path, **sets}
    return {key: path for key, path in paths.items() if path}


def _check_data_set(config: Config, key: str, dataset: Dataset) -> None:
    model, source = Path(config.model.path), dataset.manifest.source
    found, needed = source.get("vocabulary"), fingerprint_vocabulary(model)
    if found and needed and found != needed:
        raise DataError(f"{key}: needed samples of the tokenizer of {model}, found those of {source.get('model')}")
    vocab_size = config.shape.vocab_size
    if outside := dataset.find_id_outside(vocab_size):
        sample, token = outside
        raise DataError(
            f"{key}: needed ids {f'below {vocab_size}' if token >= 0 else 'from 0'}, found {token} in sample {sample}"
        )
    if not dataset.has_supervised_token():
        raise DataError(f"{key}: needed a supervised token, found none")


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""
