"""Credentials in urls, kept out of resolved.toml and of the report, in a file that only its owner reads."""

from pathlib import Path

import msgspec
from pydantic import JsonValue

from shoal.config.tree import mapped
from shoal.errors import MASK, ConfigError, without_credentials

FILE = "credentials.json"


def masked(tree: dict[str, JsonValue], hidden: dict[str, str]) -> dict[str, JsonValue]:
    """The settings without the credentials of URLs; `hidden` gets the original texts by their place.

    >>> hidden: dict[str, str] = {}
    >>> masked({"swarm": {"servers": ["nats://secret@reef:4222"]}}, hidden)
    {'swarm': {'servers': ['nats://***@reef:4222']}}
    >>> hidden
    {'.swarm.servers.0': 'nats://secret@reef:4222'}
    """

    def mask(where: str, value: JsonValue) -> JsonValue:
        if not isinstance(value, str) or f"://{MASK}@" not in (shown := without_credentials(value)):
            return value
        hidden[where] = value
        return shown

    shown: dict[str, JsonValue] = mapped(tree, mask)
    return shown


def restored(tree: dict[str, JsonValue], path: Path) -> dict[str, JsonValue]:
    """The settings of a file with the texts that `masked` hid, except where the masked text was edited since.

    The texts lie in the file's folder, unless it had none or was copied without them.
    """
    try:
        hidden = msgspec.json.decode(path.with_name(FILE).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError, ValueError):
        hidden = {}

    def restore(where: str, value: JsonValue) -> JsonValue:
        whole = hidden.get(where, "")
        return whole if value == without_credentials(whole) else value

    whole: dict[str, JsonValue] = mapped(tree, restore)
    return whole


def refuse_masked(tree: dict[str, JsonValue]) -> None:
    """Raises `ConfigError` when settings need credentials whose file is missing."""
    hidden: dict[str, str] = {}
    masked(tree, hidden)
    for where, text in hidden.items():
        if f"://{MASK}@" in text:
            raise ConfigError(f"{where[1:]}: expected credentials in place of {MASK}, which {FILE} of the run has")
