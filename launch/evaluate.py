"""Measure a drafter: decode the same answers plainly and with drafts, by the whole target.

    python -m launch.evaluate RUN [--prompt TEXT | --prompts FILE ...] [--num-prompts N] [--out DIR]
    python -m launch.evaluate --model DIR --draft DIR --prompts gsm8k.jsonl --prompts mt-bench.jsonl --device cuda:0

Takes `<run>/export`, or the drafter of --draft, in any layout that services/drafter/folder/layouts.py knows. Prompts are a
typed message, files in the forms of launch/data/prompts.py (a row's `category`, else the name of the file), or held-out
samples of the run; then the acceptance on all of them is counted first, exactly as in training and without decoding. Of
DFlash 2 this includes the acceptance without the selector (unary) and with the best choice among its candidates (oracle),
and the share of true tokens among these (recall).
--out writes evaluation.json.
Exit code 0: the same tokens, or answers were sampled; 1: other tokens, ties included; 2: something is missing or unsupported.
"""

import argparse
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch
from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from common import config as configuration
from common.acceptance import Evaluation
from common.config import Config
from common.errors import DataError
from common.run_dir import EXPORT
from common.typed_toml import DType
from launch.arguments import make_parser, parse_device, run_command
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

_WIDTH, _ANSWER_WIDTH = 160, 56  # of tables, whatever the terminal; longer lines are wrapped by the terminal


def evaluate(config: Config, drafter: Path, cases: list[Case], left_out: Counter[str], options: argparse.Namespace) -> Report:
    """Decode every case both ways, print the first answers, and add everything up.

    `left_out` says why rows of prompt files are no cases; turns that cannot be decoded are counted with them.

    Raises:
        HeadraceError: the target or the drafter is missing or damaged, or nothing could be decoded.
    """
    pair, tokenizer = load_pair(config, drafter, options.device), find_tokenizer(config)
    ends = stop_tokens(pair.target) | ({tokenizer.eos_token_id} if tokenizer and tokenizer.eos_token_id is not None else set())
    comparison = Comparison(
        pair, Limits(options.max_new_tokens, ends, Sampling(options.temperature, options.top_p)), options.seed
    )
    if options.device.type == "cuda":
        comparison.warm_up()
    turns: list[Turn] = []
    with tqdm(total=len(cases), unit="prompt", disable=None) as progress:
        for turn in comparison.run(cases):
            if len(turns) < options.show:
                with tqdm.external_write_mode():
                    _print(describe(turn, tokenizer))
            turns.append(turn)
            progress.update(turn.number == 0)
    left_out += comparison.left_out
    if not turns:
        raise DataError(f"needed a prompt that can be decoded, found none: {'; '.join(left_out)}")
    return make_report(setup_of(config, drafter, pair, options), turns, dict(left_out))


def describe_held_out(found: Evaluation) -> list[str]:
    """Return the acceptance on all held-out rows of the run as text."""
    return [
        f"held-out acceptance length             {found.acceptance:.3f} in {found.num_rounds:,} rounds",
        f"  with another prompt's hidden states  {found.acceptance_other_prompt:.3f}",
        *describe_evaluation(found),
    ]


def setup_of(config: Config, drafter: Path, pair: Pair, options: argparse.Namespace) -> Setup:
    """Return the part of the report that says what was measured."""
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
    """Return the cases of the command line, and why other rows of the prompt files are none."""
    unusable: Counter[str] = Counter()
    folder, settings = Path(config.model.path).expanduser(), dict(options.template_set)
    if options.prompt is not None:
        return [typed_case(load_tokenizer(folder), options.prompt, settings)], unusable
    if not options.prompts:
        return held_out_cases(config, options.num_prompts or 1), unusable
    cases = file_cases(options.prompts, load_tokenizer(folder), unusable, settings)
    return first_of_each_category(cases, options.num_prompts or len(cases)), unusable


def find_tokenizer(config: Config) -> PreTrainedTokenizerBase | None:
    """Load the target's tokenizer; a made-up target has none."""
    folder = Path(config.model.path).expanduser()
    if not (folder / "tokenizer_config.json").is_file():
        return None
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer


def describe(turn: Turn, tokenizer: PreTrainedTokenizerBase | None) -> Table:
    """Return both answers in two columns, as text, or as token ids where there is no tokenizer."""

    def show(decoding: Decoding) -> Text:
        return Text(str(tokenizer.decode(decoding.tokens)) if tokenizer else " ".join(map(str, decoding.tokens)))

    number = f", turn {turn.number}" if turn.number else ""
    columns = (Column(name, width=_ANSWER_WIDTH, overflow="fold") for name in ("plain", "speculative"))
    title = Text(f"\n{turn.case.name}{number}, {len(turn.prompt)} tokens")
    table = Table(*columns, title=title, title_justify="left", box=box.MINIMAL, show_edge=False, pad_edge=False)
    table.add_row(show(turn.plain), show(turn.speculative))
    return table


def _print(table: Table) -> None:
    Console(width=_WIDTH, highlight=False).print(table)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser("evaluate", __doc__)
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
    add("--out", type=Path, metavar="DIR", help="write evaluation.json")
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
    """Return the configuration, and the drafter's folder."""
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
    held_out = None
    if options.prompt is None and not options.prompts:
        held_out = count_acceptance(config, load_drafter(drafter, config), options.device)
        print("\n".join(describe_held_out(held_out)))
    report = msgspec.structs.replace(evaluate(config, drafter, cases, unusable, options), held_out=held_out)
    print()
    _print(report.table())
    print("\n" + "\n".join(report.lines()))
    if options.out:
        report.write(options.out)
    return 0 if report.is_same else 1


def main(argv: list[str] | None = None) -> int:
    """Read the command line and evaluate."""
    return run_command(_evaluate, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
