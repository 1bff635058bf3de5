"""One memory-mapped Arrow file of samples: ours (file format) or one of Hugging Face `datasets` (stream format).

    input_ids   list<int32>   the tokens
    loss_mask   list<bool>    one bit a token: supervised or not
    length      int32         tokens of the row, read without touching them
    checksum    uint32        of tokens and mask (`row_checksum`), compared whenever a row is read
    category    string        the kind of prompt, "" for none

Only the first two are needed. Other integers are read too. Shapes: n tokens of one sample.
"""

import zlib
from collections.abc import Iterator
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
_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


class Sample(NamedTuple):
    """One document: input_ids int32 [n], loss_mask bool [n] (True where a token is supervised), and its category."""

    input_ids: Int32Array
    loss_mask: BoolArray
    category: str = ""


def row_checksum(sample: Sample) -> int:
    """Return the CRC-32 of the token ids and of the mask, one bit a token."""
    return zlib.crc32(np.packbits(sample.loss_mask).tobytes(), zlib.crc32(sample.input_ids.tobytes()))


def to_batch(rows: list[Sample]) -> pa.RecordBatch:
    """Return the rows as a record batch of `SCHEMA`."""
    lengths = np.array([len(row.input_ids) for row in rows], np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    input_ids = pa.ListArray.from_arrays(offsets, np.concatenate([row.input_ids for row in rows]))
    loss_mask = pa.ListArray.from_arrays(offsets, np.concatenate([row.loss_mask for row in rows]))
    checksums = pa.array(np.array([row_checksum(row) for row in rows], np.uint32))
    categories = pa.array([row.category for row in rows], pa.string())
    return pa.record_batch([input_ids, loss_mask, pa.array(lengths), checksums, categories], schema=SCHEMA)


def map_batches(path: Path) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Map a file of either format. An Arrow, OS or value error where it is no such file, or one cut short."""
    source = pa.memory_map(str(path))
    if source.read(len(_MAGIC)) == _MAGIC:
        reader = pa.ipc.open_file(source)
        return reader.schema, (reader.get_batch(index) for index in range(reader.num_record_batches))
    source.seek(max(0, source.size() - len(_END_OF_STREAM)))
    if source.read() != _END_OF_STREAM:  # pyarrow takes the end of the file for the end of the stream
        raise ValueError("neither the start of a file nor the end of a stream (cut short?)")
    source.seek(0)
    stream = pa.ipc.open_stream(source)
    return stream.schema, iter(stream)


class ArrowFile:
    """The rows of a file, as views of its mapping. DataError where it is damaged, has other columns or contradicts itself."""

    def __init__(self, path: Path) -> None:
        try:
            schema, batches = map_batches(path)
            if not _is_readable(schema):
                found = ", ".join(f"{field.name} {field.type}" for field in schema)
                raise DataError(
                    f"{path}: needed the columns input_ids and loss_mask, lists of integers or bools, found {found}"
                )
            names = [name for name in SCHEMA.names if name in schema.names]
            self._table = pa.Table.from_batches(batches, schema).select(names)
            self._table.validate(full=True)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DataError(f"{path}: needed an Arrow IPC file, found: {error}") from error
        if any(self._table[name].null_count for name in self._table.schema.names if name != "category"):
            raise DataError(f"{path}: needed rows without null, found null")
        lengths, masks = self._list_lengths("input_ids"), self._list_lengths("loss_mask")
        if not (np.array_equal(lengths, masks) and np.array_equal(lengths, self.lengths())):
            raise DataError(f"{path}: needed input_ids and loss_mask of one length, found other lengths")

    @property
    def num_rows(self) -> int:
        """Rows of all its record batches."""
        return int(self._table.num_rows)

    def lengths(self) -> Int32Array:
        """Return int32 [num_rows], tokens per row, without touching the tokens."""
        if "length" not in self._table.schema.names:
            return self._list_lengths("input_ids")
        lengths: Int32Array = self._table["length"].to_numpy()
        return lengths

    def categories(self) -> list[str]:
        """Return the category of every row, "" where there is none, without touching the tokens."""
        return [category or "" for category in self._table["category"].to_pylist()] if self._is_named else [""] * self.num_rows

    def find_id_outside(self, vocab_size: int) -> tuple[int, int] | None:
        """Return the row and the id of the first token that is not from 0 to `vocab_size` - 1, or None."""
        ids = pc.list_flatten(self._table["input_ids"])
        extremes = pc.min_max(ids).as_py()
        if not len(ids) or 0 <= extremes["min"] <= extremes["max"] < vocab_size:
            return None
        values = ids.to_numpy()
        index = int(np.argmax((values < 0) | (values >= vocab_size)))
        return int(np.searchsorted(np.cumsum(self.lengths()), index, side="right")), int(values[index])

    def has_supervised_token(self) -> bool:
        """Return whether any mask is set."""
        return any(pc.any(pc.list_flatten(chunk).cast(pa.bool_())).as_py() for chunk in self._table["loss_mask"].chunks)

    def read(self, row: int) -> Sample:
        """Return a copy of one row. DataError where its bytes are not those that were written."""
        input_ids = self._table["input_ids"][row].values.to_numpy()
        loss_mask = self._table["loss_mask"][row].values.to_numpy(zero_copy_only=False)
        category = (self._table["category"][row].as_py() or "") if self._is_named else ""
        sample = Sample(input_ids.astype(np.int32), loss_mask.astype(np.bool_), category)
        if "checksum" in self._table.schema.names and self._table["checksum"][row].as_py() != row_checksum(sample):
            raise DataError("its checksum is wrong: bytes were changed after it was written")
        return sample

    @property
    def _is_named(self) -> bool:
        """Tell a text category from a column of that name that means something else."""
        return "category" in self._table.schema.names and self._table["category"].type in (pa.string(), pa.large_string())

    def _list_lengths(self, name: str) -> Int32Array:
        lengths: Int32Array = pc.list_value_length(self._table[name]).to_numpy().astype(np.int32)
        return lengths


def _is_readable(schema: pa.Schema) -> bool:
    types = [schema.field(name).type for name in ("input_ids", "loss_mask") if name in schema.names]
    lists = [kind.value_type for kind in types if pa.types.is_list(kind) or pa.types.is_large_list(kind)]
    return (
        len(lists) == 2 and pa.types.is_integer(lists[0]) and (pa.types.is_integer(lists[1]) or pa.types.is_boolean(lists[1]))
    )
