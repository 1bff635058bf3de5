"""A fused function is compiled in every version that calls ask for."""

import pytest
import torch
from torch import Tensor

from services.drafter.kernels.fused import fused


@fused
def plus_length(rows: Tensor, text: str) -> Tensor:
    """A version for every text."""
    return rows + len(text)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_no_version_runs_uncompiled() -> None:
    """Past torch's own limit of 8 the rest would: then numbers depend on which sizes came first."""
    torch.compiler.reset()
    rows = torch.zeros(4, 3, device="cuda")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for length in range(20):
            assert plus_length(rows, "a" * length).eq(length).all()
