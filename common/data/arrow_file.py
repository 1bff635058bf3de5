"""One memory-mapped Arrow file of samples: ours (file format) or one of Hugging Face `datasets` (stream format).

    input_ids   list<int32>   the tokens
    loss_mask   list<bool>    one bit a token: supervised or not
    length      int32         tokens of the row, read without touching them
    checksum    uint32        of tokens and mask (`row_checksum`), compared whenever a row is read
    category    string        what kind of prompt it is; "" where nobody said

Only the first two are needed. Other integers are read too. Shapes: n tokens of one sample.
"""

import bisect
import itertools
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from common.errors import DataError

SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("length", pa.int32()),
        ("checksum", pa.uint32()),
        ("category", pa.string()),
    ]
)
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_MAGIC = b"ARROW1"

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


class Sample(NamedTuple):
    """One document: input_ids int32 [n], loss_mask bool [n] (True where a token is supervised), and its category."""

    input_ids: Int32Array
    loss_mask: BoolArray
    category: str = ""


def row_checksum(sample: Sample) -> int:
    """CRC-32 of the token ids and of the mask, one bit a token."""
    return zlib.crc32(np.packbits(sample.loss_mask).tobytes(), zlib.crc32(sample.input_ids.tobytes()))


def to_batch(rows: list[Sample]) -> pa.RecordBatch:
    """The rows as a record batch of `SCHEMA`."""
    lengths = np.array([len(row.input_ids) for row in rows], np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    input_ids = pa.ListArray.from_arrays(offsets, np.concatenate([row.input_ids for row in rows]))
    loss_mask = pa.ListArray.from_arrays(offsets, np.concatenate([row.loss_mask for row in rows]))
    checksums = pa.array(np.array([row_checksum(row) for row in rows], np.uint32))
    categories = pa.array([row.category for row in rows], pa.string())
    return pa.record_batch([input_ids, loss_mask, pa.array(lengths), checksums, categories], schema=SCHEMA)


class ArrowFile:
    """The rows of a file, as views of its mapping.

    Raises:
        DataError: no Arrow file, one cut short, other columns, or columns that contradict each other.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._batches = _map(path)
            for batch in self._batches:
                _check(path, batch)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DataError(f"{path}: needed an Arrow IPC file, found: {error}") from error
        self._ends = list(itertools.accumulate(batch.num_rows for batch in self._batches))

    @property
    def num_rows(self) -> int:
        """Rows of all its record batches."""
        return self._ends[-1] if self._ends else 0

    def lengths(self) -> Int32Array:
        """int32 [num_rows], tokens per row, without touching the tokens."""
        return np.concatenate([np.zeros(0, np.int32), *map(_lengths, self._batches)])

    def categories(self) -> list[str]:
        """The category of every row, "" where there is none, without touching the tokens."""
        return [category or "" for batch in self._batches for category in _categories(batch)]

    def find_id_outside(self, vocab_size: int) -> tuple[int, int] | None:
        """Return the row and the id of the first token that is not from 0 to `vocab_size` - 1, or None."""
        first_row = 0
        for batch in self._batches:
            ids = batch.column("input_ids").flatten()
            extremes = pc.min_max(ids).as_py()
            if len(ids) and not 0 <= extremes["min"] <= extremes["max"] < vocab_size:
                values = ids.to_numpy()
                place = int(np.argmax((values < 0) | (values >= vocab_size)))
                row = int(np.searchsorted(np.cumsum(_list_lengths(batch, "input_ids")), place, side="right"))
                return first_row + row, int(values[place])
            first_row += batch.num_rows
        return None

    def has_supervised_token(self) -> bool:
        """Return whether any mask is set; stops at the first batch with one."""
        return any(pc.any(batch.column("loss_mask").flatten().cast(pa.bool_())).as_py() for batch in self._batches)

    def read(self, row: int) -> Sample:
        """A copy of one row.

        Raises:
            DataError: its bytes are not those that were written; or an id that no int32 holds.
        """
        number = bisect.bisect_right(self._ends, row)
        batch = self._batches[number]
        place = row - self._ends[number] + batch.num_rows
        input_ids = batch.column("input_ids")[place].values.to_numpy()
        loss_mask = batch.column("loss_mask")[place].values.to_numpy(zero_copy_only=False)
        category = _categories(batch.slice(place, 1))[0] or ""
        sample = Sample(input_ids.astype(np.int32), loss_mask.astype(np.bool_), category)
        if "checksum" in batch.schema.names and batch.column("checksum")[place].as_py() != row_checksum(sample):
            raise DataError("its checksum is wrong: bytes were changed after it was written")
        return sample


def _map(path: Path) -> list[pa.RecordBatch]:
    source = pa.memory_map(str(path))
    if source.read(len(_MAGIC)) == _MAGIC:
        reader = pa.ipc.open_file(source)
        return [reader.get_batch(i) for i in range(reader.num_record_batches)]
    source.seek(max(0, source.size() - len(END_OF_STREAM)))
    if source.read() != END_OF_STREAM:
        raise DataError(f"{path}: needed an Arrow IPC file, found neither its start nor the end of a stream (cut short?)")
    source.seek(0)
    return list(pa.ipc.open_stream(source))


def _check(path: Path, batch: pa.RecordBatch) -> None:
    if not _is_readable(batch.schema):
        found = ", ".join(f"{field.name} {field.type}" for field in batch.schema)
        raise DataError(f"{path}: needed the columns input_ids and loss_mask, lists of integers or bools, found {found}")
    columns = batch.select([name for name in SCHEMA.names if name in batch.schema.names])
    columns.validate(full=True)
    if any(columns.column(name).null_count for name in columns.schema.names if name != "category"):
        raise DataError(f"{path}: needed rows without null, found null")
    lengths, masks = _list_lengths(batch, "input_ids"), _list_lengths(batch, "loss_mask")
    if not (np.array_equal(lengths, masks) and np.array_equal(lengths, _lengths(batch))):
        raise DataError(f"{path}: needed input_ids and loss_mask of one length, found other lengths")


def _is_readable(schema: pa.Schema) -> bool:
    types = [schema.field(name).type for name in ("input_ids", "loss_mask") if name in schema.names]
    lists = [kind.value_type for kind in types if pa.types.is_list(kind) or pa.types.is_large_list(kind)]
    return (
        len(lists) == 2 and pa.types.is_integer(lists[0]) and (pa.types.is_integer(lists[1]) or pa.types.is_boolean(lists[1]))
    )


def _categories(batch: pa.RecordBatch) -> list[str | None]:
    """A column of that name that holds something else is somebody else's."""
    kind = batch.schema.field("category").type if "category" in batch.schema.names else None
    if kind not in (pa.string(), pa.large_string()):
        return [""] * batch.num_rows
    categories: list[str | None] = batch.column("category").to_pylist()
    return categories


def _lengths(batch: pa.RecordBatch) -> Int32Array:
    if "length" not in batch.schema.names:
        return _list_lengths(batch, "input_ids")
    lengths: Int32Array = batch.column("length").to_numpy()
    return lengths


def _list_lengths(batch: pa.RecordBatch, name: str) -> Int32Array:
    lengths: Int32Array = pc.list_value_length(batch.column(name)).to_numpy().astype(np.int32)
    return lengths
