"""Ids of one embedding table: the values of a column to `MISSING`, `UNSEEN` or the place of a value that is known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem_core.data.columns import Bools, Column, Ints
from gem_core.data.ids import Vocabulary, hashed
from gem_core.data.rows import IdCounts
from gem_core.schema import FIRST_KNOWN, MISSING, UNSEEN, Schema


class Lookup:
    """The ids of a table of a fitted schema."""

    def __init__(self, schema: Schema, table: str) -> None:
        self.table, self.options = table, schema.sparse_options(table)
        self.vocabulary: Vocabulary | None = None
        if self.options.hash is None:
            given = self.options.vocabulary
            self.vocabulary = Vocabulary(schema.require_fitted().vocabularies[table] if given is None else given)
        self._direct = None
        if self.vocabulary is not None and self.options.unseen != "hash":
            self._direct = self.vocabulary.table(FIRST_KNOWN, UNSEEN)

    def encode(self, values: Column, out: npt.NDArray[np.int32]) -> IdCounts:
        """Write the ids of a column's values to `out` (n,).

        Raises:
            DataError: a value is not in the vocabulary, and `unseen` is "error".
        """
        given = values.ids()
        if self._direct is not None and pa.types.is_integer(given.type):
            strange = self._small(given, self._direct, out)
        else:
            strange = self._distinct(given, out)
        if self.options.unseen == "error" and self.vocabulary is not None and strange.any():
            i = int(strange.argmax())
            values.fail(i, f'one of the {len(self.vocabulary)} ids of table "{self.table}" (unseen: error)')
        return IdCounts(len(given), given.null_count, int(np.count_nonzero(strange)))

    def _small(self, given: pa.Array, direct: npt.NDArray[np.int32], out: npt.NDArray[np.int32]) -> Bools:
        """Ids of integers that `direct` has the ids of; returns (n,) which are not in the vocabulary."""
        filled = pc.fill_null(given, 0) if given.null_count else given
        place = np.minimum(filled.to_numpy().view(np.uint64), len(direct) - 1)  # a negative one is beyond the end, too
        np.take(direct, place.view(np.int64), out=out, mode="clip")  # writes to `out` at once, as "raise" does not
        if given.null_count:
            out[given.is_null().to_numpy(zero_copy_only=False)] = MISSING
        strange: Bools = out == UNSEEN
        return strange

    def _distinct(self, given: pa.Array, out: npt.NDArray[np.int32]) -> Bools:
        """Ids of any values, by their distinct ones; returns (n,) which are not in the vocabulary."""
        encoded = given.dictionary_encode()
        mapped, unseen = self._ids(encoded.dictionary)
        # The last entry serves those without a value.
        codes = pc.fill_null(encoded.indices, len(mapped)) if encoded.null_count else encoded.indices
        place = codes.to_numpy(zero_copy_only=False)
        np.take(np.append(mapped, MISSING).astype(np.int32), place, out=out, mode="clip")
        return np.append(unseen, False)[place] if unseen.any() else np.zeros(len(place), np.bool_)

    def _ids(self, distinct: pa.Array) -> tuple[Ints, Bools]:
        """(n,) ids of distinct values, and which are not in the vocabulary."""
        if self.vocabulary is None:
            return FIRST_KNOWN + hashed(distinct, self.options.hash or 1), np.zeros(len(distinct), np.bool_)
        place = self.vocabulary.lookup(distinct)
        unseen = place < 0
        if self.options.unseen == "hash":
            other = FIRST_KNOWN + len(self.vocabulary) + hashed(distinct, self.options.unseen_buckets)
        else:
            other = np.full(len(distinct), UNSEEN)
        return np.where(unseen, other, FIRST_KNOWN + place), unseen
