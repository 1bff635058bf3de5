"""Shared memory without a name."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.ring import memory


def test_rounding_up() -> None:
    assert [memory.round_up(value, 4096) for value in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]


def test_what_one_mapping_writes_another_reads_and_all_of_it_is_allocated() -> None:
    fd = memory.create("test", 3 * memory.PAGE_BYTES)
    assert os.fstat(fd).st_blocks * 512 >= 3 * memory.PAGE_BYTES
    one, other = memory.attach(fd), memory.attach(fd)
    os.close(fd)
    assert other[:] == bytes(3 * memory.PAGE_BYTES)
    one[4095:4098] = b"abc"
    assert other[4095:4098] == b"abc"


@pytest.mark.parametrize("num_bytes", [0, memory.PAGE_BYTES, 3 * memory.PAGE_BYTES])
def test_nobody_can_change_the_size(num_bytes: int) -> None:
    fd = memory.create("test", 2 * memory.PAGE_BYTES)
    with pytest.raises(OSError) as caught:
        os.ftruncate(fd, num_bytes)
    assert caught.value.errno == errno.EPERM
    assert os.fstat(fd).st_size == 2 * memory.PAGE_BYTES
    os.close(fd)


def test_a_child_gets_it_only_when_it_is_handed_over() -> None:
    fd = memory.create("test", memory.PAGE_BYTES)
    program = f"import os, sys; from common.ring import memory; memory.attach({fd})[:5] = b'child'"
    refused = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert refused.returncode == 1 and b"Bad file descriptor" in refused.stderr
    subprocess.run([sys.executable, "-c", program], pass_fds=[fd], check=True)
    assert memory.attach(fd)[:5] == b"child"
    os.close(fd)


def test_too_much_is_an_error_that_says_for_what_and_leaves_nothing_open() -> None:
    program = """
import os, resource
from common.ring import memory
from common.errors import ConfigError
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
before = os.listdir("/proc/self/fd")
try:
    memory.create("big ring", 8193)
except ConfigError as error:
    print(error, before == os.listdir("/proc/self/fd"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "big ring: needed 8193 bytes of shared memory: File too large True\n"


def test_what_the_machine_cannot_hold_is_refused_before_it_is_allocated() -> None:
    memory.check_available(memory.PAGE_BYTES)
    with pytest.raises(ConfigError, match=r"ring.num_slots .* needed 1048576.00 GiB of shared memory, found [\d.]+ GiB"):
        memory.check_available(2**50)


@pytest.mark.parametrize(("limit", "expected"), [("1000000", 1_000_000 - 700_000 + 300_000), ("max", None)])
def test_the_limit_of_the_control_group_counts_but_not_its_page_cache(tmp_path: Path, limit: str, expected: int | None) -> None:
    """The cache of a large data set is given up when memory is needed, so it is no reason to refuse a run."""
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\nfile 300000\ninactive_file 200000\nactive_file 100000\n")
    available = memory._available_bytes(tmp_path)
    assert available == expected if expected else available > 2**20
