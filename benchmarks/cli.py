"""The cli bench measures CPU seconds of `shoal --help` and of imports, the best of several."""

import resource
import subprocess
import sys

STATEMENTS = {
    "help_s": ["-m", "shoal.cli", "--help"],
    "import_s": ["-c", "import shoal"],
    "import_types_s": ["-c", "import shoal.types"],
    "python_s": ["-c", ""],
}


def measure(quick: bool) -> dict[str, object]:
    """Measures the CPU seconds of a process for each; `python_s` is an empty process's."""
    return {name: min(_cpu_s(arguments) for _ in range(3 if quick else 10)) for name, arguments in STATEMENTS.items()}


def _cpu_s(arguments: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
