"""Contract: what is published. The wheel and the sdist are built here, or are those of the folder RANKWISE_DIST (`make release`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import rankwise

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that holds one wheel and one sdist."""
    if given := os.environ.get("RANKWISE_DIST"):
        return ROOT / given
    if find_spec("hatchling") is None or find_spec("build") is None:
        pytest.skip("hatchling is not installed here, and an isolated build would need the network")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


def _git_files() -> set[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        told = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=20, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no clone")
    return {name for name in told.split("\0") if name and (ROOT / name).is_file()}


def test_the_wheel_holds_what_ranks_need(dist: Path) -> None:
    """Every module, py.typed, the licence, the pages of rules and the hook are in the wheel, and no test is."""
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src"
    pages = {f"rankwise/{path.relative_to(ROOT)}" for path in (ROOT / "docs" / "rules").rglob("*.md")}
    assert {path.relative_to(package).as_posix() for path in package.rglob("*.py")} <= names
    assert {"rankwise/py.typed", "rankwise/docs/reference/failure-classes.md", *pages} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("entry_points.txt") for name in names)
    assert not [name for name in names if not name.startswith("rankwise")]


def test_the_sdist_is_the_clone(dist: Path) -> None:
    """Whoever has the sdist can do all that one with a clone can: each of git's files is in it, and what lies beside them is not."""
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames() if packed.getmember(name).isfile()}
    assert names - {"PKG-INFO"} == _git_files()


def test_the_version_is_the_changelogs(dist: Path) -> None:
    """Wheel, sdist and package have the version of the changelog's newest section, above which stands what is not released."""
    titles = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert titles[0] == "[Unreleased]"
    found = re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d", titles[1])
    assert found, titles[1]
    assert rankwise.__version__ == found[1]
    assert sorted(path.name for path in dist.iterdir() if path.name != ".gitignore") == [
        f"rankwise-{found[1]}-py3-none-any.whl",
        f"rankwise-{found[1]}.tar.gz",
    ]


def test_the_citation_names_this_version() -> None:
    """CITATION.cff is what `rankwise --version` and the changelog say, in the form of its schema (1.2.0)."""
    yaml = pytest.importorskip("yaml")
    told = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{told['version']}] - {told['date-released']}" in changelog
    assert told["version"] == rankwise.__version__
    assert {"cff-version", "message", "title", "authors"} <= set(told)


def test_forms_for_issues_are_what_github_takes() -> None:
    """Each form has a name, a description and a body of known fields with names of their own; GitHub shows none that has not."""
    yaml = pytest.importorskip("yaml")
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
    assert {path.stem for path in forms} == {"bug", "hang", "feature"}
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert set(form) == {"name", "description", "labels", "body"}, path.name
        names = [field["id"] for field in form["body"]]
        assert len(names) == len(set(names)), path.name
        for field in form["body"]:
            assert field["type"] in {"textarea", "dropdown"}, (path.name, field)
            assert field["attributes"]["label"], (path.name, field)
            assert field["type"] != "dropdown" or field["attributes"]["options"], (path.name, field)
