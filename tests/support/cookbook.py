"""Recipes of the tinker-cookbook from their own command lines, and the local files that they take for the hub's.

A recipe's model and data sets are looked up below the working directory first. So a folder there with a data set's name
holds local rows, and the recipe runs as it is.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODEL = "meta-llama/Llama-3.2-1B"
"""Name with which recipes find how to write messages; behind it is a local model."""
IMPORTANCE = "loss_fn=importance_sampling"
RUN = {
    "math_rl.train": (IMPORTANCE, "groups_per_batch=4", "group_size=2", "max_steps=2", "eval_every=0"),
    "rl_loop": (IMPORTANCE, "batch_size=4", "group_size=2", "max_tokens=8", "max_steps=2"),
    "rl_basic": (IMPORTANCE, "max_tokens=2", "max_steps=1"),
    "sl_loop": ("batch_size=4", "max_steps=2"),
    "sl_basic": ("max_steps=1", "eval_every=0"),
    "chat_sl.train": ("batch_size=16", "max_steps=2", "eval_every=0"),
    "preference.dpo.train": ("batch_size=8", "max_steps=2"),
    "distillation.on_policy_distillation": (
        *("groups_per_batch=2", "group_size=2", "max_tokens=8", "max_steps=2", "eval_every=0"),
        f"teacher_model={MODEL}",
    ),
    "multiplayer_rl.guess_number.train": (
        *("renderer_name=role_colon", "batch_size=2", "group_size=2", "max_tokens=8", "max_steps=1", "eval_every=0"),
    ),
    "preference.shorter.train": (
        *("renderer_name=role_colon", "batch_size=2", "group_size=2", "max_tokens=8", "max_steps=1", "eval_every=0"),
    ),
}
"""Recipes that run, with the arguments that make them small."""
TRAINED = {"preference.dpo.train": "dpo_loss", "rl_loop": "reward/total"}
"""Metric that shows a recipe's training, if it is not the optimizer's: rl_loop leaves out steps without any reward."""
LEFT_OUT = {
    "audio": "the model reads no audio",
    "chat_sl.sweep": "starts many recipes of chat_sl, which runs",
    "code_rl": "its sandboxes are in the cloud (Modal)",
    "decisions": "its questions are on the hub only",
    "distillation.off_policy_reasoning": "its data set is on the hub only",
    "distillation.on_policy_multi_teacher": "its teachers are on the hub only",
    "distillation.on_policy_distillation_harbor_multi_turn": "its sandboxes are in the cloud (Modal)",
    "forecasting": "its questions are on the hub only",
    "harbor_rl": "its sandboxes are in the cloud (Modal)",
    "multiplayer_rl.text_arena": "needs the package textarena",
    "multiplayer_rl.twenty_questions": "its answerer is a model that is on the hub only",
    "preference.rlhf": "trains its reward model in one command, for longer than a test may take",
    "prompt_distillation": "its data are made by a large model of Tinker's",
    "rl_numerics_check": "its text is on the hub only",
    "rubric": "its grader is a model that is on the hub only",
    "sdft": "its data sets are on the hub only",
    "search_tool": "needs the package chromadb, and a search server",
    "true_thinking_score": "its data sets are on the hub only",
    "verifiers_rl": "needs the package verifiers, of other versions than Shoal's",
    "vlm_classifier": "the model sees no images",
}
"""Recipes that are not run, with the reason."""


def prepare(folder: Path, model: Path) -> None:
    """Writes the model and the rows that the recipes look for."""
    generator = random.Random(0)
    sums = [(generator.randrange(10), generator.randrange(10)) for _ in range(1100)]
    link = folder / MODEL
    link.parent.mkdir(parents=True)
    link.symlink_to(model)
    rows: dict[str, list[dict[str, Any]]] = {
        "HuggingFaceH4/no_robots": [
            {
                "messages": [
                    {"role": "user", "content": f"{a} + {b}?"},
                    {"role": "assistant", "content": str(a + b)},
                ]
            }
            for a, b in sums
        ],
        "openai/gsm8k": [{"question": f"{a} + {b}?", "answer": f"#### {a + b}"} for a, b in sums],
        "zwhe99/DeepMath-103K": [{"question": f"{a} + {b}?", "final_answer": str(a + b)} for a, b in sums],
        "Anthropic/hh-rlhf": [
            {
                name: f"\n\nHuman: {a} + {b}?\n\nAssistant: {said}"
                for name, said in (("chosen", a + b), ("rejected", "no"))
            }
            for a, b in sums
        ],
    }
    for name, found in rows.items():
        target = folder / name
        target.mkdir(parents=True)
        (target / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in found[:130]))
        (target / "test.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in found))
    split = "".join(f"  - split: {name}\n    path: {name}.jsonl\n" for name in ("train", "test"))
    (folder / "openai/gsm8k/README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{split}---\n")


def recipe(
    name: str, arguments: Sequence[str], *, folder: Path, packages: Path, url: str, key: str, timeout_s: float = 280
) -> subprocess.CompletedProcess[str]:
    """Runs a recipe to its end."""
    own = {"TINKER_BASE_URL": url, "TINKER_API_KEY": key, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-m", f"tinker_cookbook.recipes.{name}", f"log_path={folder / 'logs' / name}", *arguments],
        cwd=folder,
        env={**os.environ, **own, "PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def modules(packages: Path) -> set[str]:
    """Names of all recipes that have a command: their module, or the folder of its module `train`."""
    root = packages / "tinker_cookbook" / "recipes"
    found = {path.relative_to(root).with_suffix("") for path in root.rglob("*.py") if "__main__" in path.read_text()}
    return {".".join(path.parts) for path in found}
