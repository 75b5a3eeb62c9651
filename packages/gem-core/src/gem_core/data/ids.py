"""Ids: stable keys, hashing and vocabularies, over the distinct values of a column.

An id is the same whether it comes as an integer or as its decimal text (42 and "42"): a log read from CSV, one read
from Parquet and a request in JSON agree. "007" and "4.0" are texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem_core.data.columns import Bools, Ints

_DECIMAL = r"^(0|-?[1-9][0-9]*)$"
_SHORT_DECIMAL = r"^(0|-?[1-9][0-9]{0,17})$"  # always fits int64
TABLE, TABLE_PER_VALUE = 1 << 16, 8
"""Entries of a table of small integers, of 4 bytes, beside so many for each."""
PER_TEXT = 32
"""Entries that a hash set takes in while the key of one text is made."""
_MIN, _MAX = -(2**63), 2**63 - 1


def factorize(values: pa.Array) -> tuple[Ints, pa.Array]:
    """(n,) index of each value among the distinct ones, -1 for null; and the distinct values."""
    encoded = values.dictionary_encode()
    indices = pc.fill_null(encoded.indices, -1) if encoded.null_count else encoded.indices
    codes: Ints = indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return codes, encoded.dictionary


def split_decimals(distinct: pa.Array) -> tuple[Ints, Bools]:
    """(n,) integers of those values that are integers or their decimal text, and which those are. No nulls."""
    if pa.types.is_integer(distinct.type):
        return distinct.to_numpy(zero_copy_only=False), np.ones(len(distinct), np.bool_)
    short: Bools = pc.match_substring_regex(distinct, _SHORT_DECIMAL).to_numpy(zero_copy_only=False)
    integers = np.zeros(len(distinct), np.int64)
    integers[short] = distinct.filter(pa.array(short)).cast(pa.int64()).to_numpy()
    long = ~short & pc.match_substring_regex(distinct, _DECIMAL).to_numpy(zero_copy_only=False)
    for i in np.flatnonzero(long):  # 19 digits: rare
        value = int(distinct[int(i)].as_py())
        if _MIN <= value <= _MAX:
            integers[i], short[i] = value, True
    return integers, short


def keys(distinct: pa.Array) -> Ints:
    """(n,) stable int64 keys: integers as they are, text as its 63-bit hash."""
    integers, decimal = split_decimals(distinct)
    if decimal.all():
        return integers
    texts = distinct.filter(pa.array(~decimal)).to_pylist()
    out = integers.copy()
    out[~decimal] = np.fromiter((_text_hash(t) >> 1 for t in texts), np.int64, len(texts))
    return out


def column_keys(values: pa.Array) -> Ints:
    """(n,) keys of a column without nulls."""
    if pa.types.is_integer(values.type):
        out: Ints = values.to_numpy(zero_copy_only=False)
        return out
    codes, distinct = factorize(values)
    return keys(distinct)[codes]


def hashed(distinct: pa.Array, buckets: int) -> Ints:
    """(n,) bucket 0 .. buckets - 1 of each value: splitmix64 of its key."""
    spread: Ints = (splitmix64(keys(distinct).view(np.uint64)) % np.uint64(buckets)).astype(np.int64)
    return spread


def splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """(n,) well mixed bits of each value (Steele, Lea, Flood 2014)."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _text_hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class Vocabulary:
    """Known values in order; `lookup` gives their index.

    Kept as sorted 64-bit keys: a look-up costs O(n log V) however few the values (a hash set would be rebuilt for
    each request of a server). Many texts are looked up in a hash set all the same: it costs less than their keys.
    """

    def __init__(self, values: Sequence[str | int]) -> None:
        self._texts = pa.array([str(v) for v in values], pa.string())
        own = keys(self._texts)
        self._order = np.argsort(own, kind="stable")
        self._sorted = own[self._order]

    def __len__(self) -> int:
        return len(self._sorted)

    def lookup(self, distinct: pa.Array) -> Ints:
        """(n,) index of each value, -1 for one that is not known."""
        if not len(self):
            return np.full(len(distinct), -1, np.int64)
        if pa.types.is_string(distinct.type) and len(distinct) * PER_TEXT > len(self):
            found = pc.fill_null(pc.index_in(distinct, value_set=self._texts), -1)
            place: Ints = found.to_numpy(zero_copy_only=False).astype(np.int64)
            return place
        wanted = keys(distinct)
        place = np.minimum(np.searchsorted(self._sorted, wanted), len(self) - 1)
        return np.where(self._sorted[place] == wanted, self._order[place], -1)

    def table(self, first: int, unknown: int) -> npt.NDArray[np.int32] | None:
        """`first` + the index of each value at its own place, `unknown` at all others and in the last entry.

        None where the values are not small integers.
        """
        size = int(self._sorted[-1]) + 2 if len(self) else 0
        if not len(self) or self._sorted[0] < 0 or size > TABLE_PER_VALUE * len(self) + TABLE:
            return None
        out = np.full(size, unknown, np.int32)
        out[self._sorted] = first + self._order
        return out
