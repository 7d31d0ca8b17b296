"""Runs tests of a program that lives in another sandbox. Runs in its own sandbox, with pytest for pytest files.

A test calls functions of the program by name. Arguments and values travel as text. The values that the tests compare
are made here, of Python's own types. No object, name or code of the program ever comes in.
"""

# mypy: ignore-errors
# Untyped like `solution`, which is at the other end.
import builtins
import json
import marshal
import os
import sys

LONGEST_LINE = 1 << 20
KINDS = {
    "i": lambda text: int(text, 16),
    "f": float,
    "b": bytes.fromhex,
    "c": lambda pair: complex(float(pair[0]), float(pair[1])),
}
SEQUENCES = {"t": tuple, "s": set, "z": frozenset, "n": iter}
ITERATORS = []
"""True after an iterator of the program came in."""


class TestsRefused(BaseException):
    """No program can be judged by these tests."""


class JudgedProgram:
    """The other sandbox. `fault` is the program's fault after which no test can run; empty without a fault.

    `missing` is a name that a test wanted and the program does not have. `has_spoken` is true after the first value of
    the program, because the program may have caused any later error.
    """

    def __init__(self, channel):
        self.requests, self.replies = os.fdopen(os.dup(channel), "wb"), os.fdopen(os.dup(channel), "rb")
        self.fault, self.missing, self.has_spoken = "", "", False

    def ask(self, *request):
        """The program's reply. Raises `TestsRefused` for arguments that are no plain values, and `RuntimeError`."""
        try:
            packed = marshal.dumps(request)
        except ValueError:
            if ITERATORS:
                raise TypeError("the program gave an iterator, which cannot be handed back to it") from None
            raise TestsRefused(f"a test hands {request[0]} something that is no plain value") from None
        try:
            self.requests.write(packed)
            self.requests.flush()
            line = self.replies.readline(LONGEST_LINE)
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            self.fault = self.fault or "the program ended, or said too much"
            raise RuntimeError(self.fault)
        try:
            reply = json.loads(line)
            self.fault = self.fault or reply.get("failed", "")
        except (ValueError, RecursionError, AttributeError):
            self.fault = "the program's reply is none"
        if self.fault:
            raise ImportError(self.fault)
        self.has_spoken = self.has_spoken or "function" not in reply
        sys.stdout.write(str(reply.get("o", "")))
        return reply

    def has(self, name):
        """True if the program has a name that a test can use."""
        return "x" not in self.ask(name, None, None)

    def attribute(self, name):
        """A stand-in for a function of the program, or the value of another name."""
        reply = self.ask(name, None, None)
        if "x" in reply:
            self.missing = f"the program has no {name}"
            raise AttributeError(name)
        if "function" not in reply:
            return value_of(reply["v"], name)

        def function(*args, **kwargs):
            reply = self.ask(name, args, kwargs)
            if "x" in reply:
                raise error_of(reply["x"], str(reply["e"]))
            for arg, back in zip(args, reply["back"], strict=True):
                restore(arg, back)
            return value_of(reply["v"], name)

        function.__name__ = name
        return function


def value_of(tree, name):
    """The value of a reply; an odd reply raises an error, so that the test fails."""
    if isinstance(tree, list):
        return [value_of(item, name) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((tag, inner),) = tree.items()
    if tag == "d":
        return {value_of(key, name): value_of(item, name) for key, item in inner}
    if tag == "n":
        ITERATORS.append(name)
    if tag in SEQUENCES:
        return SEQUENCES[tag]([value_of(item, name) for item in inner])
    if tag in KINDS:
        return KINDS[tag](inner)
    raise TypeError(f"{name} gave {inner}, which is no plain value")


def restore(arg, back):
    """Gives a container that the program changed its new content."""
    if type(arg) in (list, dict, set):
        new = value_of(back, "the program")
        if type(new) is type(arg) and new != arg:
            arg.clear()
            (arg.extend if type(arg) is list else arg.update)(new)


def error_of(kinds, text):
    """The error class of Python from which the program's error class derives."""
    for kind in kinds:
        found = getattr(builtins, str(kind), None)
        if isinstance(found, type) and issubclass(found, Exception) and found is not UnicodeDecodeError:
            return found(text.partition(": ")[2])
    return RuntimeError(text)


def run_snippets(tests, program, report):
    """Runs statements whose assertions must hold, each with its own names and the program's."""
    for number, (text, names) in enumerate(tests["snippets"]):
        why = ""
        try:
            scope = {"__name__": "test", **{name: program.attribute(name) for name in names}}
            exec(compile(text, "test", "exec"), scope)
        except TestsRefused:
            raise
        except BaseException as error:
            why = f"{type(error).__name__}: {error}".strip(": ")
        report(f"test {number + 1}", why)


def run_file(tests, program, report):
    """Runs a test file with pytest."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    try:
        import pytest
    except ImportError:
        raise TestsRefused("pytest files need pytest: pip install pytest") from None

    class Solution(type(sys)):
        def __getattr__(self, name):
            if name == "__all__":
                return [name for name in tests["names"] if program.has(name)]
            if name not in tests["names"]:  # pytest itself asks a module for many things
                raise AttributeError(name)
            return program.attribute(name)

    class Plugin:
        refused, broken, count = "", "", 0

        def pytest_collectreport(self, report):
            if report.failed:
                self.broken = f"the test file cannot be collected: {str(report.longrepr)[-300:]}"

        def pytest_exception_interact(self, call):
            kind = call.excinfo.type.__name__
            if kind in ("FixtureLookupError", "TestsRefused"):
                self.refused = f"{kind}: {call.excinfo.value}"

        def pytest_runtest_logreport(self, report):
            if report.outcome == "failed" or (report.when == "call" and report.outcome == "passed"):
                self.count += 1
                why = str(report.longrepr)[-300:] or "failed" if report.outcome == "failed" else ""
                said(report.nodeid.partition("::")[2], why)

    said, plugin = report, Plugin()
    sys.modules["solution"] = Solution("solution")
    with open("test_solution.py", "w") as file:
        file.write(tests["file"])
    options = ["-q", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull, "--rootdir=.", "--confcutdir=."]
    pytest.main([*options, "test_solution.py"], plugins=[plugin])
    why = plugin.broken or ("" if plugin.count else "no test of the file was run to its end")
    if plugin.refused or (why and not (program.has_spoken or program.fault)):
        raise TestsRefused(plugin.refused or why)
    if why or program.fault:
        report("the test file", program.fault or program.missing or why)


def main():
    program, out = JudgedProgram(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    with open("tests", "rb") as file:
        tests = marshal.load(file)
    program.requests.write(marshal.dumps(tests["limits"]))

    def say(line):
        os.write(out, json.dumps(line).encode() + b"\n")

    def report(name, why):
        say({"name": name, "why": why[:500]})

    try:
        (run_snippets if "snippets" in tests else run_file)(tests, program, report)
        say({"end": True})
    except TestsRefused as error:
        say({"refused": str(error)})


if __name__ == "__main__":
    main()
