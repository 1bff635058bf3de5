"""Settings for every test: one thread per process, stacks on a crash, GPU tests only where there is a GPU.

Without one Triton's kernels run in its interpreter, which must be chosen before anything imports triton.
"""

import faulthandler
import os
import signal
import warnings
from contextlib import suppress

import pytest
import torch

torch.set_num_threads(1)
faulthandler.enable()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background with it ignored
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
else:
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # as the actors run: read at the first allocation
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.simplefilter("ignore")  # its own, as errors, would make transformers do without it
        import fla  # type: ignore[import-not-found]  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
