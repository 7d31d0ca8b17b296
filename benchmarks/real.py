"""The real bench trains SmolLM2-135M-Instruct as `shoal demo --real` does, and says what that brought and took.

accuracy_before, accuracy_after   held-out accuracy, sampled; `greedy_*` beside it
minutes                           of the whole, start and evaluations included
samples_per_s                     answers trained per second
peak_rss_mb                       largest resident memory of any process of the run
"""

import resource
import tempfile
import time
from pathlib import Path

from shoal.run.commands.demo import real_config, run_demo

Report = dict[str, object]


def measure(quick: bool) -> Report:
    """Measures one seed; quick takes two steps and asks eight held-out questions."""
    shortened = ("train.steps=2", "checkpoint.every_steps=2", "eval.questions=8") if quick else ()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        figures, _ = run_demo(real_config(Path(folder) / "run", 0, shortened))
    minutes = (time.monotonic() - began_s) / 60
    names = ("accuracy_before", "accuracy_after", "greedy_before", "greedy_after", "samples_per_s", "steps")
    peak_kb = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {**{name: figures[name] for name in names}, "minutes": minutes, "peak_rss_mb": peak_kb / 1024}
