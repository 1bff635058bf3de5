"""Laps of the stopwatch on the CPU."""

import torch

from common.device.stopwatch import Stopwatch


def test_laps_follow_each_other() -> None:
    watch = Stopwatch(torch.device("cpu"))
    for name in ("first", "second"):
        watch.lap(name)
    laps = watch.laps_s()
    assert list(laps) == ["first", "second"]
    assert all(seconds >= 0 for seconds in laps.values())
