"""What the packages of the workspace must have in common."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


def project(package: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    return table


def test_one_version() -> None:
    versions = {package.name: project(package)["version"] for package in PACKAGES}
    assert len(versions) == 5
    assert len(set(versions.values())) == 1, versions


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_package_follows_the_common_rules(package: Path) -> None:
    table = project(package)
    assert table["name"] == package.name
    assert table["requires-python"] == project(ROOT / "packages/gem-core")["requires-python"]
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (package / "src" / package.name.replace("-", "_") / "py.typed").is_file()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_package_depends_on_gem_core_only_and_in_lockstep(package: Path) -> None:
    table = project(package)
    ours = [requirement for requirement in table["dependencies"] if requirement.startswith("gem-")]
    assert ours == ([] if package.name == "gem-core" else [f"gem-core=={table['version']}"])


def test_changelog_names_the_version() -> None:
    version = project(PACKAGES[0])["version"]
    assert re.search(rf"^## \[{re.escape(version)}\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)


def test_links_of_the_top_documents_exist() -> None:
    for document in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        text = (ROOT / document).read_text()
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(r'src="([^"]+)"', text):
            assert target.startswith("https://") or (ROOT / target).exists(), f"{document} links to {target}"
