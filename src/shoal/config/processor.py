"""Which types of numbers this machine multiplies fast. Loads no torch."""

import re
from pathlib import Path

FLAGS = ({"amx_bf16"}, {"avx512_bf16"}, {"avx512bw", "avx512vl", "avx512dq"}, {"bf16"})
"""Sets of features, each of which suffices: Intel's and AMD's, those with which oneDNN computes it, and Arm's."""


def multiplies_bfloat16(*, gpus: bool = True, system: Path = Path("/proc")) -> bool:
    """Whether a GPU that may be used or the processor multiplies bfloat16; false where `system` does not tell.

    Without such instructions a forward pass of SmolLM2 in bfloat16 takes many times as long as in float32.
    """
    if gpus and (system / "driver/nvidia/version").exists():
        return True
    try:
        text = (system / "cpuinfo").read_text()
    except OSError:
        return False
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    has = set(found[1].split()) if found else set()
    return any(flags <= has for flags in FLAGS)
