"""What nvidia-smi sees of the GPUs, several times a second; nothing where there is no nvidia-smi."""

import shutil
import subprocess
import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple, Self

_INTERVAL_MS = 250
_QUERY = ["nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits"]


class GpuSample(NamedTuple):
    """One GPU at one moment."""

    time_s: float  # since the epoch
    gpu: int
    busy: float  # share of the last sampling period in which a kernel ran
    memory_mib: float


class GpuMonitor:
    """Collects samples while the `with` block runs."""

    def __init__(self) -> None:
        self.samples: list[GpuSample] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if shutil.which(_QUERY[0]):
            command = [*_QUERY, f"--loop-ms={_INTERVAL_MS}"]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            self._thread = threading.Thread(target=self._read, args=(self._process.stdout,), name="gpus", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process is not None:
            with self._process:  # closes its output, and waits
                self._process.kill()
                self._thread.join()

    def between(self, start_s: float, end_s: float) -> dict[int, list[GpuSample]]:
        """The samples of a time by GPU."""
        found: dict[int, list[GpuSample]] = {}
        for sample in self.samples[:]:
            if start_s <= sample.time_s <= end_s:
                found.setdefault(sample.gpu, []).append(sample)
        return found

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            if (sample := parse(line, time.time())) is not None:
                self.samples.append(sample)


def parse(line: str, time_s: float) -> GpuSample | None:
    """A line of nvidia-smi; None for one that is not of this form, as where a GPU does not tell its utilisation."""
    try:
        index, busy, memory_mib = line.split(",")
        return GpuSample(time_s, int(index), float(busy) / 100, float(memory_mib))
    except ValueError:
        return None
