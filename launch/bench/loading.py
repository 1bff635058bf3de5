"""How long a target takes to be in memory, and how much of the host's memory several of them take.

    python -m launch.bench loading [--shape qwen3_6_27b] [--layers 8] [--processes 3] [--folder DIR]

First the whole random target is made; then one of a few layers is saved as a model folder and read, by one process and
by several at once, with its files in the page cache.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from common.config import Config
from launch.bench.harness.copier import SPAWN
from launch.bench.shapes import SHAPES, random_run
from services.target.loading import load_decoder

GIB = 2**30
NUM_TOKENS = 2048  # of a batch; nothing is computed


class Loaded(NamedTuple):
    """One process, after it had read the weights."""

    seconds: float
    num_bytes: int
    own_bytes: int  # resident memory of its own that came with them
    shared_bytes: int  # resident pages of files that came with them


def load(config: Config, device: torch.device) -> Loaded:
    """Read the target of a run in this process."""
    torch.set_num_threads(1)
    torch.ones(1, device=device)
    before = _resident_bytes()
    began = time.perf_counter()
    decoder = load_decoder(config, device)
    seconds = time.perf_counter() - began
    num_bytes = sum(parameter.nbytes for parameter in decoder.parameters())
    own_bytes, shared_bytes = _resident_bytes()
    return Loaded(seconds, num_bytes, own_bytes - before[0], shared_bytes - before[1])


def read_all(folder: Path, device: torch.device) -> float:
    """Seconds in which safetensors alone reads every file of a folder to the device."""
    began = time.perf_counter()
    tensors = [load_file(path, str(device)) for path in sorted(folder.glob("*.safetensors"))]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    assert tensors
    return time.perf_counter() - began


def measure(options: argparse.Namespace, folder: Path, device: torch.device) -> Iterator[tuple[str, str]]:
    """The rows of the table, as they are measured."""
    made = in_processes(random_run(options.shape, NUM_TOKENS), device, 1)
    yield "random target, every layer that runs, made", describe(made[0])
    config = save_few_layers(options.shape, options.layers, folder, device)
    yield f"{options.layers} layers, read by safetensors alone", f"{read_all(folder, device):.1f} s"
    for num_processes in sorted({1, options.processes}):
        for number, loaded in enumerate(in_processes(config, device, num_processes), 1):
            yield f"{options.layers} layers, read by process {number} of {num_processes} at once", describe(loaded)


def save_few_layers(shape: str, num_layers: int, folder: Path, device: torch.device) -> Config:
    """A model folder of the first layers of a random target, and the run that reads them all."""
    outer = json.loads(Path(random_run(shape, NUM_TOKENS).model.path, "config.json").read_text())
    outer.get("text_config", outer)["num_hidden_layers"] = num_layers
    (folder / "config.json").write_text(json.dumps(outer))
    settings = [f"model.path={folder}", f"draft.tap_layers=[{num_layers - 1}]"]
    load_decoder(random_run(shape, NUM_TOKENS, settings), device).save_pretrained(folder)
    return random_run(shape, NUM_TOKENS, [*settings, "model.random_init=false"])


def in_processes(config: Config, device: torch.device, num_processes: int) -> list[Loaded]:
    """Load in that many processes at the same time."""
    barrier = SPAWN.Barrier(num_processes)
    with ProcessPoolExecutor(num_processes, SPAWN, barrier.wait) as pool:
        return list(pool.map(load, [config] * num_processes, [device] * num_processes))


def describe(loaded: Loaded) -> str:
    """A row."""
    size, own, shared = (num_bytes / GIB for num_bytes in (loaded.num_bytes, loaded.own_bytes, loaded.shared_bytes))
    speed = f"{size:.3f} GiB in {loaded.seconds:.2f} s, {size / loaded.seconds:.1f} GiB/s"
    return f"{speed}; host memory {own:.3f}, shared pages {shared:.3f} GiB"


def _resident_bytes() -> tuple[int, int]:
    """Memory of this process alone, and pages of files, which others may share."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    own, shared = (int(status[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile"))
    return own, shared


def main(arguments: list[str]) -> int:
    """Print the table."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m launch.bench loading")
    parser.add_argument("--shape", choices=[*SHAPES, "tiny"], default="qwen3_6_27b" if on_gpu else "tiny")
    parser.add_argument("--layers", type=int, default=8 if on_gpu else 4, help="of the folder that is written")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write it; by default among the temporary files")
    options = parser.parse_args(arguments)
    print(f"{torch.cuda.get_device_name() if on_gpu else 'CPU'}, torch {torch.__version__}, {' '.join(arguments)}")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for what, value in measure(options, Path(folder), torch.device("cuda" if on_gpu else "cpu")):
            print(f"{what:46} {value}", flush=True)
    return 0
