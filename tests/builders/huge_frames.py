"""Frames that are far too long for a socket, and the memory of the process that gets them."""

from pathlib import Path

import zmq

NUM_FRAMES = 40
FRAME = bytes(16 << 20)
BOUND_BYTES = 64 << 20  # a tenth of all frames together
_WAIT_MS = 20_000


def send_huge_frames(address: str) -> None:
    """Send each over a connection of its own, which the other side must end."""
    with zmq.Context() as context:
        for _ in range(NUM_FRAMES):
            with context.socket(zmq.DEALER) as socket, socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
                socket.linger = 0
                socket.connect(address)
                socket.send(FRAME, copy=False)
                ended = monitor.poll(_WAIT_MS)
                socket.disable_monitor()
            assert ended, "the frame was taken"


def peak_bytes(pid: int) -> int:
    """The most memory that a process has ever held."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10
