"""A hook of MkDocs: files outside `docs/` that a page links to join the site, and links lead to them there."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("benchmarks/results/*.md", "experiments/*/claim.md", "experiments/*/results/*.md", "examples/**/README.md")
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
FOLDERS = ("benchmarks", "examples", "experiments")
"""Folders beside `docs/` whose files may become part of the site."""
OUT_OF_DOCS = re.compile(rf"\]\((\.\./)+({'|'.join(FOLDERS)})/")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the claims, results and examples, and every file of the repository that a page links to."""
    pages = [*(ROOT / "docs").rglob("*.md"), *(path for pattern in PAGES for path in ROOT.glob(pattern))]
    for path in sorted({*pages, *(target for page in pages for target in _linked(page))}):
        if path.relative_to(ROOT).parts[0] in FOLDERS:
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links out of docs/ into links within the site."""
    depth = page.file.src_uri.count("/")
    inside = OUT_OF_DOCS.sub(rf"]({'../' * depth}\2/", markdown)
    return re.sub(r"\]\((\.\./)+docs/", rf"]({'../' * depth}", inside)


def _linked(page: Path) -> list[Path]:
    """Files of the repository to which a page links."""
    targets = [(page.parent / target).resolve() for target, _ in LINK.findall(page.read_text(encoding="utf-8"))]
    return [path for path in targets if path.is_file() and path.is_relative_to(ROOT)]
