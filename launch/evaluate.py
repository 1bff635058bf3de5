"""Shows what a drafter is worth: the same answers decoded plainly and with drafts, by the whole target.

    python -m launch.evaluate RUN [--prompt TEXT | --prompts FILE ...] [--num-prompts N] [--out DIR]
    python -m launch.evaluate --model DIR --draft DIR --prompts gsm8k.jsonl --prompts mt-bench.jsonl --device cuda:0

Takes `<run>/export`, or the drafter of --draft, in any layout that services/drafter/folder/layouts.py knows. Prompts are a
typed message, files in the forms of launch/data/prompts.py (a row's `category`, else the name of the file), or held-out
samples of the run; then the acceptance on all of them is counted first, exactly as in training and without decoding.
--out writes evaluation.json and acceptance.png.
Exit code 0: the same tokens, or answers were sampled; 1: other tokens, ties included; 2: something is missing.
"""

import argparse
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from common import config as configuration
from common.config import Config, DType
from common.errors import DataError
from common.run_dir import EXPORT
from launch.acceptance_picture import draw_acceptance
from launch.arguments import parse_device, run_command
from launch.data.chat import load_tokenizer
from launch.decoding.answer import Decoding, Limits
from launch.decoding.cases import Case, file_cases, first_of_each_category, held_out_cases, typed_case
from launch.decoding.comparison import Comparison, Turn
from launch.decoding.full_target import stop_tokens
from launch.decoding.held_out import count_acceptance
from launch.decoding.pair import Pair, config_of_folders, load_pair, with_dtype
from launch.decoding.report import Report, Setup, make_report
from launch.decoding.sampling import Sampling
from launch.operate.report import describe_evaluation
from launch.prepare import parse_setting
from services.drafter.folder.drafter_folder import load_drafter

COLUMN_WIDTH = 56


def evaluate(config: Config, drafter: Path, cases: list[Case], left_out: Counter[str], options: argparse.Namespace) -> Report:
    """Decode every case both ways, print the first answers, and add everything up.

    Args:
        config: of the target and the draft model.
        drafter: the folder of the drafter.
        cases: what to decode.
        left_out: why rows of prompt files are no cases; what turns out to be impossible is counted with it.
        options: the command line.

    Raises:
        HeadraceError: the target or the drafter is missing or damaged, or nothing could be decoded.
    """
    pair, tokenizer = load_pair(config, drafter, options.device), find_tokenizer(config)
    ends = stop_tokens(pair.target) | ({tokenizer.eos_token_id} if tokenizer and tokenizer.eos_token_id is not None else set())
    limits = Limits(options.max_new_tokens, ends, Sampling(options.temperature, options.top_p))
    comparison = Comparison(pair, limits, options.seed)
    if options.device.type == "cuda":
        comparison.warm_up()
    turns: list[Turn] = []
    with tqdm(total=len(cases), unit="prompt", disable=None) as progress:
        for turn in comparison.run(cases):
            if len(turns) < options.show:
                tqdm.write(describe(turn, tokenizer))
            turns.append(turn)
            progress.update(turn.number == 0)
    left_out += comparison.left_out
    if not turns:
        raise DataError(f"needed a prompt that can be decoded, found none: {'; '.join(left_out)}")
    return make_report(setup_of(config, drafter, pair, options), turns, dict(left_out))


def describe_held_out(config: Config, drafter: Path, device: torch.device) -> list[str]:
    """Count the acceptance on all held-out rows of the run, without decoding; return it as text.

    Raises:
        HeadraceError: the target, the drafter or the data are missing or damaged, or nothing is held out.
    """
    found = count_acceptance(config, load_drafter(drafter, config), device)
    return [
        f"held-out acceptance length             {found.acceptance:.3f} in {found.num_rounds:,} rounds",
        f"  with another prompt's hidden states  {found.acceptance_other_prompt:.3f}",
        *describe_evaluation(found),
    ]


def setup_of(config: Config, drafter: Path, pair: Pair, options: argparse.Namespace) -> Setup:
    """What is measured, and how."""
    return Setup(
        target=Path(config.model.path).name,
        drafter=drafter.absolute().name,
        dtype=config.model.dtype,
        device=torch.cuda.get_device_name(options.device) if options.device.type == "cuda" else "cpu",
        releases={name: version(name) for name in ("torch", "transformers")},
        block_size=pair.config.block_size,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
    )


def choose_cases(config: Config, options: argparse.Namespace) -> tuple[list[Case], Counter[str]]:
    """What the command line asks for, and what is wrong with other rows of the prompt files."""
    unusable: Counter[str] = Counter()
    folder, settings = Path(config.model.path).expanduser(), dict(options.template_set)
    if options.prompt is not None:
        return [typed_case(load_tokenizer(folder), options.prompt, settings)], unusable
    if not options.prompts:
        return held_out_cases(config, options.num_prompts or 1), unusable
    cases = file_cases(options.prompts, load_tokenizer(folder), unusable, settings)
    return first_of_each_category(cases, options.num_prompts or len(cases)), unusable


def find_tokenizer(config: Config) -> PreTrainedTokenizerBase | None:
    """The target's tokenizer; None for a made-up target, which has none."""
    folder = Path(config.model.path).expanduser()
    if not (folder / "tokenizer_config.json").is_file():
        return None
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer


def describe(turn: Turn, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return a heading and both answers side by side."""
    columns = side_by_side(show(turn.plain, tokenizer), show(turn.speculative, tokenizer))
    which = f", turn {turn.number}" if turn.number else ""
    return f"\n{turn.case.name}{which}, {len(turn.prompt)} tokens\n{columns}\n"


def show(decoding: Decoding, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """The text of an answer, or its token ids where there is no tokenizer."""
    if tokenizer is None:
        return " ".join(map(str, decoding.tokens))
    return str(tokenizer.decode(decoding.tokens))


def side_by_side(left: str, right: str) -> str:
    """Two columns under their headings, long lines wrapped."""
    rows = zip_longest(_column("plain", left), _column("speculative", right), fillvalue="")
    return "\n".join(f"{a:{COLUMN_WIDTH}} | {b}".rstrip() for a, b in rows)


def _column(heading: str, text: str) -> Iterator[str]:
    yield from (heading, "-" * COLUMN_WIDTH)
    for line in text.expandtabs().splitlines():
        yield from textwrap.wrap(line, COLUMN_WIDTH, replace_whitespace=False) or [""]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("run", type=Path, nargs="?", metavar="RUN", help="run directory")
    add("--model", type=Path, metavar="DIR", help="a target instead of a run's; with --draft")
    add("--draft", type=Path, metavar="DIR", help="a drafter folder (default: the run's export)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="a message of a user")
    source.add_argument("--prompts", action="append", default=[], metavar="FILE", help="of conversations; may be repeated")
    add("--num-prompts", type=int, metavar="N", help="of each category (default: all of a file, 1 held-out sample)")
    add("--template-set", type=parse_setting, action="append", default=[], metavar="KEY=VALUE", help="of the chat template")
    add("--max-new-tokens", type=int, default=48, metavar="N", help="of an answer (default: %(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: %(default)s)")
    add("--top-p", type=float, default=1.0, metavar="P", help="of sampling (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of sampling (default: %(default)s)")
    add("--device", type=parse_device, default=torch.device("cpu"), help="cpu or cuda:N (default: cpu)")
    add("--dtype", choices=["float32", "bfloat16"], help="of both models (default: the run's, or float32 on a CPU)")
    add("--threads", type=int, default=2, metavar="N", help="of the CPU (default: %(default)s)")
    add("--show", type=int, default=3, metavar="N", help="answers to print (default: %(default)s)")
    add("--out", type=Path, metavar="DIR", help="write evaluation.json and acceptance.png")
    arguments = parser.parse_args(argv)
    _check(parser, arguments)
    return arguments


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    for name in ("num_prompts", "max_new_tokens", "threads"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')}: needed at least 1, found {value}")
    if (arguments.run is None) == (arguments.model is None) or (arguments.model is not None and arguments.draft is None):
        parser.error("needed either RUN, or --model and --draft")
    if arguments.model is not None and arguments.prompt is None and not arguments.prompts:
        parser.error("--model: needed --prompt or --prompts, for only a run has held-out samples")
    if not 0 <= arguments.temperature < float("inf"):
        parser.error(f"--temperature: needed 0 or more, found {arguments.temperature}")
    if not 0 < arguments.top_p <= 1:
        parser.error(f"--top-p: needed more than 0 and at most 1, found {arguments.top_p}")


def _configure(options: argparse.Namespace) -> tuple[Config, Path]:
    """The configuration, and where the drafter is."""
    if options.run is None:
        dtype: DType = options.dtype or ("float32" if options.device.type == "cpu" else "bfloat16")
        return config_of_folders(options.model.expanduser(), options.draft.expanduser(), dtype), options.draft.expanduser()
    config = configuration.read(options.run)
    drafter = options.draft.expanduser() if options.draft else options.run / EXPORT
    return with_dtype(config, options.dtype) if options.dtype else config, drafter


def _evaluate(options: argparse.Namespace) -> int:
    torch.set_num_threads(options.threads)
    config, drafter = _configure(options)
    cases, unusable = choose_cases(config, options)
    if options.prompt is None and not options.prompts:
        print("\n".join(describe_held_out(config, drafter, options.device)))
    report = evaluate(config, drafter, cases, unusable, options)
    print("\n".join(report.lines()))
    if options.out:
        report.write(options.out)
        draw_acceptance(report, options.out / "acceptance.png")
    return 0 if report.is_same else 1


def main(argv: list[str] | None = None) -> int:
    """Read the command line and evaluate."""
    return run_command(_evaluate, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
