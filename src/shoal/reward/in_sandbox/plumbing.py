"""What the processes of a sandbox do with descriptors, and a few words."""
# mypy: ignore-errors
# ruff: noqa: SIM105
# Untyped on purpose: values of every type pass through, and annotations would cost each batch the import of typing.

import os
import sys

ERROR_BYTES = 2000


def read(span):
    """A part of standard input, from wherever it is now."""
    offset, size = span
    data = b""
    while len(data) < size:
        chunk = os.pread(0, size - len(data), offset + len(data))
        if not chunk:
            break
        data += chunk
    return data


def write_all(descriptor, data):
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def feed(data):
    """Makes this standard input."""
    if not data:
        descriptor = os.open(os.devnull, os.O_RDONLY)
    else:
        descriptor = os.open("stdin", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.unlink("stdin")
        write_all(descriptor, data)
        os.lseek(descriptor, 0, os.SEEK_SET)
    os.dup2(descriptor, 0)
    os.close(descriptor)


def close_output():
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def finish(code):
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass
    os._exit(code)


def namespace(name):
    """Of a fresh module."""
    module = type(sys)(name)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules[name] = module
    return module.__dict__


def complain(text):
    write_all(2, text.encode(errors="replace")[-ERROR_BYTES:])


def words(error):
    try:
        return (type(error).__name__ + ": " + str(error))[:ERROR_BYTES]
    except BaseException:
        return type(error).__name__
