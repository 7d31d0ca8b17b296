"""Assertions about a program that cannot reach them: a tester process, and one with the program, text in between."""
# mypy: ignore-errors
# Untyped on purpose: values of every type pass through, and annotations would cost each batch the import of typing.

import json
import os
import sys

from shoal.reward.in_sandbox.plumbing import close_output, feed, namespace, read, words, write_all
from shoal.reward.in_sandbox.values import decoded, encoded


def run_tests(job, given, out):
    """Forks the process with the program, then reads the tests and runs them. A line per verdict."""
    import socket

    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        try:
            ours.close()
            os.close(out)
            program = read(job["program"])
            feed(b"")
            close_output()
            serve(program, theirs.makefile("rwb"))
        finally:
            os._exit(0)
    theirs.close()
    program, tests = read(job["program"]), json.loads(read(given))
    feed(b"")
    close_output()
    remote = Program(ours.makefile("rwb"), program)
    runner = run_pytest if job["kind"] == "pytest" else run_snippets

    def report(name, why):
        write_all(out, json.dumps({"name": name, "why": why[:500]}).encode() + b"\n")

    runner(tests, remote, report)
    write_all(out, b'{"end": true}\n')  # without it, the program may have ended the tester before the rest
    return 0


def serve(program, channel):
    """The program's side: runs it, and answers what the tester asks of its objects."""
    import io

    objects = []

    def keep(value):
        objects.append(value)
        return {"h": len(objects) - 1}

    def fetch(tag, value):
        return objects[value]

    scope, failed, started = namespace("solution"), None, False
    for line in channel:
        request = json.loads(line)
        printed = sys.stdout = io.StringIO()
        try:
            if not started:
                started = True
                try:
                    exec(compile(program, "solution.py", "exec"), scope)
                except BaseException as error:
                    failed = words(error)
            if failed is not None:
                raise ImportError(failed)
            args = decoded(request["args"], fetch)
            value, back = performed(request, args, scope, objects), [encoded(arg, keep) for arg in args]
            reply = {"v": encoded(value, keep), "back": back}
        except BaseException as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            reply = {"x": kinds, "words": words(error)}
        reply["o"] = printed.getvalue()[:100000]
        channel.write(json.dumps(reply).encode() + b"\n")
        channel.flush()


def performed(request, args, scope, objects):
    what = request["do"]
    if what == "name":
        return scope[args[0]]
    target = objects[request["on"]]
    if what == "call":
        return target(*args, **decoded(request["kwargs"], lambda tag, value: objects[value]))
    actions = {
        "get": getattr,
        "set": setattr,
        "len": len,
        "str": str,
        "repr": repr,
        "iter": iter,
        "next": next,
        "item": lambda target, key: target[key],
        "put": lambda target, key, value: target.__setitem__(key, value),
        "drop": lambda target, key: target.__delitem__(key),
        "enter": lambda target: target.__enter__(),
        "exit": lambda target: target.__exit__(None, None, None),
    }
    return actions[what](target, *args)


class Program:
    """The tester's side of the process with the program."""

    def __init__(self, channel, program):
        self.channel = channel
        self.errors = {}
        self.is_ready = True
        self.names = top_level_names(program)

    def ask(self, what, on, args, kwargs=()):
        if not self.is_ready:
            raise RuntimeError("the program cannot be used while the tests are being collected")
        words = [encoded(arg, handle_of) for arg in args]
        request = {"do": what, "on": on, "args": words, "kwargs": encoded(dict(kwargs), handle_of)}
        self.channel.write(json.dumps(request).encode() + b"\n")
        self.channel.flush()
        line = self.channel.readline()
        if not line:
            raise RuntimeError("the program's process has ended")
        reply = json.loads(line)
        sys.stdout.write(str(reply.get("o", "")))
        if "x" in reply:
            raise self.error(reply["x"], str(reply["words"]))
        for arg, back in zip(args, reply["back"], strict=True):
            restore(arg, decoded(back, self.object))
        return decoded(reply["v"], self.object)

    def object(self, tag, value):
        if tag != "h":
            raise ValueError("no such value")
        return Remote(self, int(value))

    def error(self, kinds, text):
        """The error that the program raised: one of its own by name, or Python's own that it derives from."""
        if kinds[0] in self.errors:
            return self.errors[kinds[0]](text)
        import builtins

        for kind in kinds:
            found = getattr(builtins, str(kind), None)
            if isinstance(found, type) and issubclass(found, Exception):
                return found(text.partition(": ")[2]) if found is not UnicodeDecodeError else ValueError(text)
        return RuntimeError(text)

    def attribute(self, name):
        """A name of the program: an error class, or what stands for it until it is used."""
        kind = self.names.get(name)
        if kind == "error":
            return self.errors.setdefault(name, type(name, (Exception,), {}))
        if kind is None:
            raise AttributeError(name)
        if kind == "value" and self.is_ready:
            return self.ask("name", 0, [name])
        return Named(self, name)


def handle_of(value):
    if isinstance(value, Remote):
        return {"h": object.__getattribute__(value, "_handle")()}
    raise TypeError("a test can hand the program Python's own data types only, got " + type(value).__name__)


def restore(arg, back):
    """Gives a container that the program changed its new content."""
    if type(arg) is list and type(back) is list and arg != back:
        arg[:] = back
    elif type(arg) in (dict, set) and type(back) is type(arg) and arg != back:
        arg.clear()
        arg.update(back)


class Remote:
    """An object of the program. It has no equality, order or truth here: those would be the program's to fake."""

    __slots__ = ("_number", "_program")

    def __init__(self, program, number):
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)

    def _handle(self):
        return self._number

    def _ask(self, what, *args, **kwargs):
        return self._program.ask(what, self._handle(), args, kwargs)

    def __call__(self, *args, **kwargs):
        return self._ask("call", *args, **kwargs)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("get", name)

    def __setattr__(self, name, value):
        self._ask("set", name, value)

    def __len__(self):
        return int(self._ask("len"))

    def __getitem__(self, key):
        return self._ask("item", key)

    def __setitem__(self, key, value):
        self._ask("put", key, value)

    def __delitem__(self, key):
        self._ask("drop", key)

    def __iter__(self):
        return self._ask("iter")

    def __next__(self):
        return self._ask("next")

    def __str__(self):
        return str(self._ask("str"))

    def __repr__(self):
        return str(self._ask("repr"))

    def __enter__(self):
        return self._ask("enter")

    def __exit__(self, *_):
        self._ask("exit")

    def __bool__(self):
        raise TypeError("an object of the program has no truth value in a test; compare a value of it")


class Named(Remote):
    """A function or class of the program by name; looked up when it is used."""

    __slots__ = ("_found",)

    def _handle(self):
        try:
            return object.__getattribute__(self, "_found")
        except AttributeError:
            target = self._program.ask("name", 0, [self._number])
            if not isinstance(target, Remote):
                raise TypeError(str(self._number) + " is no function or class") from None
            object.__setattr__(self, "_found", target._handle())
            return self._found


def top_level_names(program):
    """What kind of thing each top-level name of a program is, from its text alone."""
    import ast

    try:
        body = ast.parse(program).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    names = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            is_error = any(base.endswith(("Error", "Exception")) or names.get(base) == "error" for base in bases)
            names[node.name] = "error" if is_error else "object"
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names[node.name] = "object"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name.partition(".")[0], "object") for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                names.update((name.id, "value") for name in ast.walk(target) if isinstance(name, ast.Name))
                if isinstance(node.value, ast.Lambda) and isinstance(target, ast.Name):
                    names[target.id] = "object"
        else:
            for inner in ast.walk(node):
                if isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
                    names[inner.name] = "object"
    return names


def solution_of(remote):
    """The program as a module to import from."""

    class Solution(type(sys)):
        def __getattr__(self, name):
            return remote.attribute(name)

    module = Solution("solution")
    module.__dict__["__all__"] = [name for name in remote.names if not name.startswith("_")]
    sys.modules["solution"] = module
    return module


def run_snippets(tests, remote, report):
    """Statements whose assertions must hold, each with names of its own."""
    module = solution_of(remote)
    for number, text in enumerate(tests):
        scope = {"__name__": "test", "__builtins__": __builtins__}
        try:
            for name in module.__all__:
                if remote.names[name] != "value" or name in text:
                    scope[name] = remote.attribute(name)
            exec(compile(text, "test", "exec"), scope)
            report(str(number), "")
        except BaseException as error:
            report(str(number), words(error) or "failed")


def run_pytest(tests, remote, report):
    """A test file: by pytest itself where the file needs it, else function by function."""
    solution_of(remote)
    if tests["needs_pytest"]:
        really_run_pytest(tests["text"], remote, report)
        return
    scope = {"__name__": "test_solution", "__builtins__": __builtins__}
    exec(compile(tests["text"], "test_solution.py", "exec"), scope)
    for name, value in list(scope.items()):
        if name.startswith("test") and callable(value) and not isinstance(value, type):
            run_one(name, value, report)
        elif name.startswith("Test") and isinstance(value, type):
            for inner in [key for key in vars(value) if key.startswith("test")]:
                run_one(name + "::" + inner, getattr(value(), inner), report)


def run_one(name, function, report):
    try:
        function()
        report(name, "")
    except BaseException as error:
        report(name, words(error) or "failed")


def really_run_pytest(text, remote, report):
    import pytest

    class Plugin:
        def pytest_collection_finish(self):
            os.unlink("test_solution.py")  # before the program's first line runs, which could read it
            remote.is_ready = True

        def pytest_runtest_logreport(self, report):
            if report.when == "call" or report.outcome != "passed":
                why = "" if report.outcome == "passed" else (str(report.longrepr)[-300:] or report.outcome)
                said(report.nodeid.partition("::")[2], why)

    said, remote.is_ready = report, False
    with open("test_solution.py", "w") as file:
        file.write(text)
    options = ["-q", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull, "--rootdir=.", "test_solution.py"]
    # No folder that the program can write to may become one that the tester imports from.
    pytest.main(["--import-mode=importlib", *options], plugins=[Plugin()])
