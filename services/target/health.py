"""Time and throughput of a target: a line of metrics per batch, a summary in its log every minute.

Seconds of the host: waiting_for_work, waiting_for_slot, waiting_for_staging (the device is behind: nothing is lost), read,
launch, publish. Seconds of the device: upload, forward, pack, copy, and idle, between one batch and the next; of several
devices their mean, and each device's own in `devices`.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from common.device.memory import GIB
from common.device.stopwatch import Stopwatch
from common.metrics import MetricsWriter
from services.target.flops import ForwardFlops, peak_flops_per_s
from services.target.rows import TargetRows

_REPORT_S = 60.0
_SHARES = ("forward", "pack", "copy", "idle", "waiting_for_slot", "waiting_for_work")

log = logging.getLogger(__name__)


class Health:
    """Metrics of the batches; used by the publisher's thread, which sees each batch when the device has finished it."""

    def __init__(self, metrics: MetricsWriter, flops: ForwardFlops, devices: Sequence[torch.device]) -> None:
        self._metrics = metrics
        self._flops = flops
        peak = peak_flops_per_s(torch.cuda.get_device_name(devices[0])) if devices[0].type == "cuda" else None
        self._peak = peak and peak * len(devices)
        self._devices = devices
        self._watches: list[Stopwatch] = []
        self._copied_s = self._reported_s = time.monotonic()
        self._sums: dict[str, float] = defaultdict(float)

    def record(
        self,
        batch: int,
        rows: TargetRows,
        copied_s: float,
        host_laps_s: dict[str, float],
        watches: list[Stopwatch],
        device_laps_s: list[dict[str, float]],
    ) -> None:
        """Write the metrics of one batch.

        Args:
            batch: its number in the sequence.
            rows: its documents.
            copied_s: when its slot was full (CLOCK_MONOTONIC).
            host_laps_s: seconds of the host by name.
            watches: of the forward's stream on each device, whose ends were reached.
            device_laps_s: seconds of each device by name.
        """
        interval_s, self._copied_s = copied_s - self._copied_s, copied_s
        devices = self._describe(watches, device_laps_s)
        laps_s = host_laps_s | {name: _sum(devices, name) / len(devices) for name in ("idle_s", *device_laps_s[0])}
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
            **{name: _sum(devices, name) for name in _count_memory(self._devices[0])},
            **({"devices": devices} if len(devices) > 1 else {}),
            time_s=time.time(),
        )
        for name, value in (laps_s | {"num_tokens": num_tokens, "flops": flops, "interval_s": interval_s}).items():
            self._sums[name] += value
        if copied_s - self._reported_s >= _REPORT_S:
            self._report(devices)

    def _describe(self, watches: list[Stopwatch], device_laps_s: list[dict[str, float]]) -> list[dict[str, Any]]:
        """Return the figures of each device: its seconds, also those since the batch before, and its memory."""
        befores = self._watches or watches  # pauses before the first batch are negative, so 0
        idle_s = [max(0.0, watch.pause_s(before)) for watch, before in zip(watches, befores, strict=True)]
        parts = zip(self._devices, idle_s, device_laps_s, strict=True)
        self._watches = watches
        return [
            {"device": str(device), "idle_s": pause_s, **laps_s, **_count_memory(device)} for device, pause_s, laps_s in parts
        ]

    def _report(self, devices: list[dict[str, Any]]) -> None:
        sums, interval_s = self._sums, self._sums["interval_s"]
        shares = ", ".join(f"{name.replace('_', ' ')} {sums[f'{name}_s'] / interval_s:.1%}" for name in _SHARES)
        utilisation = f", {sums['flops'] / interval_s / self._peak:.1%} of peak" if self._peak else ""
        speed = f"{sums['num_tokens'] / interval_s:,.0f} tokens/s, {sums['flops'] / interval_s * 1e-12:.1f} TFLOP/s"
        log.info("%s%s; %s", speed, utilisation, shares)
        for each in devices if len(devices) > 1 else []:
            memory = f", {each['reserved_bytes'] / GIB:.1f} GiB reserved" if "reserved_bytes" in each else ""
            log.info(
                "%s: forward %.3f s, idle %.3f s of the last batch%s", each["device"], each["forward_s"], each["idle_s"], memory
            )
        self._sums.clear()
        self._reported_s = self._copied_s


def _sum(devices: list[dict[str, Any]], name: str) -> Any:
    return sum(each[name] for each in devices)


def _count_memory(device: torch.device) -> dict[str, int]:
    """Return the allocator's counters; both stay constant after the warm-up."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {"reserved_bytes": stats["reserved_bytes.all.current"], "num_device_allocs": stats["num_device_alloc"]}
