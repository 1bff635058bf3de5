"""Whether the data sets of a run can train its target: found out before a process starts."""

from pathlib import Path

from common.config import Config
from common.data.dataset import Dataset
from common.errors import DataError
from launch.data.vocabulary import fingerprint_vocabulary


def check_data(config: Config) -> None:
    """Open every data set and compare it with the target.

    Raises:
        DataError: a data set is missing or damaged, has no supervised token, or holds ids of another tokenizer.
    """
    data = config.data
    held_out = data.eval_paths or ({"": data.eval_path} if data.eval_path else {})
    names = {name: f"data.eval_paths.{name}" if name else "data.eval_path" for name in held_out}
    for key, path in [("data.path", data.path), *((names[name], path) for name, path in held_out.items())]:
        dataset = Dataset.open(Path(path))
        _check_vocabulary(key, dataset, Path(config.model.path))
        _check_tokens(key, dataset, config.shape.vocab_size)


def _check_vocabulary(key: str, dataset: Dataset, model: Path) -> None:
    """Compare what launch.prepare noted with the tokenizer of the target, where both are known."""
    source = dataset.manifest.source
    found, needed = source.get("vocabulary"), fingerprint_vocabulary(model)
    if found and needed and found != needed:
        raise DataError(f"{key}: needed samples of the tokenizer of {model}, found those of {source.get('model')}")


def _check_tokens(key: str, dataset: Dataset, vocab_size: int) -> None:
    found = dataset.find_id_outside(vocab_size)
    if found is not None:
        sample, token = found
        needed = f"ids below {vocab_size}" if token >= 0 else "ids from 0"
        raise DataError(f"{key}: needed {needed}, found {token} in sample {sample}")
    if not dataset.has_supervised_token():
        raise DataError(f"{key}: needed a supervised token, found none")
