"""The measurements of the transport, as far as a CPU can make them."""

import pytest
import torch

from launch.bench import transport

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the same rows are measured on the GPU")


@NO_GPU
def test_the_table_of_the_transport_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert transport.main(["--shape", "tiny", "--tokens", "64", "--slots", "2"]) == 0
    out = capsys.readouterr().out
    for row in ("allocate", "map and populate", "register", "to the device", "from the device", "both ways at once"):
        assert row in out
