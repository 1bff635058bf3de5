"""A drafter in transformers' own model of the DFlash family, `muse_glimmer_assistant`: other names, same mathematics.

`fc` and `hidden_norm` are `encoder.fc` and `encoder.output_norm_enc` there; all other names agree. Two things differ, and are
handed to it instead of left to it. Its sliding layers look both ways inside a block, and the key W rows away is still seen
(`|q - k| <= W`), where DFlash drafters are causal and see W rows in all: it gets the masks of the folder. It always turns the
whole head, so `partial_rotary_factor` cannot be checked against it.

a rows of context before a block, B block size, K taps, H hidden.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from launch.parity.folder import Folder
from launch.parity.plain import PlainTarget, visible
from launch.parity.probe import Document
from launch.parity.stages import FAR_POSITIONS, OLDER_KEYS, Reading, Trace, angle_readings, block_name, collect

_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
_FROZEN = ("embed_tokens.weight", "lm_head.weight")
_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


@torch.inference_mode()
def run_glimmer(folder: Folder, target: PlainTarget, documents: list[Document]) -> Trace:
    """The stages that this model computes; tokens, taps and masks are given to it, keys and values stay inside."""
    return collect(_read(folder, target, documents))


def _read(folder: Folder, target: PlainTarget, documents: list[Document]) -> Iterator[tuple[str, Reading]]:
    model = _load(folder)
    for number, document in enumerate(documents):
        where, taps = f"document {number}", target.taps(document, folder.settings["tap_layers"]).flatten(1)
        yield "projection", Reading(where, model.encoder(taps))
        yield from _angle_readings(model, torch.arange(len(taps)), where)
        for anchor in document.anchors:
            block = [int(document.input_ids[anchor])] + [folder.settings["mask_token_id"]] * (folder.settings["block_size"] - 1)
            embeddings = target.embeddings(torch.tensor(block))
            block_where = block_name(number, anchor)
            readings = _read_block(model, folder, taps[:anchor], embeddings, block_where)
            yield from readings
            logits = target.logits(readings[-1][1].values[1:])
            yield "logits", Reading(block_where, logits)
            yield "accepted tokens", Reading(block_where, logits.argmax(1)[None])
    yield from _angle_readings(model, FAR_POSITIONS, "far positions")
    yield from _angle_readings(model, FAR_POSITIONS, f"far positions {OLDER_KEYS}")


def _read_block(model: Any, folder: Folder, taps: Tensor, embeddings: Tensor, where: str) -> list[tuple[str, Reading]]:
    """Run one forward, its inner results taken by hooks, the final norm last: taps [a, K * H], embeddings [B, H]."""
    anchor, size = len(taps), len(embeddings)
    readings: list[tuple[str, Reading]] = []

    def keep(part: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, inputs, output: readings.append(("hidden states", Reading(f"{part}, {where}", output[0])))

    hooks = [layer.register_forward_hook(keep(f"layer {index}")) for index, layer in enumerate(model.layers)]
    hooks.append(model.norm.register_forward_hook(keep("final norm")))
    positions = torch.arange(anchor + size)
    cosine, sine = model.rotary_emb(embeddings, positions[None, anchor:])
    readings.extend(angle_readings((cosine[0], sine[0]), positions[anchor:], where))
    kinds = zip(model.config.layer_types, folder.kinds, strict=True)
    model(
        noise_embeds=embeddings[None],
        context_hidden_states=taps[None],
        attention_mask={name: visible(kind, anchor, size)[None, None] for name, kind in kinds},
        position_ids=positions[None],
    )
    for hook in hooks:
        hook.remove()
    return readings


def _angle_readings(model: Any, positions: Tensor, where: str) -> Iterator[tuple[str, Reading]]:
    cosine, sine = model.rotary_emb(torch.zeros(1), positions[None])
    yield from angle_readings((cosine[0], sine[0]), positions, where)


def _load(folder: Folder) -> Any:
    content, settings = folder.content, folder.settings
    parameters = content.get("rope_scaling") or content.get("rope_parameters") or {}
    config: Any = MuseGlimmerAssistantConfig(
        **{name: content[name] for name in _SHAPE if name in content},
        num_key_value_heads=settings["num_key_value_heads"],
        head_dim=settings["head_dim"],
        rms_norm_eps=settings["rms_norm_eps"],
        hidden_act=folder.activation,
        rope_parameters={"rope_type": "default", "rope_theta": content.get("rope_theta"), **parameters},
        layer_types=content.get("layer_types") or ["full_attention"] * len(folder.kinds),
        sliding_window=content.get("sliding_window") or 1,
        block_size=settings["block_size"],
        mask_token_id=settings["mask_token_id"],
        target_layer_ids=settings["tap_layers"],
    )
    config._attn_implementation = "sdpa"
    model: Any = MuseGlimmerAssistantModel(config)
    weights = {_NAMES.get(name, name): tensor for name, tensor in folder.tensors.items() if name not in _FROZEN}
    model.load_state_dict(weights)
    return model.eval()
