"""What looks wrong in a drafter's folder beside its target, and cannot be decided by running the two."""

from collections.abc import Collection

from common.target_shape import TargetShape, default_tap_layers
from launch.parity.folder import DEFAULT_THETA, Folder
from launch.parity.probe import Document


def _untrained(folder: Folder) -> list[str]:
    """Tensors that are constant although those of their name in other layers are not."""
    constant = {name: bool((tensor == tensor.flatten()[0]).all()) for name, tensor in folder.tensors.items()}
    names = {name: name.partition(".")[2].partition(".")[2] for name in constant if name.startswith("layers.")}
    lonely = [name for name in names if constant[name] and not all(constant[n] for n in names if names[n] == names[name])]
    return [
        f"{name} is {float(folder.tensors[name].flatten()[0]):g} everywhere, unlike that of other layers" for name in lonely
    ]


def find_doubts(folder: Folder, shape: TargetShape, special_ids: Collection[int], documents: list[Document]) -> list[str]:
    """One sentence each.

    Args:
        folder: the drafter.
        shape: of the target.
        special_ids: ids that the target uses for its own purposes: beginning, end, padding.
        documents: text of the target.
    """
    content, mask, ids = folder.content, folder.mask_token_id, folder.target_layer_ids
    doubts = list(folder.foreign)
    if mask in special_ids:
        doubts.append(f"mask_token_id {mask} is a beginning, end or padding token of the target, so text may contain it")
    elif any(bool((document.input_ids == mask).any()) for document in documents):
        doubts.append(f"mask_token_id {mask} stands in the text; a drafter learns it as an id that text never contains")
    rule = default_tap_layers(shape.num_hidden_layers, len(ids))
    shifts = {found - needed for found, needed in zip(ids, rule, strict=True)}
    if shifts in ({1}, {-1}):
        doubts.append(f"target_layer_ids {ids} are z-lab's rule for this target, {rule}, off by {shifts.pop():+d}")
    named = content.get("num_target_layers")
    if named not in (None, shape.num_hidden_layers):
        doubts.append(f"num_target_layers: needed {shape.num_hidden_layers}, as the target has, found {named}")
    if all(
        "rope_theta" not in (place or {}) for place in (content, content.get("rope_parameters"), content.get("rope_scaling"))
    ):
        doubts.append(f"config.json names no rope_theta: engines take {DEFAULT_THETA:g}, the target has {shape.rope_theta:g}")
    doubts += _untrained(folder)
    doubts += [
        f"{name} is in the folder: an engine that loads it does not use the target's"
        for name in ("embed_tokens.weight", "lm_head.weight")
        if name in folder.tensors
    ]
    return doubts
