"""`python -m benchmarks.chaos [FILE]`: what all runs so far add up to."""

import json
import sys
from pathlib import Path

from benchmarks.chaos import RESULTS, lines, summed

sys.stdout.write(json.dumps(summed(lines(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)), indent=2) + "\n")
