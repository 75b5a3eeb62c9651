"""Readers: Parquet, CSV, and data in memory."""

from gem_core.data.readers.csv import CsvReader
from gem_core.data.readers.memory import MemoryReader
from gem_core.data.readers.parquet import ParquetReader

__all__ = ["CsvReader", "MemoryReader", "ParquetReader"]
