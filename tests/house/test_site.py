"""The site of the docs: every page is reached, the API has the public names, nothing is fetched from elsewhere."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shoal

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = built(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def built(root: Path, folder: Path) -> "subprocess.CompletedProcess[str]":
    """The end of a strict build, as `make site` starts it; with --quiet MkDocs counts no warnings."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=root,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path) -> None:
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "index.md").write_text("[raw data](../benchmarks/nowhere.json)")
    (tmp_path / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text().partition("nav:")[0])
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "site_pages.py", tmp_path / "tools")
    (tmp_path / "src").mkdir()
    done = built(tmp_path, tmp_path / "site")
    assert done.returncode == 1, done.stderr
    assert "'benchmarks/nowhere.json', but the target is not found" in done.stderr


def test_every_page_of_the_docs_is_reached_from_the_menu(site: Path) -> None:
    menu = (site / "index.html").read_text()
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(re.findall(r'href="([\w/.-]+\.html)"', menu)) | {"index.html"}


def test_the_api_page_has_the_public_names_with_their_docstrings(site: Path) -> None:
    page = (site / "api" / "index.html").read_text()
    for name in shoal.__all__:
        if name not in {"Config", "ShoalError"}:  # these are on the page by their modules
            assert re.search(rf'id="[\w.]*\.{name}"', page), name


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loaded = re.compile(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(https?://[^"]+)"')
    for page in site.rglob("*.html"):
        assert [url for url in loaded.findall(page.read_text()) if "canonical" not in url] == [], page.name
