"""The codec of every message: msgpack packs and unpacks, msgspec checks the types.

A length that a frame announces is compared with a limit before memory is taken for it: a frame that announces
2^31 entries costs nothing.
"""

from collections.abc import Callable
from typing import Any

import msgpack
import msgspec

from common.errors import ProtocolError

MAX_FRAME_BYTES = 1 << 20  # far above the longest, a Work whose target holds all slots; more ends the connection
MAX_WAITING_FRAMES = 64  # of one connection; the next ones stay with their sender
_MAX_ENTRIES = 1 << 16
_LIMITS = {"max_str_len": 1 << 16, "max_bin_len": 1 << 10, "max_map_len": 1 << 6, "max_ext_len": 0}


def encode(message: object) -> bytes:
    """Pack a struct, or anything made of dicts, lists, strings, bytes and numbers."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)))
    return packed


def decoder(kind: Any) -> Callable[[bytes], Any]:
    """Return the function that unpacks one message of type `kind`; it raises ProtocolError for all other bytes."""

    def decode(data: bytes) -> Any:
        try:
            return msgspec.convert(_unpack(data), kind)
        except (ValueError, msgspec.ValidationError) as error:
            raise ProtocolError(f"undecodable message of {len(data)} bytes: {error!r}") from error

    return decode


def _unpack(data: bytes) -> Any:
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"needed at most {MAX_FRAME_BYTES} bytes")
    return msgpack.unpackb(data, max_array_len=min(len(data), _MAX_ENTRIES), **_LIMITS)
