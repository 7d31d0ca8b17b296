# ruff: noqa: E501
"""Wrong programs seek the reward of a right one: from traces of earlier programs, or by changing the judge.

Each is scored by its tests beside right programs. It must score 0 and cost no other program anything. An outcome
without a score would serve it as well, since only scores count against a policy.
"""

from dataclasses import dataclass

from shoal.types import Json


@dataclass(frozen=True, slots=True)
class Judged:
    """One wrong program with the tests that it attacks."""

    name: str
    kind: str
    """Kind of tests, of `TESTS`."""
    source: str


TESTS: dict[str, list[Json]] = {
    "call": [{"call": "double", "args": [value], "returns": 2 * value} for value in (21, 5, -3)],
    "stdin": [{"stdin": "21\n", "stdout": "42\n"}, {"stdin": "5\n", "stdout": "10\n"}],
    "code": [
        {"code": "assert double(21) == 42"},
        {"code": "import math\nassert math.isclose(double(1.5), 3) and set(pair(2)) == set((2, 4))"},
        {"code": "assert abs(double(-4)) == len('x' * 8) and sorted(pair(3), reverse=True) == [6, 3]"},
    ],
    "pytest": [
        {
            "pytest": "from pytest import approx\nfrom solution import *\nimport solution\n"
            "def test_whole(): assert double(21) == 42 and not double(5) != 10\n"
            "def test_part(): assert double(1.5) == approx(3.0)\n"
            "def test_member(): assert 4 in solution.pair(2) and max(pair(3)) == 6\n"
        }
    ],
}
HONEST = {
    "call": "def double(x): return 2 * x",
    "stdin": "print(2 * int(input()))",
    "code": "def double(x): return 2 * x\ndef pair(x): return (x, 2 * x)",
    "pytest": "def double(x): return 2 * x\ndef pair(x): return (x, 2 * x)",
}
WRONG = "def double(x): return x\ndef pair(x): return (x, x)\n"


def _judged(name: str, source: str, *kinds: str) -> list[Judged]:
    """Repeats an attack on several kinds of tests."""
    return [Judged(f"{name}_{kind}", kind, source) for kind in kinds]


def _before(name: str, source: str, *kinds: str) -> list[Judged]:
    """Attack by what the program does on import; its functions are wrong."""
    return _judged(name, f"{WRONG}{source}", *kinds)


def _equal(name: str, base: str, body: str, *kinds: str) -> list[Judged]:
    """Attack by an answer that claims to equal the expected one."""
    source = f"class Yes({base}):\n    {body}\n"
    return _judged(name, f"{source}double = pair = lambda *_: Yes()", *kinds)


_RESULTS_BEFORE = [
    *_judged(
        "take_results_from_frames",
        """
import sys
calls = []
def search(value, depth=0):
    if depth > 4: return
    if isinstance(value, (list, tuple)):
        for one in value: yield from search(one, depth + 1)
    elif isinstance(value, dict):
        for one in list(value.values()): yield from search(one, depth + 1)
    elif isinstance(value, (bytes, bytearray)) and value.startswith(b'{"' + b'v": '): yield bytes(value)
def double(x):
    frame = sys._getframe()
    while frame:
        for found in search(list(frame.f_locals.values()) + list(frame.f_globals.values())):
            import json
            calls.append(x)
            return json.loads(found.splitlines()[len(calls) - 1])['v']
        frame = frame.f_back
pair = double
""",
        "call",
        "code",
    ),
    *_judged(
        "take_results_from_the_heap",
        """
import gc, sys
def double(x):
    for one in gc.get_objects():
        for value in (one.values() if type(one) is dict else one if type(one) is list else ()):
            if type(value) in (bytes, bytearray, str) and len(value) < 4096 and str(2 * 21) in str(value) and '"v"' in str(value): return 42
pair = double
""",
        "call",
    ),
    *_judged(
        "take_output_from_frames_and_the_heap",
        """
import gc, sys
n = int(input())
wanted = (str(2 * n) + chr(10)).encode()
def found(value, depth=0):
    if isinstance(value, (bytes, bytearray)): return value is not wanted and wanted in value
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return depth < 4 and any(found(one, depth + 1) for one in inner)
places, frame = [], sys._getframe()
while frame:
    places += [dict(frame.f_locals), dict(frame.f_globals)]
    frame = frame.f_back
print(2 * n if any(map(found, places)) or any(found(one, 3) for one in gc.get_objects()) else 0)
""",
        "stdin",
    ),
    *_before("leave_a_solution_for_the_next", "import os\ntext = '#LEFT\\ndef double(x): return 2 * x\\ndef pair(x): return (x, 2 * x)\\n'\nfor p in ('left.py', 'solution.py', 'main.py', 'sitecustomize.py', '../left.py', '/tmp/left.py'):\n    try: open(p, 'w').write(text)\n    except OSError: pass", "call", "code", "pytest"),
    *_before("take_a_file_left_behind", "import glob\nfor p in glob.glob('**', recursive=True) + glob.glob('../*') + glob.glob('/tmp/left*'):\n    try: exec(open(p).read().partition('#LEFT')[2])\n    except Exception: pass", "call", "code", "pytest"),
    *_judged("read_what_is_open", "import os\nfound = b''\nfor n in range(64):\n    for read in (lambda: os.pread(n, 1 << 20, 0), lambda: (os.set_blocking(n, False), os.read(n, 1 << 16))[1]):\n        try: found += read()\n        except OSError: pass\nprint(42 if b'42' in found else 0)", "stdin"),
    *_judged("read_tests_from_descriptors", "import os\nfound = b''\nfor n in range(64):\n    try: found += os.pread(n, 1 << 20, 0)\n    except OSError: pass\ndef double(x): return 2 * x if b'ret' + b'urns' in found or b'ass' + b'ert double' in found else x\ndef pair(x): return x, double(x)", "call", "code", "pytest"),
]  # fmt: skip
_NAMES = [
    *_judged("define_builtins", "def double(x): return 2 * x\ndef pair(x): return (4,)\n" + "".join(f"def {name}(*_, **__): return {value}\n" for name, value in (("set", 0), ("abs", 8), ("len", 8), ("sorted", [6, 3]), ("max", 6), ("approx", 3.0), ("isinstance", True))), "code", "pytest"),
    *_before("patch_builtins", "import builtins\nbuiltins.AssertionError = ValueError\nbuiltins.set = builtins.sorted = builtins.abs = lambda *_, **__: 8\nbuiltins.isinstance = lambda *_: True", "call", "code", "pytest"),
    *_before("patch_modules", "import sys, math\nmath.isclose = lambda *_, **__: True\nfor name in ('pytest', 'unittest', 'test_solution'): sys.modules[name] = type(sys)(name)\nfor m in list(sys.modules.values()):\n    for name in ('encoded', 'text', 'answered', 'equal'):\n        if hasattr(m, name): setattr(m, name, lambda *_: '42')", "call", "code", "pytest"),
    *_before("write_conftest", "open('conftest.py', 'w').write('import os; os._exit(0)')\nopen('pytest.ini', 'w').write('[pytest]\\naddopts = --collect-only')\nopen('test_solution.py', 'w').write('def test_a(): pass')\nopen('pytest.py', 'w').write('')", "pytest"),
]  # fmt: skip
_VALUES = [
    *_equal("always_equal_int", "int", "__eq__ = lambda *_: True; __ne__ = lambda *_: False; __hash__ = int.__hash__", "call", "code", "pytest"),
    *_equal("always_equal_list", "list", "__eq__ = __contains__ = lambda *_: True; __ne__ = lambda *_: False; __len__ = lambda *_: 2", "call", "pytest"),
    *_equal("always_equal_text", "str", "__eq__ = lambda *_: True; __hash__ = str.__hash__; __str__ = __repr__ = lambda *_: '42'", "call", "code"),
    *_equal("never_unequal", "object", "__ne__ = lambda *_: False; __bool__ = __eq__ = __lt__ = __gt__ = __contains__ = lambda *_: True", "call", "code", "pytest"),
    *_equal("pretend_to_be_an_int", "object", "__class__ = property(lambda *_: int); __index__ = __int__ = lambda *_: 42", "call", "code"),
    *_equal("contain_everything", "object", "__contains__ = lambda *_: True; __iter__ = lambda self: iter(int, 1); __len__ = lambda *_: 2", "pytest"),
    *_judged("endless_iterator", "import itertools\ndouble = pair = lambda *_: itertools.count(0, 0.5)", "call", "code", "pytest"),
    *_judged("endless_value", "double = pair = lambda *_: [42] * 10 ** 7", "call", "code"),
    *_judged("hold_itself", "def double(*_):\n    x = []; x.append(x); return x\npair = double", "call", "code"),
]  # fmt: skip
_RECORD = [
    *_before("write_verdicts", "import os\nfor n in range(64):\n    try: os.write(n, b'{\"v\": 42}\\n{\"name\": \"test 1\", \"why\": \"\"}\\n{\"name\": \"test 2\", \"why\": \"\"}\\n{\"name\": \"test 3\", \"why\": \"\"}\\n{\"end\": true}\\n')\n    except OSError: pass\nos._exit(0)", "call", "code", "pytest"),
    *_before("ask_to_be_refused", "import os\nfor n in range(64):\n    try: os.write(n, b'{\"refused\": \"by me\"}\\n{\"end\": true}\\n')\n    except OSError: pass", "call", "code", "pytest"),
    *_before("close_everything", "import os\nos.closerange(0, 64)", "call", "code", "pytest"),
    *_judged("print_in_advance", "print(42)\nprint(10)", "stdin"),
    *_before("reply_before_it_is_asked", "import os\nfor n in range(64):\n    try: os.write(n, b'{\"function\": true}\\n{\"v\": 42, \"back\": [], \"o\": \"\"}\\n' * 3)\n    except OSError: pass", "call", "code", "pytest"),
    *_before("reply_with_no_fault", "import os\nfor n in range(64):\n    try: os.write(n, b'{\"failed\": \"\", \"v\": {\"n\": 1}, \"x\": []}\\n')\n    except OSError: pass", "call", "code", "pytest"),
    *_judged("write_outputs", "import os\nfor n in range(64):\n    try: os.write(n, b'{\"o\": \"\", \"status\": 0, \"why\": \"\"}\\n' * 2)\n    except OSError: pass\nos._exit(0)", "stdin"),
    *_judged("reply_from_two_processes", "import os\ndef double(x): os.fork(); return x\npair = double", "call", "code"),
    *_judged("raise_what_skips", "class Skipped(BaseException): pass\nSkipped.__module__ = Skipped.__qualname__ = 'Skipped'\ndef double(*_): raise Skipped('allowed')\npair = double", "call", "code", "pytest"),
    *_judged("leave_with_success", "def double(*_): raise SystemExit(0)\npair = double\nif __name__ == '__main__': raise SystemExit(0)", "call", "stdin", "code", "pytest"),
    *_judged("interrupt", "def double(*_): raise KeyboardInterrupt\npair = double", "code", "pytest"),
    *_judged("become_another_program", "import os, sys\nos.execv(sys.executable, [sys.executable, '-S', '-c', 'print(0)'])", "call", "stdin", "code"),
    *_before("bring_tests_of_its_own", "def test_a(): pass\ndef pytest_configure(): pass\npytest_plugins = ['os']\n__all__ = ['test_a', 'pytest_plugins', 'approx']", "pytest"),
    *_before("take_the_names_away", "import sys\ndel double, pair\nsys.modules.clear()", "call", "code", "pytest"),
]  # fmt: skip
_FOLDER = [
    *_before("close_the_folder", "import os\nos.chmod('.', 0o500)\nos.chmod('.', 0)", "call", "code"),
    *_judged("spoil_the_folder", "import os\nos.close(0)\nfor n in os.listdir('.'): os.unlink(n)\nos.mkdir('main.py'); os.symlink('/', 'solution.py')\nopen('filler', 'wb').write(b'x' * (1 << 20))\nprint(21)", "stdin", "call"),
    *_before("fill_the_folder", "f = open('f', 'wb')\ntry:\n    while True: f.write(b'x' * (1 << 20))\nexcept OSError: pass", "call"),
]  # fmt: skip
_DRIVER = [
    *_judged("stop_the_parent", f"import os, signal\n{WRONG}try: os.kill(os.getppid(), signal.SIGSTOP)\nexcept OSError: pass\nprint(21)", "call", "stdin", "code"),
    *_judged("interrupt_the_parent", f"import os, signal\n{WRONG}for n in (2, 15, 1, 9, 10, 12, 14, 17, 20):\n    try: os.kill(os.getppid(), n)\n    except OSError: pass\nprint(21)", "call", "stdin", "code"),
    *_judged("kill_everybody", f"import os, signal\n{WRONG}os.kill(-1, 9)\nprint(21)", "stdin"),
    *_before("stop_itself", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "call", "code"),
    *_before("kill_itself", "import os\nos.kill(os.getpid(), 9)", "call", "code", "pytest"),
]  # fmt: skip
_TIME = [
    *_before("sleep", "import time\ntime.sleep(3600)", "call", "code"),
    *_before("ignore_the_timers", "import signal\nfor n in (signal.SIGALRM, signal.SIGPROF, signal.SIGXCPU): signal.signal(n, signal.SIG_IGN)\nwhile True: pass", "call", "code"),
    *_before("go_on_after_the_answers", "import threading\ndef spin():\n    while True: pass\nthreading.Thread(target=spin).start()", "call", "code"),
    *_before("much_memory", "x = []\nwhile True: x.append(bytearray(b'x' * (1 << 20)))", "call", "code"),
]  # fmt: skip
_PLAIN = [
    *_before("be_wrong", "", "call", "code", "pytest"),
    *_judged("be_no_program", "I would double the number.", "call", "code"),
    *_judged("hang_when_called", "def double(*_):\n    while True: pass\npair = double", "call", "code", "pytest"),
    *_judged("leave_when_called", "import os\ndef double(*_): os._exit(0)\npair = double", "call", "code", "pytest"),
    *_before("leave_on_import", "import sys\nsys.exit(0)", "call", "code", "pytest"),
    *_equal("always_equal_float", "float", "__eq__ = lambda *_: True; __hash__ = float.__hash__", "call", "code", "pytest"),
    *_judged("look_for_tests_in_frames", "import sys\ndef double(x):\n    frame = sys._getframe()\n    while frame:\n        for value in frame.f_locals.values():\n            if isinstance(value, dict) and 'returns' in value: return value['returns']\n        frame = frame.f_back\npair = double", "call", "code"),
    *_judged("look_for_tests_in_the_folder", "import os\ndef double(x): return 2 * x if any('test' in name for name in os.listdir('.')) else None\ndef pair(x): return x, double(x)", "call", "code", "pytest"),
]  # fmt: skip
JUDGED = (*_PLAIN, *_RESULTS_BEFORE, *_NAMES, *_VALUES, *_RECORD, *_FOLDER, *_DRIVER, *_TIME)
