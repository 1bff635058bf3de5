"""Shows what a drafter is worth: the same answer decoded plainly and with drafts, by the whole target.

    python -m launch.evaluate RUN [--prompt TEXT | --num-prompts N] [--max-new-tokens 48] [--threads 2]

Takes `<run>/export`. Without --prompt the prompts are those of the first samples of the evaluation data set.
Exit code 0: the same tokens; 1: other tokens; 2: something is missing.
"""

import argparse
import sys
import textwrap
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from common import config as configuration
from common.config import Config
from common.dataset import Dataset
from common.errors import DataError, HeadraceError
from launch.chat import load_tokenizer, render
from launch.decoding.speculate import Decoding, Limits, decode, speculate
from launch.full_target import load_full_target, stop_tokens
from services.drafter.drafter_folder import load_drafter

COLUMN_WIDTH = 56
Prompt = tuple[str, list[int]]  # where it comes from, and its tokens


def evaluate(config: Config, export: Path, prompts: list[Prompt], max_new_tokens: int, device: torch.device) -> bool:
    """Decode every prompt both ways and print the outcome; True when the tokens are the same everywhere.

    Raises:
        HeadraceError: the target or the export is missing or damaged.
    """
    draft, target = load_drafter(export, config).to(device), load_full_target(config, device)
    tokenizer, limits = find_tokenizer(config), Limits(max_new_tokens, stop_tokens(target))
    pairs = []
    for name, prompt in prompts:
        plain = decode(target, [prompt], limits).decodings[0]
        fast = speculate(target, draft, config.draft, [prompt], limits).decodings[0]
        print(f"\n{name}, {len(prompt)} tokens\n{side_by_side(show(plain, tokenizer), show(fast, tokenizer))}\n")
        pairs.append((plain, fast))
    print("\n".join(summary(pairs, config)))
    return all(plain.tokens == fast.tokens for plain, fast in pairs)


def held_out_prompts(config: Config, num_prompts: int) -> list[Prompt]:
    """What stands before the first supervised token of the first evaluation samples; at least one token.

    Raises:
        DataError: the run has no evaluation data set, or it is unreadable.
    """
    if not config.data.eval_path:
        raise DataError("data.eval_path: needed an evaluation data set, found none; give --prompt")
    dataset = Dataset.open(Path(config.data.eval_path).expanduser())
    samples = [(number, dataset.read(number)) for number in range(min(num_prompts, dataset.num_samples))]
    return [
        (f"held-out sample {number}", sample.input_ids[: max(int(sample.loss_mask.argmax()), 1)].tolist())
        for number, sample in samples
    ]


def typed_prompt(config: Config, text: str) -> Prompt:
    """A user's message through the target's chat template."""
    tokenizer = load_tokenizer(Path(config.model.path).expanduser())
    return f'prompt "{text}"', render(tokenizer, [{"role": "user", "content": text}], generation_prompt=True)


def find_tokenizer(config: Config) -> PreTrainedTokenizerBase | None:
    """The target's tokenizer; None for a made-up target, which has none."""
    folder = Path(config.model.path).expanduser()
    if not (folder / "tokenizer_config.json").is_file():
        return None
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer


def show(decoding: Decoding, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """The text of an answer, or its token ids where there is no tokenizer."""
    if tokenizer is None:
        return " ".join(map(str, decoding.tokens))
    return str(tokenizer.decode(decoding.tokens))


def side_by_side(left: str, right: str) -> str:
    """Two columns under their headings, long lines wrapped."""
    rows = zip_longest(_column("plain greedy", left), _column("speculative", right), fillvalue="")
    return "\n".join(f"{a:{COLUMN_WIDTH}} | {b}".rstrip() for a, b in rows)


def _column(heading: str, text: str) -> Iterator[str]:
    yield from (heading, "-" * COLUMN_WIDTH)
    for line in text.expandtabs().splitlines():
        yield from textwrap.wrap(line, COLUMN_WIDTH, replace_whitespace=False) or [""]


def summary(pairs: list[tuple[Decoding, Decoding]], config: Config) -> list[str]:
    """Totals over the prompts, plain and speculative."""
    plain_passes, fast_passes = (sum(each.num_target_passes for each in way) for way in zip(*pairs, strict=True))
    num_rounds = sum(len(fast.accepted) for _, fast in pairs)
    emitted = sum(accepted + 1 for _, fast in pairs for accepted in fast.accepted)
    lines = [
        f"target passes      plain {plain_passes}, speculative {fast_passes}",
        f"acceptance length  {emitted / max(num_rounds, 1):.2f} tokens per verification round, {num_rounds} rounds",
    ]
    differing = [(index, plain.tokens, fast.tokens) for index, (plain, fast) in enumerate(pairs) if plain.tokens != fast.tokens]
    for index, plain_tokens, fast_tokens in differing:
        place = next(i for i, (a, b) in enumerate(zip_longest(plain_tokens, fast_tokens)) if a != b)
        lines.append(f"prompt {index}: the answers differ from token {place} on")
    if differing and config.model.dtype != "float32":
        lines.append(f"in {config.model.dtype} a near tie may fall otherwise when several rows share one pass")
    return [*lines, f"same tokens        {'no' if differing else 'yes'}"]


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"needed cpu or cuda:N, found {text}") from error


def main() -> int:
    """Read the command line and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="a message of a user")
    source.add_argument("--num-prompts", type=int, default=1, metavar="N", help="held-out prompts (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N", help="default: %(default)s")
    parser.add_argument("--device", type=_device, default="cpu", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of the CPU (default: %(default)s)")
    arguments = parser.parse_args()
    for name in ("num_prompts", "max_new_tokens", "threads"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: needed at least 1, found {getattr(arguments, name)}")
    torch.set_num_threads(arguments.threads)
    try:
        config = configuration.read(arguments.run)
        typed = arguments.prompt is not None
        prompts = [typed_prompt(config, arguments.prompt)] if typed else held_out_prompts(config, arguments.num_prompts)
        same = evaluate(config, arguments.run / "export", prompts, arguments.max_new_tokens, arguments.device)
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
