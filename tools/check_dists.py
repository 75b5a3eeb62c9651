"""Check built distributions: `python tools/check_dists.py FOLDER NAME ...` prints what is wrong or a line a wheel."""

import sys
import tarfile
import zipfile
from pathlib import Path

from packaging.metadata import Metadata


def check_wheel(path: Path, module: str) -> list[str]:
    """Problems of one wheel: its metadata, licence, type marker, and files that do not belong in it."""
    with zipfile.ZipFile(path) as wheel:
        files = wheel.namelist()
        (metadata_file,) = (name for name in files if name.endswith(".dist-info/METADATA"))
        raw = wheel.read(metadata_file)
    metadata = Metadata.from_email(raw, validate=True)  # raises an ExceptionGroup that names each bad field
    info = metadata_file.removesuffix("METADATA")
    needed = (f"{module}/py.typed", f"{module}/__init__.py", f"{info}licenses/LICENSE")
    problems = [f"no {name}" for name in needed if name not in files]
    problems += [f"unexpected {name}" for name in files if not name.startswith((f"{module}/", info))]
    problems += [f"test file {name}" for name in files if "/tests/" in name or Path(name).name.startswith("test_")]
    if metadata.license_expression != "Apache-2.0":
        problems.append(f"licence {metadata.license_expression!r}: expected 'Apache-2.0'")
    if "Typing :: Typed" not in (metadata.classifiers or []):
        problems.append("no classifier 'Typing :: Typed'")
    if not metadata.description or not metadata.summary:
        problems.append("no summary or no readme")
    return problems


def check_sdist(path: Path, module: str) -> list[str]:
    """Problems of one sdist: what a build and a reader need must be in it."""
    with tarfile.open(path) as sdist:
        files = {name.partition("/")[2] for name in sdist.getnames()}
    needed = ("pyproject.toml", "LICENSE", "README.md", f"src/{module}/py.typed")
    return [f"no {name}" for name in needed if name not in files]


def main(folder: Path, names: list[str]) -> int:
    """Check the one wheel and the one sdist of each package; 0 if all are right."""
    failed = False
    versions = set()
    for name in names:
        module = name.replace("-", "_")
        wheels = sorted(folder.glob(f"{module}-*.whl"))
        sdists = sorted(folder.glob(f"{module}-*.tar.gz"))
        problems = []
        if len(wheels) != 1 or len(sdists) != 1:
            problems.append(f"{len(wheels)} wheels and {len(sdists)} sdists in {folder}: expected one of each")
        for path, check in [(wheel, check_wheel) for wheel in wheels] + [(sdist, check_sdist) for sdist in sdists]:
            problems += [f"{path.name}: {problem}" for problem in check(path, module)]
        versions |= {path.name.split("-")[1] for path in wheels}
        for problem in problems:
            print(f"{name}: {problem}", file=sys.stderr)
        if not problems:
            print(f"{wheels[0].name} ({wheels[0].stat().st_size / 1024:.0f} KiB) is right")
        failed |= bool(problems)
    if len(versions) > 1:
        print(f"versions differ: {', '.join(sorted(versions))}", file=sys.stderr)
        failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
