"""Rules of every field that clients of each API can send; fields.toml holds them.

`tools/docs.py` writes these tables into docs/reference/gateway.md. A test holds them against the types of the SDKs.
"""

from collections.abc import Mapping
from importlib.resources import files

import msgspec

from shoal.gateway.fields import Ignored, Rule, Rules, Served, Unserved


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
