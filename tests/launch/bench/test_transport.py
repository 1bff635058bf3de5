"""The measurements of the transport and of loading, as far as a CPU can make them."""

import re

import pytest
import torch

from launch.bench import loading, transport

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the same rows are measured on the GPU")


@NO_GPU
def test_the_table_of_the_transport_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert transport.main(["--shape", "tiny", "--tokens", "64", "--slots", "2", "--batches", "64"]) == 0
    out = capsys.readouterr().out
    for row in ("allocate", "map and populate", "register", "to the device", "from the device", "both ways at once", "SIGKILL"):
        assert row in out
    assert re.search(r"changed after it +0$", out, re.MULTILINE)
    assert re.search(r"hand-over, event fired to Grant, [1-9]\d* slots waited for +median 0*[.\d]*[1-9]\d* ms", out)


@NO_GPU
def test_the_table_of_loading_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert loading.main(["--shape", "tiny", "--layers", "3", "--processes", "1"]) == 0
    rows = re.findall(r"^(.*?)  +.* GiB/s; host memory", capsys.readouterr().out, re.MULTILINE)
    assert rows == [
        "random target, every layer that runs, made",
        "3 layers, read by process 1 of 1 at once",
    ]
