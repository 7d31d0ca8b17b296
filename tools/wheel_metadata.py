"""Metadata of the package: the README as its description, with links that lead somewhere from outside the repository.

Hatchling calls it. `SHOAL_HOME_URL`, where set at the build, is the address of the repository's files, such as
`https://HOST/OWNER/shoal/blob/main`: relative links and pictures then become absolute, and it is the project's URL.
Without it a relative link is only its text.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")
IN_PAGE = re.compile(r"\[([^\]]*)\]\(#[^)\s]*\)")


def description(readme: str, home_url: str) -> str:
    """README's text without relative links; a picture that has no address is left out."""

    def absolute(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        if home_url:
            return f"{mark}[{text}]({home_url.rstrip('/')}/{target})"
        return "" if mark else text

    return IN_PAGE.sub(r"\1", RELATIVE.sub(absolute, readme))


class WheelMetadata(MetadataHookInterface):
    """Hook of hatchling."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets the description and, where it is known, the address of the project."""
        home_url = os.environ.get("SHOAL_HOME_URL", "")
        text = description((Path(self.root) / "README.md").read_text(encoding="utf-8"), home_url)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if home_url:
            metadata["urls"] = {"Homepage": home_url}
