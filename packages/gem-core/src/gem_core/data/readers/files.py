"""Paths, folders, globs and URLs to files."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from gem_core.errors import ConfigError, looked_for

Paths = str | list[str]


def expand(paths: Paths, option: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The files of a path, a folder, a glob, or a list of these, each in order of name.

    Raises:
        ConfigError: one of them is no file, or matches none.
    """
    out: list[Path] = []
    for text in [paths] if isinstance(paths, str) else paths:
        out += _local(text, option, suffixes)
    return out


def _local(text: str, option: str, suffixes: tuple[str, ...]) -> list[Path]:
    path = Path(text).expanduser()
    if path.is_dir():
        found = sorted(f for f in path.iterdir() if f.name.endswith(suffixes) and not f.name.startswith((".", "_")))
    elif path.is_file():
        found = [path]
    else:
        found = sorted(Path(f) for f in glob.glob(str(path), recursive=True) if Path(f).is_file())
    if not found:
        if path.is_dir():
            raise ConfigError(f"reader: {option}: {text}: a folder without {' or '.join(suffixes)} files")
        raise ConfigError(f"reader: {option}: {text}: no such file{looked_for(path)}")
    return found


def expand_urls(paths: Paths, option: str, suffixes: tuple[str, ...]) -> list[str]:
    """As `expand`, also for URLs of any file system that fsspec knows ("s3://bucket/log/*.parquet").

    Raises:
        ConfigError: besides, fsspec or what it needs for this kind of URL is not installed.
    """
    out: list[str] = []
    for text in [paths] if isinstance(paths, str) else paths:
        out += _remote(text, option, suffixes) if "://" in text else map(str, _local(text, option, suffixes))
    return out


def _remote(url: str, option: str, suffixes: tuple[str, ...]) -> list[str]:
    where = f"reader: {option}: {url}"
    fs, path = file_system(url, where)
    try:
        if "*" in path or "?" in path or "[" in path:
            found = sorted(fs.glob(path))
        elif fs.isdir(path):
            names = sorted(fs.ls(path, detail=False))
            found = [n for n in names if n.endswith(suffixes) and not n.rsplit("/", 1)[-1].startswith((".", "_"))]
        else:
            found = [path] if fs.exists(path) else []
    except Exception as error:  # whatever the file system's library raises: no access, no network
        raise ConfigError(f"{where}: cannot be listed: {type(error).__name__}: {error}") from error
    if not found:
        raise ConfigError(f"{where}: no such file")
    return [fs.unstrip_protocol(name) for name in found]


def file_system(url: str, where: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it. One per process: they do not survive a fork."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ConfigError(f"{where}: URLs need fsspec: pip install gem-core[fsspec]") from error
    try:
        fs, path = url_to_fs(url)
    except (ImportError, ValueError) as error:  # the library of this kind of URL is missing; no such kind
        raise ConfigError(f"{where}: {error}") from error
    return fs, path
