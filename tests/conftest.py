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
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}  # for commands: threads that spin at a barrier starve others
faulthandler.enable()
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup starts what it runs with it ignored
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background with it ignored
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
else:
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # as the actors run: read at the first allocation
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.simplefilter("ignore")  # its own, as errors, would make transformers do without it
        import fla  # type: ignore[import-not-found]  # noqa: F401


WHOLE_RUN_FIXTURES = {"run", "long_run", "reference", "small_reference", "undisturbed", "undisturbed_three", "warm_trials"}
WHOLE_RUN_FILES = {"test_whole_run", "test_demo", "test_bootstrap", "test_real_model", "test_smollm2", "test_processes"}
LONGEST_FILES = ("test_real_model", "test_chaos", "test_faults", "test_whole_run")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Undo what a command that ran in this process set: the number of threads decides the last bits of a product."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device, mark those that start whole runs, put the longest files first."""
    items.sort(key=lambda item: LONGEST_FILES.index(item.path.stem) if item.path.stem in LONGEST_FILES else len(LONGEST_FILES))
    for item in items:
        if not torch.cuda.is_available() and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if WHOLE_RUN_FIXTURES & set(getattr(item, "fixturenames", ())) or item.path.stem in WHOLE_RUN_FILES:
            item.add_marker(pytest.mark.whole_run)
