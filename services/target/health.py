"""Time and throughput of a target: a line of metrics per batch, a summary in its log every minute.

Seconds of the host: waiting_for_work, waiting_for_slot, waiting_for_staging (the device is behind: nothing is lost), read,
launch, publish. Seconds of the device: upload, forward, pack, copy, and idle, between one batch and the next.
"""

import logging
import time
from collections import defaultdict

import numpy as np
import torch

from common.device.stopwatch import Stopwatch
from common.metrics import MetricsWriter
from services.target.flops import ForwardFlops, peak_flops_per_s
from services.target.rows import TargetRows

_REPORT_S = 60.0
_SHARES = ("forward", "pack", "copy", "idle", "waiting_for_slot", "waiting_for_work")

log = logging.getLogger(__name__)


class Health:
    """Metrics of the batches; used by the publisher's thread, which sees each batch when the device has finished it."""

    def __init__(self, metrics: MetricsWriter, flops: ForwardFlops, device: torch.device) -> None:
        self._metrics = metrics
        self._flops = flops
        self._peak = peak_flops_per_s(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self._device = device
        self._watch: Stopwatch | None = None
        self._copied_s = self._reported_s = time.monotonic()
        self._sums: dict[str, float] = defaultdict(float)

    def record(self, batch: int, rows: TargetRows, watch: Stopwatch, copied_s: float, laps_s: dict[str, float]) -> None:
        """Write the metrics of one batch.

        Args:
            batch: its number in the sequence.
            rows: its documents.
            watch: of the forward's stream, whose end was reached.
            copied_s: when its slot was full (CLOCK_MONOTONIC).
            laps_s: seconds by name, of host and device.
        """
        interval_s, self._copied_s = copied_s - self._copied_s, copied_s
        laps_s = laps_s | {"idle_s": max(0.0, watch.pause_s(self._watch)) if self._watch else 0.0}
        self._watch = watch
        num_tokens, flops = len(rows.token_index), self._flops.of(np.diff(rows.packed.cu_seqlens))
        self._metrics.write(
            batch=batch,
            num_tokens=num_tokens,
            num_padded_tokens=rows.input_ids.numel(),
            interval_s=interval_s,
            **laps_s,
            tokens_per_s=num_tokens / interval_s,
            tflops=flops / interval_s * 1e-12,
            utilisation=flops / interval_s / self._peak if self._peak else None,
            **self._memory(),
            time_s=time.time(),
        )
        for name, value in (laps_s | {"num_tokens": num_tokens, "flops": flops, "interval_s": interval_s}).items():
            self._sums[name] += value
        if copied_s - self._reported_s >= _REPORT_S:
            self._report()
            self._reported_s = copied_s

    def _memory(self) -> dict[str, int]:
        """Return the allocator's counters; both stay constant after the warm-up."""
        if self._device.type != "cuda":
            return {}
        stats = torch.cuda.memory_stats(self._device)
        return {"reserved_bytes": stats["reserved_bytes.all.current"], "num_device_allocs": stats["num_device_alloc"]}

    def _report(self) -> None:
        sums, interval_s = self._sums, self._sums["interval_s"]
        shares = ", ".join(f"{name.replace('_', ' ')} {sums[f'{name}_s'] / interval_s:.1%}" for name in _SHARES)
        utilisation = f", {sums['flops'] / interval_s / self._peak:.1%} of peak" if self._peak else ""
        speed = f"{sums['num_tokens'] / interval_s:,.0f} tokens/s, {sums['flops'] / interval_s * 1e-12:.1f} TFLOP/s"
        log.info("%s%s; %s", speed, utilisation, shares)
        self._sums.clear()
