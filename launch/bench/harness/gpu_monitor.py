"""The GPUs as nvidia-smi reports them, several times a second; nothing where there is no nvidia-smi."""

import shutil
import subprocess
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple, Self

_QUERY = ["nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits", "--loop-ms=250"]


class GpuSample(NamedTuple):
    """One GPU at one moment."""

    time_s: float  # since the epoch
    gpu: int
    busy: float  # share of the last sampling period in which a kernel ran
    memory_mib: float


class GpuMonitor(AbstractContextManager["GpuMonitor"]):
    """Collects samples while the `with` block runs."""

    def __init__(self) -> None:
        self.samples: list[GpuSample] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if shutil.which(_QUERY[0]):
            self._process = subprocess.Popen(_QUERY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            self._thread = threading.Thread(target=self._read, args=(self._process.stdout,), name="gpus", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            with self._process:  # closes its output, and waits
                self._process.kill()
                self._thread.join()

    def between(self, start_s: float, end_s: float) -> dict[int, list[GpuSample]]:
        """Return the samples of a time by GPU, in the order of their numbers."""
        samples = [sample for sample in self.samples[:] if start_s <= sample.time_s <= end_s]
        gpus = sorted({sample.gpu for sample in samples})
        return {gpu: [sample for sample in samples if sample.gpu == gpu] for gpu in gpus}

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            if (sample := parse(line, time.time())) is not None:
                self.samples.append(sample)


def parse(line: str, time_s: float) -> GpuSample | None:
    """Parse a line of nvidia-smi; None for one of another form, as from a GPU that does not report its utilisation."""
    try:
        index, busy, memory_mib = line.split(",")
        return GpuSample(time_s, int(index), float(busy) / 100, float(memory_mib))
    except ValueError:
        return None
