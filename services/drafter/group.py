"""The drafters as one group: the same weights on every rank, one all-reduce per step."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

_TIMEOUT_S = 600


def join_group(run_dir: Path, life: int, rank: int, world_size: int, device: torch.device) -> None:
    """Meet the other ranks in a file of the run directory; `life` numbers the attempts, so that none meets the dead.

    gloo on the CPU, nccl on GPUs; a group of one needs neither.
    """
    if world_size == 1:
        return
    meeting = run_dir / "rendezvous"
    meeting.mkdir(exist_ok=True)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=FileStore(str(meeting / f"group-{life}"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=_TIMEOUT_S),
        device_id=device if device.type == "cuda" else None,
    )


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The sum of `values` over all ranks, in place; every rank must call it."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(values)
    return values


def leave_group() -> None:
    """End the group where there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
