"""Calls functions of a program, or runs it as a script, and writes the results as text. Runs in the program's sandbox.

The program can reach all of this process, so nothing in it decides. It gets names and arguments, or a script's input,
and its output is compared elsewhere. Requests come from standard input and replies go to standard output. When standard
input is a socket to `judge`, both go through the socket.
"""

# mypy: ignore-errors
# Untyped and without imports that take milliseconds (json, signal, enum): every program waits for it.
from __future__ import annotations  # also in programs compiled here: starter code names types that it does not import

import marshal
import os
import sys
from _json import encode_basestring_ascii as quoted
from _signal import ITIMER_PROF, ITIMER_REAL, setitimer

MOST_ITEMS = 10_000
"""Number of items read from an iterator."""
MOST_PRINTED = 100_000
_SOCKET = 0o140000


def main():
    is_judged = os.fstat(0).st_mode & 0o170000 == _SOCKET
    requests, replies = os.fdopen(os.dup(0), "rb"), os.dup(0 if is_judged else 1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    cpu_s, wall_s, limit = marshal.load(requests)
    with open("solution.py", "rb") as file:
        program = file.read()
    os.unlink("solution.py")
    __builtins__.exit = __builtins__.quit = sys.exit  # Python runs without `site`, which defines them
    if limit:
        run_scripts(program, marshal.load(requests), replies, (cpu_s, wall_s, limit))
        os._exit(0)
    module = type(sys)("solution")
    sys.modules["solution"] = module
    setitimer(ITIMER_PROF, cpu_s)  # a program that undoes it uses up the sandbox's limits
    setitimer(ITIMER_REAL, wall_s)
    failed = ""
    try:
        exec(compile(program, "solution.py", "exec"), module.__dict__)
    except BaseException as error:
        failed = words(error)
        if not is_judged:
            os.write(2, failed.encode(errors="replace"))
            os._exit(1)
    while True:
        setitimer(ITIMER_REAL, 0 if is_judged else wall_s)
        try:
            request = marshal.load(requests)
        except EOFError:
            os._exit(0)
        setitimer(ITIMER_PROF, cpu_s)
        setitimer(ITIMER_REAL, wall_s)
        send(replies, f'{{"failed": {quoted(failed)}}}' if failed else answered(module.__dict__, request, is_judged))


def send(descriptor, line):
    view = memoryview(line.encode() + b"\n")
    while view:
        view = view[os.write(descriptor, view) :]


def run_scripts(program, inputs, replies, limits):
    """Runs the program as `python main.py` once per input, each time in a fork; one input runs in this process."""
    cpu_s, wall_s, limit = limits
    for given in inputs:
        descriptor = os.open("input", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.unlink("input")
        os.write(descriptor, given)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.dup2(descriptor, 0)
        os.close(descriptor)
        if len(inputs) == 1:
            os.dup2(replies, 1)
            leave(run_script(program, cpu_s, wall_s))
        out, their_out = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(their_out, 1)
            for descriptor in (out, their_out, replies):
                os.close(descriptor)
            leave(run_script(program, cpu_s, wall_s))
        os.close(their_out)
        printed = b""
        while len(printed) <= limit and (chunk := os.read(out, 1 << 16)):
            printed += chunk
        os.close(out)
        if len(printed) > limit:
            os.kill(pid, 9)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        much = "true" if len(printed) > limit else "false"
        text = quoted(printed[:limit].decode(errors="replace"))
        send(replies, f'{{"o": {text}, "status": {status}, "much": {much}}}')
        if status:
            break


def run_script(program, cpu_s, wall_s):
    """Runs the script once and returns its exit code."""
    sys.argv = ["main.py"]
    module = type(sys)("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    setitimer(ITIMER_PROF, cpu_s)
    setitimer(ITIMER_REAL, wall_s)
    try:
        try:
            exec(compile(program, "main.py", "exec"), module.__dict__)
        finally:
            if "threading" in sys.modules:
                sys.modules["threading"]._shutdown()
            if "atexit" in sys.modules:
                sys.modules["atexit"]._run_exitfuncs()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 255
        os.write(2, str(error.code).encode(errors="replace"))
        return 1
    except BaseException as error:
        os.write(2, words(error).encode(errors="replace"))
        return 1
    return 0


def leave(code):
    """Ends the process as Python does, without the milliseconds in which Python frees its memory."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__):
        try:
            if not getattr(stream, "closed", False):
                stream.flush()
        except BaseException:
            code = code or 1
    sys.modules["__main__"].__dict__.clear()  # closes the script's own files, which then print what they hold
    os._exit(code)


def answered(scope, request, is_judged):
    """One line: a value, a mark of a function, or an error; for a judge also its prints and changed containers."""
    name, args, kwargs = request
    if is_judged:
        import io

        sys.stdout = io.StringIO()
    try:
        target = found(scope, name)
        if args is not None:
            target = target(*args, **kwargs)
        elif callable(target):
            return '{"function": true}'
        line = f'{{"v": {text(target)}'
    except BaseException as error:
        kinds = ", ".join(quoted(kind.__name__) for kind in type(error).__mro__)
        line = f'{{"x": [{kinds}], "e": {quoted(words(error))}'
    if is_judged:
        line += f', "back": {text(list(args or ()))}, "o": {quoted(sys.stdout.getvalue()[:MOST_PRINTED])}'
    return line + "}"


def found(scope, name):
    """The program's object of a name, or a method on a fresh object of a class."""
    name, _, method = name.partition(".")
    return getattr(scope[name](), method) if method else scope[name]


def text(value):
    """JSON of a value made of Python's own types; any other value is its repr as {"r": ...}."""
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return int.__repr__(value) if -(1 << 53) < value < 1 << 53 else f'{{"i": "{int.__format__(value, "x")}"}}'
    if isinstance(value, float):
        return float.__repr__(value) if value - value == 0 else f'{{"f": "{float.__repr__(value)}"}}'
    if isinstance(value, str):
        return quoted(str.__str__(value))
    if isinstance(value, bytes):
        return f'{{"b": "{bytes.hex(value)}"}}'
    if isinstance(value, complex):
        return f'{{"c": ["{value.real!r}", "{value.imag!r}"]}}'
    if isinstance(value, list):
        return listed(list.__iter__(value))
    if isinstance(value, dict):
        pairs = (f"[{text(key)}, {text(item)}]" for key, item in dict.items(value))
        return f'{{"d": [{", ".join(pairs)}]}}'
    for tag, kind in (("t", tuple), ("s", set), ("z", frozenset)):
        if isinstance(value, kind):
            return f'{{"{tag}": {listed(kind.__iter__(value))}}}'
    if hasattr(type(value), "__next__") or isinstance(value, (range, *VIEWS)):
        items = [item for item, _ in zip(value, range(MOST_ITEMS + 1), strict=False)]
        return f'{{"{"m" if len(items) > MOST_ITEMS else "n"}": {listed(items[:MOST_ITEMS])}}}'
    return f'{{"r": {quoted(repr(value)[:200])}}}'


VIEWS = (type({}.keys()), type({}.values()), type({}.items()))


def listed(items):
    return f"[{', '.join([text(item) for item in items])}]"


def words(error):
    try:
        return (type(error).__name__ + ": " + str(error))[:2000]
    except BaseException:
        return type(error).__name__


if __name__ == "__main__":
    main()
