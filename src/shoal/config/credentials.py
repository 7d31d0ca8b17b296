"""Credentials in urls, kept out of resolved.toml and of the report, in a file that only its owner reads."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import JsonValue

from shoal.errors import ConfigError

FILE = "credentials.json"
MASK = "***"
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def masked(tree: JsonValue, hidden: dict[str, str]) -> JsonValue:
    """The settings without the credentials of urls; the texts that had some are put into `hidden`, by their place.

    >>> hidden: dict[str, str] = {}
    >>> masked({"swarm": {"servers": ["nats://secret@reef:4222"]}}, hidden)
    {'swarm': {'servers': ['nats://***@reef:4222']}}
    >>> hidden
    {'.swarm.servers.0': 'nats://secret@reef:4222'}
    """

    def mask(where: str, text: str) -> str:
        if _CREDENTIALS.search(text):
            hidden[where] = text
        return _CREDENTIALS.sub(MASK, text)

    return _mapped(tree, mask)


def restored(tree: JsonValue, hidden: Mapping[str, str]) -> JsonValue:
    """The settings with the texts that `masked` has hidden, where they are still as it left them."""

    def restore(where: str, text: str) -> str:
        whole = hidden.get(where, "")
        return whole if text == _CREDENTIALS.sub(MASK, whole) else text

    return _mapped(tree, restore)


def _mapped(tree: JsonValue, text: Callable[[str, str], str], where: str = "") -> JsonValue:
    """The settings with each text replaced; `text` gets its place and the text."""
    if isinstance(tree, dict):
        return {key: _mapped(value, text, f"{where}.{key}") for key, value in tree.items()}
    if isinstance(tree, list):
        return [_mapped(value, text, f"{where}.{index}") for index, value in enumerate(tree)]
    return text(where, tree) if isinstance(tree, str) else tree


def hidden_beside(path: Path) -> dict[str, str]:
    """The hidden texts of a settings file; empty without any, and for a file that was not copied along."""
    try:
        hidden = json.loads(path.with_name(FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(where): str(text) for where, text in hidden.items()} if isinstance(hidden, dict) else {}


def refuse_masked(tree: JsonValue) -> None:
    """Raises `ConfigError` when settings need credentials that only a file which is missing has."""
    hidden: dict[str, str] = {}
    masked(tree, hidden)
    for where, text in hidden.items():
        if f"://{MASK}@" in text:
            raise ConfigError(f"{where[1:]}: expected credentials in place of {MASK}, which {FILE} of the run has")
