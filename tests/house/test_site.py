"""The site of the docs: every page is reached, the API has the public names, nothing is fetched from elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shoal

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


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
