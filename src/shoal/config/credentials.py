"""Credentials in urls, kept out of resolved.toml and of the report, in a file that only its owner reads."""

import json
import re
from pathlib import Path

from pydantic import JsonValue

from shoal.config.settings import Config
from shoal.errors import ConfigError

FILE = "credentials.json"
MASK = "***"
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def masked(tree: JsonValue, hidden: dict[str, str], where: str = "") -> JsonValue:
    """The settings without the credentials of urls; the texts that had some are put into `hidden`, by their place.

    >>> hidden: dict[str, str] = {}
    >>> masked({"swarm": {"servers": ["nats://secret@reef:4222"]}}, hidden)
    {'swarm': {'servers': ['nats://***@reef:4222']}}
    >>> hidden
    {'.swarm.servers.0': 'nats://secret@reef:4222'}
    """
    if isinstance(tree, dict):
        return {key: masked(value, hidden, f"{where}.{key}") for key, value in tree.items()}
    if isinstance(tree, list):
        return [masked(value, hidden, f"{where}.{index}") for index, value in enumerate(tree)]
    if not isinstance(tree, str) or not _CREDENTIALS.search(tree):
        return tree
    hidden[where] = tree
    return _CREDENTIALS.sub(MASK, tree)


def restored(tree: JsonValue, hidden: dict[str, str], where: str = "") -> JsonValue:
    """The settings with the texts that `masked` has hidden, where they are still as it left them."""
    if isinstance(tree, dict):
        return {key: restored(value, hidden, f"{where}.{key}") for key, value in tree.items()}
    if isinstance(tree, list):
        return [restored(value, hidden, f"{where}.{index}") for index, value in enumerate(tree)]
    whole = hidden.get(where, "")
    return whole if tree == _CREDENTIALS.sub(MASK, whole) else tree


def hidden_beside(path: Path) -> dict[str, str]:
    """The hidden texts of a settings file; empty without any, and for a file that was not copied along."""
    try:
        hidden = json.loads(path.with_name(FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(where): str(text) for where, text in hidden.items()} if isinstance(hidden, dict) else {}


def refuse_masked(config: Config) -> None:
    """Raises `ConfigError` when credentials are needed that only a file which is missing has."""
    hidden: dict[str, str] = {}
    masked(config.model_dump(mode="json", exclude_none=True), hidden)
    for where, text in hidden.items():
        if f"://{MASK}@" in text:
            raise ConfigError(f"{where[1:]}: expected credentials in place of {MASK}, which {FILE} of the run has")
