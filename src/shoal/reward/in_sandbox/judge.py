"""Runs tests of a program that lives in another sandbox. Runs in its own sandbox, with pytest for pytest files.

A test calls functions of the program by name. Arguments and values travel as text. The values that the tests compare
are made here, of Python's own types. No object, name or code of the program ever comes in.
"""

# mypy: ignore-errors
# Untyped like `solution`, its peer.
import ast
import builtins
import inspect
import json
import marshal
import math
import operator
import os
import sys

LONGEST_LINE = 1 << 20
APART = {"pytest", "sys", "os", "platform"}
"""Names in decorators that a program cannot define."""
SEQUENCES = {"t": tuple, "s": set, "z": frozenset, "n": iter}
ITERATORS = []
"""True after an iterator of the program came in."""
TESTS = {"words": "", "now": ""}
"""Text of the tests in lower case, which decides on nan and inf, and the source of the test that runs now."""


class TestsRefused(BaseException):
    """No program can be judged by these tests."""


class Wrong(BaseException):
    """The program's value is invalid. A BaseException, so that no test takes it for an error of the program."""


def _stays(nan, *_):
    return nan


def _has_no_order(*_):
    raise Wrong("the program gave NaN, which has no order")


_ARITHMETIC = "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg pos abs round"
_ORDERS = dict.fromkeys(("__lt__", "__le__", "__gt__", "__ge__"), _has_no_order)
Nan = type("Nan", (float,), {**_ORDERS, **{f"__{name}__": _stays for name in _ARITHMETIC.split()}})
"""NaN of the program: it stays itself in arithmetic, so that max() and min() cannot lose it."""


def _is_used(self, *_):
    raise Wrong(f"the program gave {self}, which no test speaks of")


def _compared(name):
    def compare(self, other):
        if self.value != self.value and name not in ("eq", "ne"):
            _has_no_order()
        return getattr(operator, name)(self.value, other)

    return compare


class Unspoken:
    """Infinity or NaN of the program that no test names. It is compared as a number; all other use raises `Wrong`.

    Not a subclass of `float`: functions in C, such as `math.fabs`, would read its value and bypass this rule.
    """

    __class__ = float

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return repr(self.value)

    def __hash__(self):
        return hash(self.value)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Unspoken, f"__{_name}__", _compared(_name))
for _name in f"{_ARITHMETIC} divmod rdivmod float int complex".split():
    setattr(Unspoken, f"__{_name}__", _is_used)


def plain(value):
    """The value with Python's own numbers for `Nan` and `Unspoken`, so that a test can hand it back to the program."""
    kind = type(value)
    if kind in (list, tuple, set, frozenset):
        return kind(map(plain, value))
    if kind is dict:
        return {plain(key): plain(item) for key, item in value.items()}
    return value.value if kind is Unspoken else float(value) if kind is Nan else value


def real(text):
    """A floating-point number of the program; `Unspoken` for a number that is not finite and that no test names."""
    value = float(text)
    if math.isfinite(value):
        return value
    if not any(word in TESTS["words"] for word in ("nan" if value != value else "inf", "isfinite")):
        return Unspoken(value)
    return Nan(value) if value != value else value


KINDS = {
    "i": lambda text: int(text, 16),
    "f": real,
    "b": bytes.fromhex,
    "c": lambda pair: complex(real(pair[0]), real(pair[1])),
}


class Begin:
    """First items of an iterator that had too many to be read."""

    def __init__(self, items):
        self.items = iter(items)

    def __iter__(self):
        return self

    def __next__(self):
        for item in self.items:
            return item
        raise Wrong("the program's iterator gives too many items")

    def __contains__(self, _):
        raise Wrong("the program's iterator gives too many items to look for one")


class JudgedProgram:
    """The other sandbox. `fault` is the program's fault after which no test can run; empty without a fault.

    `missing` is a name that a test wanted and the program does not have. `has_spoken` is true after the first value of
    the program, because the program may have caused any later error; `words` counts its values.
    """

    def __init__(self, channel):
        self.requests, self.replies = os.fdopen(os.dup(channel), "wb"), os.fdopen(os.dup(channel), "rb")
        self.fault, self.missing, self.words = "", "", 0

    @property
    def has_spoken(self):
        return self.words > 0

    def ask(self, *request):
        """The program's reply. Raises `TestsRefused` for arguments that are no plain values, and `Wrong`."""
        try:
            packed = marshal.dumps(plain(request))
        except (ValueError, RecursionError):
            if ITERATORS:
                raise Wrong("the program gave an iterator, which cannot be handed back to it") from None
            raise TestsRefused(f"a test hands {request[0]} something other than a plain value") from None
        try:
            self.requests.write(packed)
            self.requests.flush()
            line = self.replies.readline(LONGEST_LINE)
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            self.fault = self.fault or "the program ended, or said too much"
            raise Wrong(self.fault)
        try:
            reply = json.loads(line, parse_constant=real)
            self.fault = self.fault or reply.get("failed", "")
        except (ValueError, RecursionError, AttributeError):
            self.fault = "the program's reply is not valid"
        if self.fault:
            raise Wrong(self.fault)
        self.words += "function" not in reply
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
    """The value of a reply. Raises `Wrong` for a value that is not plain, so that the test fails."""
    if isinstance(tree, list):
        return [value_of(item, name) for item in tree]
    if isinstance(tree, float):
        return real(tree)
    if not isinstance(tree, dict):
        return tree
    try:
        ((tag, inner),) = tree.items()
        if tag == "d":
            return {value_of(key, name): value_of(item, name) for key, item in inner}
        if tag in ("n", "m"):
            ITERATORS.append(name)
        if tag == "m":
            return Begin([value_of(item, name) for item in inner])
        if tag in SEQUENCES:
            return SEQUENCES[tag]([value_of(item, name) for item in inner])
        if tag in KINDS:
            return KINDS[tag](inner)
    except (TypeError, ValueError, IndexError, OverflowError, RecursionError) as error:
        raise Wrong(f"{name} gave no plain value: {error}") from None
    raise Wrong(f"{name} returned {inner}, not a plain value")


def restore(arg, back):
    """Copies the program's changes of a container back into the test's container."""
    if type(arg) in (list, dict, set):
        new = value_of(back, "the program")
        if type(new) is type(arg) and new != arg:
            arg.clear()
            (arg.extend if type(arg) is list else arg.update)(new)


def error_of(kinds, text):
    """The error class of Python from which the program's error class derives.

    As in a generator (PEP 479), an end of iteration is a `RuntimeError`: it would end loops of a test.
    A test that names the class itself gets it.
    """
    for kind in kinds:
        found = getattr(builtins, str(kind), None)
        if isinstance(found, type) and issubclass(found, Exception):
            if issubclass(found, (StopIteration, StopAsyncIteration)) and found.__name__ not in TESTS["now"]:
                break
            try:
                return found(text.partition(": ")[2])
            except TypeError:  # it needs more than a text, like UnicodeDecodeError
                continue
    return RuntimeError(text)


def run_snippets(tests, program, report):
    """Runs statements whose assertions must hold, each with its own names and the program's."""
    for number, (text, names) in enumerate(tests["snippets"]):
        why, TESTS["words"], TESTS["now"] = "", text.lower(), text
        try:
            scope = {"__name__": "test", **{name: program.attribute(name) for name in names}}
            exec(compile(text, "test", "exec"), scope)
        except TestsRefused:
            raise
        except BaseException as error:
            why = f"{type(error).__name__}: {error}".strip(": ")
        report(f"test {number + 1}", why or program.fault)


def marked_apart(file, test):
    """True if the decorators of a test, and of its classes, name nothing that the program could have made."""
    named = {}
    for node in ast.walk(ast.parse(file)):
        if isinstance(node, ast.ImportFrom) and any(one.name == "*" for one in node.names):
            return False
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = {
                one.id for decorator in node.decorator_list for one in ast.walk(decorator) if isinstance(one, ast.Name)
            }
            named[node.name] = named.get(node.name, set()) | names
    found = [named.get(part.partition("[")[0], {""}) for part in test.split("::")[1:]]
    return any(found) and set().union(*found) <= APART


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
        before = collected = shared = 0
        """Values of the program before this test, at the end of collection, and in set-up that tests may share."""

        def pytest_collectreport(self, report):
            if report.failed:
                self.broken = f"the test file cannot be collected: {str(report.longrepr)[-300:]}"

        def pytest_collection_finish(self):
            self.collected = self.shared = program.words

        def pytest_runtest_logstart(self):
            self.before = program.words

        def pytest_runtest_setup(self, item):
            function = getattr(item, "function", None)
            TESTS["now"] = inspect.getsource(function) if inspect.isfunction(function) else ""

        def pytest_exception_interact(self, call):
            kind = call.excinfo.type.__name__
            if kind in ("FixtureLookupError", "TestsRefused"):
                self.refused = f"{kind}: {call.excinfo.value}"

        def is_skipped_by_program(self, report):
            """True if the program may have caused the skip, or the expected failure."""
            is_marked = any(name in report.keywords for name in ("skip", "skipif", "xfail"))
            if is_marked and marked_apart(tests["file"], report.nodeid):
                return False
            return self.collected > 0 if is_marked else self.shared > 0 or program.words > self.before

        def pytest_runtest_logreport(self, report):
            if report.when == "setup" and program.words > self.before:
                self.shared = program.words
            is_skipped = report.outcome == "skipped" and self.is_skipped_by_program(report)
            if report.outcome == "failed" or is_skipped or (report.when == "call" and report.outcome == "passed"):
                self.count += 1
                why = str(report.longrepr)[-300:] or "failed" if report.outcome != "passed" else ""
                said(report.nodeid.partition("::")[2], why)

    said, plugin, TESTS["words"] = report, Plugin(), tests["file"].lower()
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
