"""The numbers of a target's architecture that drafting depends on."""

import hashlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from common.errors import ModelError
from common.run_dir import read_object

_ROOT = Path(__file__).parent.parent
_EXIT_REFUSED = 2
_PROGRAM = """
import sys
sys.modules["torch"] = None  # transformers does without: a second instead of two and a half
from common.decoder_config import main
main()
"""


class TargetShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes in elements."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # 0 where there is none: every layer is made of experts
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    embedding_scale: float = 1.0  # of the embedding's rows before the first layer
    logit_scale: float = 1.0  # of what the head returns
    logit_softcap: float = 0.0  # c: scaled logits z become c * tanh(z / c); 0 where they stay as they are
    source: str = ""  # digest of what the shape was read from


def read_target_shape(folder: Path, earlier: TargetShape | None = None) -> TargetShape:
    """Return the shape of the target in `folder`, its configuration completed by transformers.

    `earlier` is returned where it was made of the same bytes. A process that has not loaded torch stays without it: a
    child process reads the configuration.

    Raises:
        ModelError: no such folder, no config.json, an architecture that cannot be drafted for, or a key is missing.
    """
    read_target_config(folder)
    source = _source(folder)
    if earlier is not None and earlier.source == source:
        return earlier
    if "torch" in sys.modules:
        from common.decoder_config import derive_shape  # which loads transformers

        shape = derive_shape(folder)
    else:
        shape = _ask_child(folder)
    return msgspec.structs.replace(shape, source=source)


def _source(folder: Path) -> str:
    """Return a digest of all that decides a shape: config.json, and the classes of transformers."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    digest.update(version("transformers").encode())
    return digest.hexdigest()


def _ask_child(folder: Path) -> TargetShape:
    line = [sys.executable, "-c", _PROGRAM, str(folder.absolute())]
    done = subprocess.run(line, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        answer = done.stdout if done.returncode == _EXIT_REFUSED else done.stderr
        raise ModelError((answer.strip().splitlines() or [f"{folder}: its configuration cannot be read"])[-1])
    return msgspec.json.decode(done.stdout, type=TargetShape)


def read_vocab_size(folder: Path) -> int:
    """Return only the number of token ids, without transformers where config.json states it; errors as `read_target_shape`."""
    stated = read_target_config(folder)[1].get("vocab_size")
    return stated if isinstance(stated, int) else read_target_shape(folder).vocab_size


def read_target_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read `folder`/config.json: the whole, and the part of the text decoder, which is the whole without a wrapper.

    Raises:
        ModelError: no such folder, no config.json, or no JSON object in it.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"model.path: needed a model folder with config.json, found none in {folder}")
    outer = read_object(path, ModelError)
    inner = outer.get("text_config") or outer
    if not isinstance(inner, dict):
        raise ModelError(f"{path}: text_config: needed an object, found {type(inner).__name__}")
    return outer, inner


def default_tap_layers(num_hidden_layers: int, num_taps: int) -> list[int]:
    """Return zero-based layers to tap, by the rule of z-lab/dflash: spread from layer 1 to layer L - 3."""
    if num_taps == 1:
        return [num_hidden_layers // 2]
    return [round(1 + i * (num_hidden_layers - 4) / (num_taps - 1)) for i in range(num_taps)]
