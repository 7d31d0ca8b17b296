"""Fields of a request: rules by which they are served, ignored or refused, and the limits of a body.

`tools/docs.py` writes these tables into docs/reference/gateway.md. A test holds them against the types of the SDKs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from typing import TypeAlias, TypeVar

import msgspec

from shoal.errors import SessionError
from shoal.net.server import decoded

K = TypeVar("K", bound=msgspec.Struct)
MOST_ENTRIES = 8192
"""Entries of a list or an object in a field: messages, tools, texts."""
MOST_TOKENS = 1 << 18
"""Entries of a list of token ids, which cost less; also commas of a body."""
MOST_OPENED = 1 << 17
"""Lists and objects of a body: decoding more of them takes seconds, even if they are short."""
SHOWN_CHARACTERS = 200
"""Characters of a refused value that an error shows."""


class Refusal(SessionError):
    """Refusal of a field's value that cannot be served (HTTP 400); `field` names the field."""

    def __init__(self, field: str, expected: str, came: object, remedy: str = "") -> None:
        shown = repr(came)
        shown = shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]}..."
        super().__init__(f"{field}: expected {expected}, got {shown}{f'; {remedy}' if remedy else ''}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Served:
    """A field that is served."""

    how: str = ""
    values: tuple[object, ...] = ()
    """Values that are served; empty for all that the API has."""
    remedy: str = ""
    """Workaround for other values, as an imperative."""

    def check(self, name: str, value: object) -> None:
        """Raises `Refusal` for a value that is not served."""
        if self.values and value is not None and value not in self.values:
            raise Refusal(name, f"one of {', '.join(map(repr, self.values))}", value, self.remedy)


@dataclass(frozen=True, slots=True)
class Ignored:
    """A field without effect here."""

    reason: str

    def check(self, name: str, value: object) -> None:
        """Takes any value."""


@dataclass(frozen=True, slots=True)
class Unserved:
    """A field that is refused, except for values without effect."""

    remedy: str
    """Workaround, as an imperative."""
    values: tuple[object, ...] = ()

    def check(self, name: str, value: object) -> None:
        """Raises `Refusal` for a value that would have an effect."""
        if value is not None and value not in self.values:
            raise Refusal(name, f"none or {self.values[-1]!r}" if self.values else "none", value, self.remedy)


Rule: TypeAlias = Served | Ignored | Unserved
Rules: TypeAlias = Mapping[str, Rule]
"""Rules by the paths of fields, such as `tools[].type`; a rule holds for all below its field."""
Node: TypeAlias = "dict[str, Node]"


class FieldTable:
    """Rules of an API's fields, in the form in which bodies are checked."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.names = sorted({path.partition(".")[0].removesuffix("[]") for path in rules})
        """Fields at the top of a body."""
        self._tree: Node = {}
        for path, rule in rules.items():
            if isinstance(rule, Unserved) or (isinstance(rule, Served) and rule.values):
                node = self._tree
                for part in path.replace("[]", ".[]").split("."):
                    node = node.setdefault(part, {})

    def check(self, fields: Mapping[str, object], *, strict: bool) -> None:
        """Raises `Refusal` for a value that is not served; `strict` also for an unknown field."""
        for name, value in fields.items():
            check_size(name, value)
            if (node := self._tree.get(name)) is not None:
                self._check(node, name, name, value)
            elif strict and name not in self.names:
                near = get_close_matches(name, self.names, 1)
                meant = f"; {near[0]!r} may be meant" if near else "; leave it out"
                raise Unknown(name, f"{name}: this field is not known here{meant}")

    def _check(self, node: Node, path: str, where: str, value: object) -> None:
        """Checks a value and all below it; `where` is its path with the indexes of lists."""
        if (rule := self.rules.get(path)) is not None:
            rule.check(where, value)
        if isinstance(value, dict):
            for name, below in node.items():
                if name in value:
                    self._check(below, f"{path}.{name}", f"{where}.{name}", value[name])
        elif isinstance(value, list) and (each := node.get("[]")) is not None:
            for i, one in enumerate(value):
                self._check(each, f"{path}[]", f"{where}[{i}]", one)


def fields_of(data: bytes, table: FieldTable, *, strict: bool) -> dict[str, object]:
    """Fields of a body; `strict` refuses unknown ones. Raises `SessionError` or `Refused`."""
    for what, count, most in (
        ("lists and objects", data.count(b"[") + data.count(b"{"), MOST_OPENED),
        ("entries", data.count(b","), MOST_TOKENS),
    ):
        if count > most:
            raise SessionError(f"body: expected at most {most} {what}, with those in its texts; got {count}")
    fields = decoded(data, dict[str, object])
    table.check(fields, strict=strict)
    return fields


def check_size(name: str, value: object) -> None:
    """Raises `Refusal` for a list or an object with too many entries, before it is converted."""
    if not isinstance(value, list | dict):
        return
    is_tokens = isinstance(value, list) and bool(value) and isinstance(value[0], int)
    most = MOST_TOKENS if is_tokens else MOST_ENTRIES
    if len(value) > most:
        raise Refusal(name, f"at most {most} entries", len(value), "send fewer at a time")
    for i, one in enumerate(value if isinstance(value, list) and not is_tokens else ()):
        parts = one.get("content") if isinstance(one, dict) else one
        if isinstance(parts, list) and not (parts and isinstance(parts[0], int)) and len(parts) > MOST_ENTRIES:
            raise Refusal(f"{name}[{i}]", f"at most {MOST_ENTRIES} entries", len(parts), "join them")


class Unknown(Refusal):
    """Refusal of a field that no API of the gateway has."""

    def __init__(self, field: str, said: str) -> None:
        SessionError.__init__(self, said)
        self.field = field


def converted(fields: Mapping[str, object], kind: type[K]) -> K:
    """Request of these fields. Raises `SessionError`, naming the field."""
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise SessionError(f"body: {error}") from error


def unicode(where: str, text: str) -> str:
    """The text, checked for lone surrogates. Raises `Refusal`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refusal(where, "Unicode text", "lone surrogates") from None
    return text


class _Section(msgspec.Struct, forbid_unknown_fields=True):
    """One section of fields.toml; a text is the first field of its rule."""

    served: dict[str, str | Served] = {}
    ignored: dict[str, str] = {}
    refused: dict[str, str | Unserved] = {}

    @property
    def rules(self) -> Rules:
        """Rules by field."""
        found: dict[str, Rule] = {}
        for kind, given in ((Served, self.served), (Ignored, self.ignored), (Unserved, self.refused)):
            for names, one in given.items():
                found |= dict.fromkeys(names.split(", "), kind(one) if isinstance(one, str) else one)
        return found


_TEXT = files("shoal.gateway").joinpath("fields.toml").read_text()
_SECTIONS: Mapping[str, _Section] = msgspec.toml.decode(_TEXT, type=dict[str, _Section])


def rules_of(*sections: str) -> Rules:
    """Rules of some sections; a later section replaces rules of an earlier one."""
    return {name: rule for section in sections for name, rule in _SECTIONS[section].rules.items()}
