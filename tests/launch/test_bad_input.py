"""Mistakes of a person: one line that says what, where, needed and found, the right exit code, nothing left behind."""

import fcntl
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.builders.launched_runs import CONFIG, LaunchedRun

SYNTHETIC = re.compile(r"\[data\.synthetic\].*?\n\n", re.DOTALL)


def refuse(run: LaunchedRun, code: int, *parts: str) -> None:
    """End the run and check how it said no."""
    assert run.end() == code, run.stderr
    assert run.stderr.startswith("error: ")
    assert run.stderr.count("\n") == 1
    for part in parts:
        assert part in run.stderr
    assert run.pids() == []


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("model.path=/nowhere", ["/nowhere"]),
        ("model.random_init=false", ["model.path: needed *.safetensors in", "tiny_target, found none"]),
        ("ring.slots=3", ["ring.slots: needed a key among num_slots"]),
        ("ring.num_slots=many", ["ring.num_slots: needed an integer, at least 1, found many"]),
        ("ring.num_slots=0", ["ring.num_slots: needed at least 1, found 0"]),
        ("plan.max_tokens_per_batch=63", ["plan.max_tokens_per_batch: needed room for the longest bucket 64, found 63"]),
        ("ring.num_slots=100000000", ["ring.num_slots", "GiB of shared memory, found"]),
        ("plan.batches_per_step=0", ["plan.batches_per_step: needed at least 1, found 0"]),
        ("seed", ["--set seed: needed key=value"]),
        ('targets.devices=["cpu+cuda:0"]', ["targets.devices: needed cpu or cuda:N, or several of one kind joined by +"]),
        (
            'targets.devices=["cpu", "cuda:1+cuda:1"]',
            ["targets.devices: needed each GPU once in an entry, found cuda:1+"],
        ),
        (
            'targets.devices=["cpu+cpu+cpu+cpu"]',
            ["needed at most 3 devices for the 3 layers up to the last tap, found"],
        ),
        ('targets.devices=["cpu+tpu:0"]', ["targets.devices: needed cpu or cuda:N", "found cpu+tpu:0"]),
        ('targets.devices=["cpu+"]', ["targets.devices: needed cpu or cuda:N", "found cpu+"]),
        (
            ["ring.num_slots=3", 'targets.devices=["cpu+cpu+cpu"]'],
            ["ring.num_slots: needed at least 4 for a target of 3 devices"],
        ),
        (["targets.compile=true", 'targets.devices=["cpu+cpu"]'], ["targets.compile: needed false for targets on a CPU"]),
        ('targets.devices=["cuda:0+cuda:99"]', ["error: targets.devices: needed cuda:99, found ", " GPUs\n"]),
        ('drafters.devices=["cpu+cpu"]', ["drafters.devices: needed cpu or cuda:N, found cpu+cpu"]),
        ('targets.devices=["cuda:99"]', ["error: targets.devices: needed cuda:99, found ", " GPUs\n"]),
        ('drafters.devices=["cpu", "cuda:99"]', ["error: drafters.devices: needed cuda:99, found ", " GPUs\n"]),
    ],
)
def test_wrong_setting_is_refused_before_anything_is_made(
    run: LaunchedRun, override: str | list[str], parts: list[str]
) -> None:
    refuse(run.start(*([override] if isinstance(override, str) else override)), 2, *parts)
    assert not run.directory.exists()


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "in a form known here, found quantization_config hqq",
        ),
        (
            {"model_type": "gemma3_text"},
            "draft.kind: needed dflash2 for a target with an embedding scale: engines",
        ),
        ({"eos_token_id": 63}, "draft.mask_token_id: needed an id that text never contains, found 63, the eos_token_id"),
    ],
)
def test_target_that_cannot_be_trained_for(run: LaunchedRun, tmp_path: Path, keys: dict[str, object], found: str) -> None:
    content = json.loads((CONFIG.parent / "tiny_target" / "config.json").read_text())
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(content | keys))
    refuse(run.start(f"model.path={tmp_path / 'target'}", "model.random_init=false"), 2, found)
    assert not run.directory.exists()


def test_missing_configuration_file(run: LaunchedRun) -> None:
    refuse(run.start(config=Path("nowhere.toml")), 2, "nowhere.toml: cannot be read: No such file or directory")
    assert not run.directory.exists()


@pytest.mark.parametrize("key", ["path", "eval_path"])
def test_missing_data_set(small_reference: LaunchedRun, run: LaunchedRun, tmp_path: Path, key: str) -> None:
    paths = {"path": small_reference.directory / "data" / "train", key: Path("nowhere")}
    refuse(run.start(config=_with_data(tmp_path, paths)), 2, "nowhere: needed a prepared data set, found no such folder")
    assert not run.directory.exists()


def test_data_set_without_samples(small_reference: LaunchedRun, run: LaunchedRun, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    manifest = (small_reference.directory / "data" / "train" / "manifest.json").read_text()
    manifest = re.sub(r'"num_samples": 32,\n  "num_tokens"', '"num_samples": 0,\n  "num_tokens"', manifest)
    (empty / "manifest.json").write_text(re.sub(r'"files": \[.*?\]', '"files": []', manifest, flags=re.DOTALL))
    refuse(run.start(config=_with_data(tmp_path, {"path": empty})), 2, f"{empty}: needed at least one sample, found none")
    assert not run.directory.exists()


def test_made_up_data_that_cannot_be_made(run: LaunchedRun) -> None:
    refuse(
        run.start("data.synthetic.max_length=11"),
        2,
        "data.synthetic.min_length: needed at most data.synthetic.max_length 11, found 12",
    )
    assert [path.name for path in run.directory.iterdir()] == ["lock"]  # known only when the data are made


def test_sample_longer_than_the_last_bucket(run: LaunchedRun) -> None:
    refuse(run.start("plan.bucket_lengths=[16, 32]"), 2, "error: data.path: needed samples of at most 32 tokens")


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("plan.epochs=17", "of another batch plan: plan hash: needed"),
        ("draft.block_size=3", "of another draft model: block_size: needed 3, found 4"),
    ],
)
def test_checkpoint_of_another_run(small_reference: LaunchedRun, run: LaunchedRun, override: str, found: str) -> None:
    for folder in ("data", "checkpoints"):
        shutil.copytree(small_reference.directory / folder, run.directory / folder)
    before = sorted(path.read_bytes() for path in run.directory.glob("checkpoints/*/*"))
    refuse(run.start(override), 2, "error: drafter-0: ", str(run.directory / "checkpoints"), found)
    assert sorted(path.read_bytes() for path in run.directory.glob("checkpoints/*/*")) == before


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("plan.epochs=17", "plan.epochs: needed {epochs}, as the checkpoints in {directory} have it, found 17"),
        ("draft.block_size=3", "draft.block_size: needed 4, as"),
        ("draft.mask_token_id=5", "draft.mask_token_id: needed 63, as"),
        ("draft.tap_layers=[0, 2]", "draft.tap_layers: needed [1, 2], as"),
        ("seed=9", "seed: needed 0, as"),
    ],
)
def test_going_on_under_other_settings(small_reference: LaunchedRun, run: LaunchedRun, override: str, found: str) -> None:
    for folder in ("data", "checkpoints"):
        shutil.copytree(small_reference.directory / folder, run.directory / folder)
    text = (small_reference.directory / "config.json").read_text()
    (run.directory / "config.json").write_text(text.replace(str(small_reference.directory), str(run.directory)))
    epochs = json.loads(text)["plan"]["epochs"]
    refuse(run.start(override), 2, "error: " + found.format(epochs=epochs, directory=run.directory))
    assert not (run.directory / "logs").exists()


def _copy(reference: LaunchedRun, run: LaunchedRun) -> list[Path]:
    """The data and the checkpoints of a run that is done, in another directory."""
    for folder in ("data", "checkpoints"):
        shutil.copytree(reference.directory / folder, run.directory / folder)
    return sorted((run.directory / "checkpoints").iterdir())


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_gives_way_to_the_newest_that_is_whole(small_reference: LaunchedRun, run: LaunchedRun) -> None:
    folders = _copy(small_reference, run)
    _flip_a_bit(folders[-1] / "model.pt")
    assert run.start().end() == 0, run.log_tails()
    assert run.weights() == small_reference.weights()
    assert f"{folders[-1] / 'model.pt'}: needed SHA-256" in run.log("drafter-0")
    assert folders[-1].with_name(f"{folders[-1].name}.damaged").is_dir()


def test_without_a_whole_checkpoint_a_run_does_not_begin_anew(small_reference: LaunchedRun, run: LaunchedRun) -> None:
    folders = _copy(small_reference, run)
    for folder in folders:
        _flip_a_bit(folder / "model.pt")
    needed = f"needed an intact checkpoint, found none among {len(folders)}: {folders[-1] / 'model.pt'}: needed SHA-256"
    refuse(run.start(), 2, f"error: drafter-0: {needed}")
    assert run.num_incarnations("drafter-0") == 1


def test_run_directory_in_use(run: LaunchedRun) -> None:
    run.directory.mkdir()
    with (run.directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refuse(run.start(), 3, f"--run-dir: needed a directory of no other run, found {run.directory} locked")
    assert [path.name for path in run.directory.iterdir()] == ["lock"]


def test_run_directory_with_a_path_too_long_for_a_socket(run: LaunchedRun) -> None:
    run.directory = run.directory / ("x" * 100)
    refuse(run.start(), 2, "--run-dir: needed a path of at most 107 bytes with exchange.sock, found", "x" * 100)
    assert not run.directory.parent.exists()


def test_run_directory_that_is_a_file(run: LaunchedRun) -> None:
    run.directory.write_text("mine")
    refuse(run.start(), 2, f"--run-dir: needed a directory to write to, found the file {run.directory}")
    assert run.directory.read_text() == "mine"


IN_THE_WAY = {
    "a folder": ["data", "logs", "metrics", "checkpoints", "export"],
    "a file": ["lock", "report.json", "config.json", "faults.json", "logs/target-0.log", "metrics/drafter-0.jsonl"],
    "a socket": ["control.sock", "exchange.sock"],
}


@pytest.mark.parametrize(("needed", "name"), [(needed, name) for needed, names in IN_THE_WAY.items() for name in names])
def test_what_stands_in_the_way_of_a_run_is_named_and_stays(run: LaunchedRun, needed: str, name: str) -> None:
    path = run.directory / name
    path.parent.mkdir(parents=True)
    if needed == "a file":
        path.mkdir()
        path = path / "mine"
    path.write_text("mine")
    found = "a folder" if needed == "a file" else "a file"
    before = sorted(run.directory.rglob("*"))
    refuse(run.start(), 2, f"error: {run.directory / name}: needed {needed}, found {found}\n")
    assert path.read_text() == "mine"
    assert sorted(run.directory.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("metrics/drafter-0.jsonl", '{"step":1,"loss":2.0}\n[1,2]\n', ["line 2: needed a JSON object, found b'[1,2]'"]),
        ("metrics/drafter-0.jsonl", '{"loss":2.0}\n', ["needed records of steps and evaluations", "field `step`"]),
        ("metrics/drafter-0.jsonl", '{"step":0,"acceptance":"x"}\n', ["Expected `float`, got `str`"]),
        ("faults.json", "garbage", ["needed the faults of actors as in common/actor/faults.py"]),
        ("faults.json", '{"target-0": [{"when": 3}]}', ["unknown field `when`"]),
    ],
)
def test_a_file_with_another_content_is_named_and_stays(run: LaunchedRun, name: str, text: str, parts: list[str]) -> None:
    path = run.directory / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    refuse(run.start(), 2, f"error: {path}: ", *parts)
    assert path.read_text() == text
    assert [found for found in run.directory.rglob("*") if found.is_file()] == [path]


def test_dry_run_prints_the_plan_and_starts_nothing(run: LaunchedRun) -> None:
    assert run.start('drafters.devices=["cpu", "cpu"]', flags=("--dry-run",)).end() == 0
    assert re.findall(r"^  (\S+) +python -m (\S+) +cpu$", run.stdout, re.MULTILINE) == [
        ("exchange", "services.exchange"),
        ("target-0", "services.target"),
        ("drafter-0", "services.drafter"),
        ("drafter-1", "services.drafter"),
    ]
    assert "  1 rings of 0.008 GiB, 0.008 GiB shared memory in all\n" in run.stdout
    assert not run.directory.exists()


@pytest.mark.parametrize(("name", "memory"), [("qwen3_6_27b", "15.664"), ("qwen3_8b", "12.539")])
def test_dry_run_of_a_run_whose_model_and_data_are_not_there_yet(run: LaunchedRun, name: str, memory: str) -> None:
    assert run.start(config=CONFIG.with_name(f"{name}.toml"), flags=("--dry-run",)).end() == 0, run.stderr
    assert "  target-4     python -m services.target    cuda:4\n" in run.stdout
    assert f"  5 rings of {float(memory) / 5:.3f} GiB, {memory} GiB shared memory in all\n" in run.stdout
    absent = re.findall(r"^  not there yet: (.+)$", run.stdout, re.MULTILINE)
    assert [line.partition(":")[0] for line in absent[:3]] == ["model.path", "data.path", "data.eval_path"]
    assert not run.directory.exists()


def test_dry_run_of_a_shipped_run_names_what_its_settings_lack(run: LaunchedRun) -> None:
    config = CONFIG.with_name("qwen3_8b.toml")
    refuse(run.start("draft.tap_layers=[36]", config=config, flags=("--dry-run",)), 2, "draft.tap_layers: needed ascending")
    refuse(run.start(config=config), 2, "model.path: needed a model folder with config.json, found none in models/Qwen3-8B")


def _with_data(folder: Path, paths: dict[str, Path]) -> Path:
    """The tiny configuration with prepared data sets."""
    lines = "\n".join(f'{key} = "{path}"' for key, path in paths.items())
    config = folder / "prepared.toml"
    config.write_text(SYNTHETIC.sub(f"[data]\n{lines}\n\n", CONFIG.read_text()))
    return config
