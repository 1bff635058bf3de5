"""Find settings of a drafter's folder that seem wrong beside its target, and cannot be decided by executing the drafter."""

from pathlib import Path

from transformers import AutoConfig

from common.config import Config
from common.errors import ModelError
from common.run_dir import read_object
from common.target_shape import default_tap_layers
from launch.parity.folder import DEFAULT_THETA, Folder
from launch.parity.probe import Document


def find_warnings(folder: Folder, config: Config, documents: list[Document]) -> list[str]:
    """Return one sentence per finding; `documents` are text of the target of `config`."""
    content, mask, ids, shape = folder.content, folder.settings["mask_token_id"], folder.settings["tap_layers"], config.shape
    warnings = list(folder.foreign)
    if mask in _special_ids(Path(config.model.path).expanduser()):
        warnings.append(f"mask_token_id {mask} is a beginning, end or padding token of the target, so text may contain it")
    elif any(bool((document.input_ids == mask).any()) for document in documents):
        warnings.append(f"mask_token_id {mask} stands in the text; a drafter learns it as an id that text never contains")
    rule = default_tap_layers(shape.num_hidden_layers, len(ids))
    shifts = {found - needed for found, needed in zip(ids, rule, strict=True)}
    if shifts in ({1}, {-1}):
        warnings.append(f"target_layer_ids {ids} are z-lab's rule for this target, {rule}, off by {shifts.pop():+d}")
    num_layers = content.get("num_target_layers")
    if num_layers not in (None, shape.num_hidden_layers):
        warnings.append(f"num_target_layers: needed {shape.num_hidden_layers}, as the target has, found {num_layers}")
    if not any("rope_theta" in (keys or {}) for keys in (content, content.get("rope_parameters"), content.get("rope_scaling"))):
        warnings.append(f"config.json names no rope_theta: engines take {DEFAULT_THETA:g}, the target has {shape.rope_theta:g}")
    names = content.get("architectures") or []
    if folder.settings["kind"] == "dflash2" and names and "DFlash2DraftModel" not in names:
        warnings.append(f"architectures {names}: engines know DFlash 2 as DFlash2DraftModel")
    brought = [name for name in ("embed_tokens.weight", "lm_head.weight") if name in folder.tensors]
    warnings += [f"{name} is in the folder: an engine that loads it does not use the target's" for name in brought]
    return warnings + _find_untrained(folder)


def _find_untrained(folder: Folder) -> list[str]:
    """Report tensors that are constant although those of their name in other layers are not."""
    constant = {name: bool((tensor == tensor.flatten()[0]).all()) for name, tensor in folder.tensors.items()}
    parts = {name: name.split(".", 2)[2] for name in constant if name.startswith("layers.")}
    lonely = [name for name in parts if constant[name] and not all(constant[n] for n in parts if parts[n] == parts[name])]
    return [
        f"{name} is {float(folder.tensors[name].flatten()[0]):g} everywhere, unlike that of other layers" for name in lonely
    ]


def _special_ids(target: Path) -> set[int]:
    """Return the ids that the target uses for beginning, end and padding, by config.json and generation_config.json."""
    text_config = AutoConfig.from_pretrained(target, local_files_only=True).get_text_config()
    found = [getattr(text_config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
    if (target / "generation_config.json").is_file():
        found.append(read_object(target / "generation_config.json", ModelError).get("eos_token_id"))
    return {token for entry in found for token in (entry if isinstance(entry, list) else [entry]) if token is not None}
