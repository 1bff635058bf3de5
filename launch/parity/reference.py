"""Drafters that can be executed, and the comparison of two: anything with a trace can be a reference."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from common import config as configuration
from common.config import Config
from launch.decoding.full_target import load_full_target
from launch.export import find_checkpoint
from launch.parity.causes import likely_cause
from launch.parity.compare import compare_traces, first_difference
from launch.parity.folder import Folder
from launch.parity.plain import PlainTarget, run_plain
from launch.parity.probe import Document
from launch.parity.report import Accepted, Report, count_accepted
from launch.parity.stages import Executed, Trace
from launch.parity.training import run_training
from services.drafter.folder.checkpoint import draft_identity, load_weights
from services.drafter.folder.drafter_folder import tensor_shapes


class Reference(Protocol):
    """A drafter that can be executed: its name in words, weights under z-lab's names in float32, and zero-based tap layers."""

    @property
    def name(self) -> str: ...
    @property
    def tensors(self) -> Mapping[str, Tensor]: ...
    @property
    def tap_layers(self) -> list[int]: ...
    def trace(self, documents: list[Document]) -> Trace:
        """Execute the drafter on documents; ModelError where the target cannot be read."""


@dataclass(frozen=True)
class EngineDrafter:
    """A folder as an engine runs it, behind the target of `config`. The whole target is in memory during a trace only."""

    folder: Folder
    config: Config
    device: torch.device

    @property
    def name(self) -> str:
        return f"{self.folder.path} as an engine runs it"

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self.folder.tensors

    @property
    def tap_layers(self) -> list[int]:
        layers: list[int] = self.folder.settings["tap_layers"]
        return layers

    def trace(self, documents: list[Document]) -> Trace:
        return run_plain(self.folder, PlainTarget(load_full_target(self.config, self.device)), documents)


@dataclass(frozen=True)
class TrainedDrafter:
    """The draft model of `config` in training form."""

    name: str
    config: Config
    tensors: Mapping[str, Tensor]
    device: torch.device

    @property
    def tap_layers(self) -> list[int]:
        return self.config.draft.tap_layers

    def trace(self, documents: list[Document]) -> Trace:
        return run_training(self.config, self.tensors, documents, self.device)

    @classmethod
    def of_run(cls, run: Path, step: int | None, device: torch.device) -> "TrainedDrafter":
        """Read a checkpoint of a run, with the weights rounded to bfloat16 as an export holds them; None for the newest."""
        config = configuration.read(run)
        checkpoint, weights = load_weights(find_checkpoint(run, step, best=False), draft_identity(config))
        rounded = {name: weight.bfloat16().float() for name, weight in weights.items()}
        return cls(f"{run}, checkpoint of step {checkpoint.step}, in training form", config, rounded, device)

    @classmethod
    def of_folder(cls, folder: Folder, config: Config, device: torch.device) -> "TrainedDrafter":
        """Take the weights of a folder, and everything else as training for the target of `config` would have it."""
        tensors = {name: folder.tensors[name] for name in tensor_shapes(config)}
        return cls(f"{folder.path} in training form, for this target", config, tensors, device)


def compare(reference: Reference, subject: Reference, documents: list[Document], warnings: list[str]) -> Report:
    """Execute both on the documents and compare every stage.

    Raises:
        ModelError: the target cannot be read.
    """
    found = subject.trace(documents)
    needed = reference.trace(documents)
    verdicts = compare_traces(needed, found)
    first = first_difference(verdicts)
    executed = (Executed(trace, each.tensors, each.tap_layers) for trace, each in ((needed, reference), (found, subject)))
    return Report(
        same=first is None,
        needed=reference.name,
        found=subject.name,
        first_difference=first.stage if first else None,
        cause=likely_cause(first, *executed) if first else None,
        warnings=warnings,
        num_blocks=len(found["accepted tokens"]),
        accepted_per_block=Accepted(needed=count_accepted(needed, found), found=count_accepted(found, found)),
        stages=verdicts,
    )
