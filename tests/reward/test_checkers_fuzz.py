"""The checkers are linear in text that was made to slow them down, and the fuzzer knows those that are not."""

import re

import pytest

from checkers_fuzz import READERS, WORDS, Reader, complaint, findings, unbounded

# Patterns that once hung the `math` checker, and the main process over tool calls.
_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_WORD = r"(?:(?:cm|km)\b|(?!(?:sin|cos)\b)[A-Za-z]{3,})"
_UNIT = re.compile(rf"(?<=[\d.}}\s])\s*(?:°|{_WORD}(?:\s*/\s*[A-Za-z]+)*\.?|\s)+$", re.IGNORECASE)
_AFTER = re.compile(r"(?:####|\b(?:final )?answer(?:\s+is)?\s*[:=]?)\s*(.+)", re.IGNORECASE)


def _last_boxed(text: str) -> str | None:
    for found in reversed(list(re.finditer(r"\\boxed\{", text))):
        depth = 1
        for position in range(found.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[found.end() : position]
    return None


HUNG = (
    Reader("unit", lambda text: _UNIT.sub("", text), ("7", "(", ",", " ", *WORDS)),
    Reader("after", _AFTER.findall, ("answer", "\n", " ", ".")),
    Reader("tagged", _TAGGED.findall, ("<tool_call>", "</tool_call>", "a")),
    Reader("last_boxed", _last_boxed, ("\\boxed{", "{", "}", "1")),
)


@pytest.mark.parametrize("reader", HUNG, ids=lambda reader: reader.name)
def test_the_fuzzer_finds_what_once_hung(reader: Reader) -> None:
    assert next(findings(4000, 0, [reader]), "")


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_every_reader_is_linear_in_hostile_text(reader: Reader) -> None:
    assert list(findings(60, 1, [reader])) == []


@pytest.mark.parametrize(
    ("hung", "before", "unit"),
    [(HUNG[1], "answer", "\n" * 1500), (HUNG[3], "", "\\boxed{" * 200)],
    ids=["newlines", "boxes"],
)
def test_texts_that_once_took_quadratic_time_are_read_in_linear_time(hung: Reader, before: str, unit: str) -> None:
    assert any(complaint(hung.read, before + unit * n, before + 2 * unit * n) for n in (1, 2, 3, 4))
    for reader in READERS:
        if reader.name in ("mathematics", "answers"):
            assert not complaint(reader.read, before + 8 * unit, before + 16 * unit), reader.name


def test_the_whole_math_checker_keeps_its_bound() -> None:
    assert list(unbounded(12, 1)) == []
