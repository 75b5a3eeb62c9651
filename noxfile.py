"""Every job of the workspace is a session here: `nox -l` lists them, `nox -s NAME [-- arguments]` runs one.

A session makes its own environment (15-20 s with uv) from constraints/cpu.txt. No session but `light` fixes its Python;
`nox -s tests -P 3.12` runs any of them on another interpreter.
"""

import os
import re
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False  # `light` skips, with a message, the interpreters that are not here
nox.options.sessions = ["lint", "types", "tests"]

ROOT = Path(__file__).parent
PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
PACKAGES = ["gem-core", "gem-kernels", "gem-parallel", "gem-distill", "gem-serve"]
EXAMPLE = "examples/gem-plugin-example"
CORE_EXTRAS = "demo,safetensors,sweep,tensorboard"  # what gem-core's own tests use
EVIDENCE = ["joint", "models"]  # benchmarks that show a claim of the results page
CONSTRAINTS = ("-c", "constraints/cpu.txt")
WORKERS = ("-n", "auto", "--maxprocesses=8")
PYTEST_ENV = {"OMP_NUM_THREADS": "1"}  # one worker per core: torch's own threads would only get in the way

if "PIP_FIND_LINKS" in os.environ:  # pip's folder of local wheels; uv looks only where its own variable says
    os.environ.setdefault("UV_FIND_LINKS", os.environ["PIP_FIND_LINKS"])


def install(session: nox.Session, *requirements: str, groups: tuple[str, ...] = ()) -> None:
    """Install requirements and dependency groups of the root pyproject.toml at the constraints' versions."""
    session.install(*CONSTRAINTS, *requirements, *nox.project.dependency_groups(PYPROJECT, *groups))


def editable(*, extras: str = CORE_EXTRAS) -> list[str]:
    """Arguments that install every package from the working tree."""
    paths = [f"packages/{name}" + (f"[{extras}]" if name == "gem-core" and extras else "") for name in PACKAGES]
    return [argument for path in paths for argument in ("-e", path)]


@nox.session
def demo(session: nox.Session) -> None:
    """Train GEM and the baselines on a real ads log and write a report; `-- --quick` takes <= 2 minutes."""
    install(session, "-e", f"packages/gem-core[{CORE_EXTRAS}]")
    session.run("python", "-m", "gem_core.demo", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the whole suite over every package; with arguments, run pytest with these and no coverage bar."""
    install(session, *editable(), groups=("test",))
    everything = (*WORKERS, "--cov", "--cov-report=term", "--cov-fail-under=90")
    session.run("pytest", *(session.posargs or everything), env=PYTEST_ENV)


@nox.session(name="tests-alone")
@nox.parametrize("package", [*PACKAGES, EXAMPLE], ids=[*PACKAGES, Path(EXAMPLE).name])
def tests_alone(session: nox.Session, package: str) -> None:
    """Install one package as a wheel, with what it depends on and no other package, and run its tests but the slow."""
    folder = package if package == EXAMPLE else f"packages/{package}"
    install(session, *dict.fromkeys(["./packages/gem-core", f"./{folder}"]))
    session.run("python", "-m", "gem_core.cli", "plugins", "--strict-plugins")  # before any extra is installed
    install(session, f"./packages/gem-core[{CORE_EXTRAS}]", groups=("test",))
    workers = WORKERS if package == "gem-core" else ()  # the others' suites are shorter than a worker's start
    session.run("pytest", *workers, "-m", "not slow", f"{folder}/tests", *session.posargs, env=PYTEST_ENV)


@nox.session(python=["3.11", "3.12", "3.13"])
def light(session: nox.Session) -> None:
    """Run the tests marked `light` where torch is not installed: what must not import it."""
    core = nox.project.load_toml(ROOT / "packages/gem-core/pyproject.toml")["project"]["dependencies"]
    without_torch = [requirement for requirement in core if not re.match(r"torch\b", requirement)]
    install(session, *without_torch, groups=("test",))
    session.install("--no-deps", *editable(extras=""))
    session.run("python", "-c", "import importlib.util as u; assert u.find_spec('torch') is None, 'torch is here'")
    files = sorted(path for path in ROOT.glob("packages/*/tests/**/test_*.py") if "mark.light" in path.read_text())
    session.run("pytest", "-m", "light", *map(str, files), *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, format and the rule of which package may import which; `-- --fix` repairs what it can."""
    install(session, groups=("lint",))
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")
    sources = os.pathsep.join(str(ROOT / "packages" / name / "src") for name in PACKAGES)
    session.run("lint-imports", env={"PYTHONPATH": sources})


@nox.session
def types(session: nox.Session) -> None:
    """Check types, strictly."""
    install(session, *editable(), groups=("types",))
    session.run("mypy", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation, warnings being errors; `tests` runs the guides as a reader would."""
    install(session, *editable(), groups=("docs",))
    session.run("sphinx-build", "-W", "--keep-going", "-q", "-b", "html", "docs", "docs/_build/html")


@nox.session
def wheels(session: nox.Session) -> None:
    """Build each package's sdist, and its wheel from that sdist, into dist/, and check what they hold."""
    install(session, groups=("build",))
    shutil.rmtree(ROOT / "dist", ignore_errors=True)  # an older version's files are not to be checked, nor published
    for name in PACKAGES:
        session.run("python", "-m", "build", "--no-isolation", "--outdir", "dist", f"packages/{name}", silent=True)
    session.run("python", "tools/check_dists.py", "dist", *PACKAGES)


@nox.session
def bench(session: nox.Session) -> None:
    """Run benchmarks/NAME.py: `nox -s bench -- NAME [arguments]`; what only it needs is in its inline metadata."""
    scripts = {path.stem: path for path in sorted((ROOT / "benchmarks").glob("*.py"))}
    name, *arguments = session.posargs or [""]
    if name not in scripts:
        session.error(f"no benchmark {name!r}: expected one of {', '.join(scripts) or '(there is none yet)'}")
    own = nox.project.load_toml(scripts[name], missing_ok=True).get("dependencies", [])
    install(session, *editable(), *own)
    session.run("python", str(scripts[name]), *arguments)


@nox.session
def evidence(session: nox.Session) -> None:
    """Make a claim's table, plot and figures anew: `nox -s evidence -- joint [--quick ...]`."""
    name, *arguments = session.posargs or [""]
    if name not in EVIDENCE:
        session.error(f"no evidence {name!r}: expected one of {', '.join(EVIDENCE)}")
    install(session, *editable())
    session.run("python", f"benchmarks/{name}.py", *arguments)
