"""Everything that a run imports, for the fork server of tests/builders/warm_start.py to import once."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a fork has none of the threads of its parent

import pytest  # noqa: F401
import torch._dynamo
import transformers.models.llama.modeling_llama  # noqa: F401

import launch.start_all  # noqa: F401
import services.drafter.service
import services.target.service  # noqa: F401

torch.set_num_threads(1)
