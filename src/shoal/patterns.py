"""Regular expressions of users and schemas, matched by RE2: in time linear in the text, whatever the pattern.

RE2 knows no lookaround and no backreferences; its `\\d`, `\\w`, `\\s` and `\\b` mean ASCII.
"""

from typing import Protocol

import re2


class Pattern(Protocol):
    """The used part of a compiled pattern; a match is anything but None."""

    def search(self, text: str) -> object: ...
    def fullmatch(self, text: str) -> object: ...


def compiled(pattern: str) -> Pattern:
    """Compiles a pattern whose dot also matches newlines. Raises `ValueError` for a pattern that RE2 refuses.

    >>> compiled("(a+)+$").search("a" * 40 + "!") is None
    True
    """
    options = re2.Options()
    options.dot_nl = True
    options.log_errors = False
    try:
        made: Pattern = re2.compile(pattern, options)
    except re2.error as error:
        text = error.args[0]
        why = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
        raise ValueError(f"expected a regular expression as RE2 knows them: {why}") from None
    return made
