"""A hook of MkDocs: pages that lie beside what they describe become part of the site, and links to them lead there."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "experiments/*/results/*"
BESIDE = ("experiments/*/claim.md", f"{RESULTS}.md", f"{RESULTS}.png", "examples/**/README.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the claims and results of the experiments and the pages of the examples."""
    for path in sorted(path for pattern in BESIDE for path in ROOT.glob(pattern)):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links out of docs/ into links within the site."""
    depth = page.file.src_uri.count("/")
    inside = re.sub(r"\]\((\.\./)+(experiments|examples)/", rf"]({'../' * depth}\2/", markdown)
    return re.sub(r"\]\((\.\./)+docs/", rf"]({'../' * depth}", inside)
