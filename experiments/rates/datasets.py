"""reasoning-gym's data sets as they are, and rewritten for a small model.

`python -m experiments.rates.datasets` measures what SmolLM2 gets right at times before training; results/start.json has
the figures of `shoal doctor` in three variants, and results/commonest.json the share of the commonest answer.

own        questions and scorer of the data set
rewritten  a system prompt asks for the bare result
smaller    also smaller numbers, and the scorer takes the last number of an answer
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from reasoning_gym.factory import create_dataset

from experiments.grid import Record
from shoal.config import parse
from shoal.run.commands.prospect import prospect_of

FILE = Path(__file__).parent / "results" / "start.json"
COMMONEST = FILE.with_name("commonest.json")
DRAWN = 600
"""Questions whose commonest answer is counted."""
RESULT = {"system_prompt": "Answer with the result only."}
TRUTH = {"system_prompt": "Answer with True or False only."}
TRIED: dict[str, Record] = {
    "gcd": RESULT,
    "syllogism": {"system_prompt": "Answer with Yes or No only."},
    "isomorphic_strings": TRUTH,
    "ransom_note": TRUTH,
    "course_schedule": TRUTH,
    "letter_counting": RESULT,
    "aiw": RESULT,
    "chain_sum": RESULT | {"params": 0},
    "family_relationships": RESULT,
    "sentence_reordering": RESULT,
    "number_filtering": RESULT,
    "simple_equations": RESULT,
}
SMALLER: dict[str, Record] = {
    name: RESULT | {"params": params, "scorer": "number"}
    for name, params in {
        "products": {"min_digits": 1, "max_digits": 2},
        "gcd": {"max_value": 30},
        "lcm": {"max_value": 20},
        "count_bits": {"max_n": 511},
        "leg_counting": {"min_animals": 1, "max_animals": 2, "max_instances": 4},
        "basic_arithmetic": {"max_terms": 2, "max_digits": 2, "operators": ["+", "-"], "allow_parentheses": False},
        "letter_counting": {"min_words": 1, "max_words": 2},
        "simple_equations": {"max_terms": 2, "max_value": 20, "operators": ["+"], "operators_weights": [1.0]},
    }.items()
}
REWRITTEN = ("isomorphic_strings", "ransom_note", "course_schedule", "syllogism", "chain_sum")
"""Those of TRIED of which one group in seven at least has a signal."""
NUMBERS = ("gcd", "lcm", "letter_counting", "products", "basic_arithmetic")
"""Those of SMALLER of which one group in seven at least has a signal; count_bits is the sixth."""
SECONDS = 120.0


def commonest(name: str, **params: Any) -> float:
    """Share of the questions of a data set that its commonest answer is right for."""
    drawn = create_dataset(name, size=DRAWN, seed=5, **params)
    return max(Counter(drawn[at]["answer"] for at in range(DRAWN)).values()) / DRAWN


def main() -> None:
    """Measures the variants that results/start.json lacks."""
    shares = {name: commonest(name) for name in REWRITTEN[:4]}
    shares |= {name: commonest(name, **SMALLER[name]["params"]) for name in NUMBERS}
    COMMONEST.write_text(json.dumps(shares, indent=1) + "\n")
    found: Record = json.loads(FILE.read_text()) if FILE.exists() else {}
    own: dict[str, Record] = {name: {} for name in TRIED}
    variants = {"own": own, "rewritten": TRIED, "smaller": SMALLER}
    for variant, given in variants.items():
        if variant in found:
            continue
        tasks = [{"name": name, "reward": "correct", **settings} for name, settings in given.items()]
        model, rollout = {"path": "smollm2", "dtype": "auto"}, {"group_size": 8, "max_tokens": 32}
        config = parse({"run_dir": "runs/none", "model": model, "tasks": tasks, "rollout": rollout})
        found[variant] = prospect_of(config, SECONDS, lambda words: print(words, file=sys.stderr)).tables  # type: ignore[assignment]
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
