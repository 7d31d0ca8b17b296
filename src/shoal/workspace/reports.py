"""Results of tests by name, from the reports of pytest, unittest and TAP (pure)."""

import re
from collections.abc import Mapping
from enum import StrEnum
from xml.etree import ElementTree

EXIT = "exit"
"""Name of the only test of a command whose exit code decides."""
MOST_TAGS = 200_000
"""Tags of an XML report, of some ten thousand tests; each costs memory and time, however short it is."""
_UNITTEST = re.compile(
    r"^(\w+) \(([\w.]+)\)(?:\n(?!\w+ \([\w.]+\)).*)? \.\.\. (ok|FAIL|ERROR|skipped|expected failure)", re.MULTILINE
)
_TAP = re.compile(
    r"^(not )?ok\b(?:[ \t]+\d+)?[ \t]*(?:-[ \t]*)?([^#\n]*)(?:#[ \t]*(skip|todo).*)?$", re.MULTILINE | re.IGNORECASE
)


class ReportKind(StrEnum):
    """Forms in which a test command reports."""

    JUNIT = "junit"
    """XML of pytest; `judge` adds the options that write it."""
    UNITTEST = "unittest"
    """Output of `python -m unittest -v`."""
    TAP = "tap"
    EXIT_CODE = "exit"
    """Code 0 stands for success of the only test, `exit`."""


class TestStatus(StrEnum):
    """Result of one test."""

    __test__ = False  # it is no test of pytest's

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    """Expected to fail, and did."""


def results(kind: ReportKind, report: bytes, output: str, exit_code: int | None) -> Mapping[str, TestStatus]:
    """Results by test; empty when there is no report, or one that cannot be read."""
    match kind:
        case ReportKind.EXIT_CODE:
            return {EXIT: TestStatus.PASSED if exit_code == 0 else TestStatus.FAILED}
        case ReportKind.JUNIT:
            return _of_junit(report)
        case ReportKind.UNITTEST:
            return dict(map(_of_unittest, _UNITTEST.finditer(output)))
        case ReportKind.TAP:
            return dict(_of_tap(number, found) for number, found in enumerate(_TAP.finditer(output), 1))


def _of_unittest(found: re.Match[str]) -> tuple[str, TestStatus]:
    """Name and result in a line; newer Pythons repeat the method's name in the parentheses."""
    name = f"{found[2].removesuffix(f'.{found[1]}')}.{found[1]}"
    if found[3] == "expected failure":
        return name, TestStatus.XFAILED
    return name, _status(passed=found[3] == "ok", skipped=found[3] == "skipped")


def _of_tap(number: int, found: re.Match[str]) -> tuple[str, TestStatus]:
    directive, name = (found[3] or "").lower(), found[2].strip() or str(number)
    if found[1] and directive == "todo":
        return name, TestStatus.XFAILED
    return name, _status(passed=not found[1], skipped=directive == "skip")


def _status(*, passed: bool, skipped: bool) -> TestStatus:
    return TestStatus.SKIPPED if skipped else TestStatus.PASSED if passed else TestStatus.FAILED


def _of_junit(report: bytes) -> Mapping[str, TestStatus]:
    """Results by pytest's node id, such as `tests/test_a.py::TestB::test_c[1]`."""
    found: dict[str, TestStatus] = {}
    if report.count(b"<") > MOST_TAGS:
        return found
    try:
        cases = list(ElementTree.fromstring(report).iter("testcase"))
    except ElementTree.ParseError:
        return {}
    for case in cases:
        file, owner, name = (case.get(key, "") for key in ("file", "classname", "name"))
        inner = owner.removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".").replace(".", "::")
        test = "::".join(filter(None, (file or owner, inner if file else "", name)))
        failed = case.find("failure") is not None or case.find("error") is not None
        skipped = None if failed else case.find("skipped")
        status = _status(passed=not failed, skipped=skipped is not None)
        if skipped is not None and skipped.get("type") == "pytest.xfail":
            status = TestStatus.XFAILED
        if found.get(test) is not TestStatus.FAILED:  # a test and the error of its tear-down are two cases
            found[test] = status
    return found
