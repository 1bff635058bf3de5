"""Paths of a run, and files that are complete under their names or not there."""

import math
from pathlib import Path

import pytest

from common.errors import ConfigError, ModelError
from common.run_dir import actor_name, exchange_address, read_object, replace_file, write_json


def test_names_of_actors() -> None:
    assert [actor_name(*it) for it in (("exchange", 0), ("target", 2))] == ["exchange", "target-2"]


def test_a_socket_path_that_is_too_long_for_the_kernel_is_named(tmp_path: Path) -> None:
    assert exchange_address(tmp_path) == f"ipc://{tmp_path.resolve()}/exchange.sock"
    with pytest.raises(ConfigError, match=r"--run-dir: needed a path of at most 107 bytes with exchange\.sock, found "):
        exchange_address(tmp_path / ("x" * 100))


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_and_nothing_stays_aside(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "record.json"
    for content in (b"old", b"new"):
        replace_file(path, content, durable=durable)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_that_cannot_be_replaced_stays_and_nothing_stays_aside(
    tmp_path: Path, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(b"old")

    def refuse(aside: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new", durable=durable)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_json_is_strict(tmp_path: Path) -> None:
    write_json(tmp_path / "report.json", {"loss": math.nan, "path": "ä"})
    assert (tmp_path / "report.json").read_text() == '{\n  "loss": null,\n  "path": "ä"\n}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read: No such file"), ("{", "not JSON: "), ("[1]", "needed an object, found list")],
)
def test_an_object_of_another_program_is_checked(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ModelError, match=message):
        read_object(path, ModelError)
