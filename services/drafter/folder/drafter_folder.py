"""A drafter on disk, in any of the layouts of `layouts.py`: its settings, whether it fits a run, its weights."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.config import Config
from common.draft_config import DraftConfig
from common.errors import CheckpointError, ModelError
from common.run_dir import read_object
from common.target_shape import default_tap_layers
from common.weights import locate_tensors, read_tensors
from services.drafter.folder.layouts import (
    RENAMED,
    TARGETS_TENSORS,
    Content,
    detect,
    find_foreign,
    read_settings,
    uncommon_causality,
)
from services.drafter.model.model import DraftModel

CONFIG = "config.json"
_OF_TARGET = (
    "rms_norm_eps",
    "rope_theta",
    "embedding_scale",
    "logit_scale",
    "logit_softcap",
)  # stated in a drafter's folder


@dataclass(frozen=True)
class Drafter:
    """A drafter folder as it was found."""

    folder: Path
    layout: str  # "dflash", "speculators" or "torchspec"
    settings: Content  # by the names of `DraftConfig` and `TargetShape`; a setting that it does not state is absent
    foreign: list[str]  # its settings that this draft model does not compute, one line each
    tensors: dict[str, str]  # our name of every tensor -> its own

    @cached_property
    def shapes(self) -> dict[str, list[int]]:
        """Read the shapes by tensor name, without the tensors; CheckpointError if a file is damaged."""
        try:
            files, shapes = locate_tensors(self.folder), {}
            for ours, theirs in self.tensors.items():
                with safe_open(files[theirs], framework="pt") as file:
                    shapes[ours] = list(file.get_slice(theirs).get_shape())
            return shapes
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.folder}: cannot be read: {error}") from error

    def misfits(self, config: Config) -> list[str]:
        """List the settings and tensors that do not fit the draft model and target of `config`, with needed and found."""
        needed = msgspec.structs.asdict(config.shape) | msgspec.structs.asdict(config.draft)
        needed["draft_vocab_size"] = config.shape.vocab_size  # a reduced vocabulary has another head
        needed["is_causal"] = uncommon_causality(config.draft.is_causal, config.draft.layer_types)
        if "sliding_attention" not in config.draft.layer_types:
            needed["sliding_window"] = 0
        found = {key: value for key, value in self.settings.items() if value != needed[key]}
        lines = [f"{key}: needed {_show(needed[key])}, found {_show(value)}" for key, value in found.items()]
        return [*self.foreign, *lines, *differing_shapes(tensor_shapes(config), self.shapes)]

    def on(self, config: Config) -> Config:
        """Return `config` with the draft model that this folder states, even if it does not fit the run."""
        draft = {key: value for key, value in self.settings.items() if key in DraftConfig.__struct_fields__}
        target = {key: value for key, value in self.settings.items() if key in _OF_TARGET}
        draft_config = msgspec.structs.replace(config.draft, **draft)
        return msgspec.structs.replace(config, draft=draft_config, target_shape=msgspec.structs.replace(config.shape, **target))

    def weights(self) -> dict[str, Tensor]:
        """Return every tensor under our name, in float32, on the CPU.

        Raises:
            CheckpointError: a file is damaged, or holds numbers that are not finite.
        """
        try:
            tensors = read_tensors(self.folder, self.tensors.values(), torch.device("cpu"), torch.float32)
        except ModelError as error:
            raise CheckpointError(str(error)) from error
        for name, tensor in tensors.items():
            if num_bad := int((~tensor.isfinite()).sum()):
                raise CheckpointError(f"{self.folder}: tensor {name}: needed finite numbers, found {num_bad} others")
        return {ours: tensors[theirs] for ours, theirs in self.tensors.items()}

    def build(self, config: Config) -> DraftModel:
        """Build the draft model that this folder states, in `config.draft.dtype`, on the CPU; `config` fills the gaps."""
        model = DraftModel(self.on(config))
        model.load_state_dict(self.weights())
        return model.eval()


def read_drafter(folder: Path) -> Drafter:
    """Read the settings and tensor names of a folder of any known layout; no tensor is read.

    Raises:
        CheckpointError: no config.json or no safetensors, or one that is damaged.
    """
    content = read_object(folder / CONFIG, CheckpointError)
    try:
        names = set(locate_tensors(folder))
    except ModelError as error:
        raise CheckpointError(str(error)) from error
    layout = detect(content, names)
    own = sorted(name for name in names if not name.endswith(TARGETS_TENSORS) and not name.endswith("inv_freq"))
    foreign = [f"{key}: needed {needed}, found {found}" for key, needed, found in find_foreign(content, layout)]
    renamed = RENAMED | layout.renamed
    tensors = {renamed.get(name, name): name for name in own}
    drafter = Drafter(folder, layout.name, read_settings(content, layout), foreign, tensors)
    return replace(drafter, settings=_with_taps(drafter))


def read_fitting_drafter(folder: Path, config: Config) -> Drafter:
    """Read a drafter that must be the draft model of `config`; CheckpointError names every difference."""
    return _need_fit(read_drafter(folder), config)


def read_initial_drafter(folder: Path, config: Config) -> Drafter:
    """Read a drafter to begin training from: that of `config`, or for a DFlash 2 the DFlash without its additions.

    Raises:
        CheckpointError: as `read_fitting_drafter`.
    """
    drafter = read_drafter(folder)
    if config.draft.kind == "dflash2" and drafter.settings["kind"] == "dflash":
        config = msgspec.structs.replace(config, draft=msgspec.structs.replace(config.draft, kind="dflash"))
    return _need_fit(drafter, config)


def load_drafter(folder: Path, config: Config) -> DraftModel:
    """Load the draft model of a folder, in `config.draft.dtype`, on the CPU; raises as `read_fitting_drafter` does."""
    return read_fitting_drafter(folder, config).build(config)


def tensor_shapes(config: Config) -> dict[str, list[int]]:
    """Return the shape of every tensor of a draft model: 3 and 11 per layer; of DFlash 2, 6 and 15 per layer."""
    model = DraftModel(config, torch.device("meta"))
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def differing_shapes(needed: dict[str, list[int]], found: dict[str, list[int]]) -> list[str]:
    """Return a line per tensor that is missing, superfluous or of another shape."""
    names = sorted(name for name in needed.keys() | found.keys() if needed.get(name) != found.get(name))
    return [f"tensor {name}: needed {needed.get(name)}, found {found.get(name)}" for name in names]


def _need_fit(drafter: Drafter, config: Config) -> Drafter:
    if misfits := drafter.misfits(config):
        raise CheckpointError(f"{drafter.folder} ({drafter.layout} layout) does not fit: {'; '.join(misfits)}")
    return drafter


def _show(value: Any) -> Any:
    """Return a setting as an error shows it; only is_causal may be None."""
    return "true in sliding layers only" if value is None else value


def _with_taps(drafter: Drafter) -> Content:
    """Add tap ids that a folder leaves out by z-lab's rule, which SpecForge and TorchSpec follow too."""
    settings, shape = drafter.settings, drafter.shapes.get("fc.weight")
    if "tap_layers" in settings or not shape or not {"num_hidden_layers", "hidden_size"} <= settings.keys():
        return settings
    return settings | {"tap_layers": default_tap_layers(settings["num_hidden_layers"], shape[-1] // settings["hidden_size"])}
