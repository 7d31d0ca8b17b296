"""The embedded small model is made on first use by a short supervised phase, then kept in the user's cache folder.

`demo` learns to spell words backward from a careless teacher: most of the shown answers contain a slip, and words of
five letters are rare. The model thus knows the task and often slips, which leaves reinforcement learning a real gain.
`demo-code` learns to complete tiny programs in the same way, with some expressions being rare: it is shown what a
function makes of a word (f('sun')='nus'), and writes what comes after `s` in its program ([::-1]). Only unit tests can
tell whether an answer is right, as `[-1::-1]` is, too. `demo-turns` learns to
move the towers of Hanoi from a teacher of mostly random moves. `demo-sums` learns sums, as plain text, some after an
example. `demo-tools` learns to call the tools of agent frameworks. All other questions are of the training split.

`python -m shoal.run.demo_model.warm_start DIR` is the child process of this phase.
"""

import hashlib
import itertools
import json
import random
import string
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec
from pydantic import JsonValue

from shoal.config import TaskConfig
from shoal.environments.games import played_turns
from shoal.model.chat_template import ChatRenderer
from shoal.model.made_models import make
from shoal.model.quantised import Making
from shoal.model.renderer_loading import load_renderer
from shoal.net.process import die_with_parent
from shoal.run.demo_model import tool_talks
from shoal.tasks.holdout import RULE
from shoal.tasks.jsonl import JsonlService
from shoal.tasks.library import Library
from shoal.types import Json, Split, seed_for

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


EXPRESSIONS: Mapping[str, Callable[[str], str]] = {
    "[::-1]": lambda word: word[::-1],
    ".upper()": str.upper,
    "*2": lambda word: word * 2,
    "[0]": lambda word: word[0],
    "[-1]": lambda word: word[-1],
    "[1:]": lambda word: word[1:],
    "[:-1]": lambda word: word[:-1],
    ".title()": str.title,
}
"""Answers with their effect on a word."""
RARE = ("[-1]", "[1:]", "*2")
"""Expressions that the embedded model rarely sees, which leaves them for reinforcement learning."""
HIDDEN = 2
"""Words in a program's tests, in addition to the shown word."""


def rows() -> Iterator[dict[str, Json]]:
    """Questions without end, each different, as rows of a data set for the `code` checker."""
    generator = random.Random(seed_for("small programs"))
    asked = set()
    while True:
        answer = generator.choice(list(EXPRESSIONS))
        words = ["".join(generator.sample(LETTERS, generator.randint(3, 5))) for _ in range(1 + HIDDEN)]
        prompt = f"f('{words[0]}')='{EXPRESSIONS[answer](words[0])}'"
        if prompt not in asked:
            asked.add(prompt)
            tests: list[Json] = [{"call": "f", "args": [word], "returns": EXPRESSIONS[answer](word)} for word in words]
            yield {"prompt": prompt, "answer": answer, "info": {"tests": tests}}


def write(path: Path, count: int) -> None:
    """Writes the first questions as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in islice(rows(), count)))


def slip_of_program(generator: random.Random, answer: str) -> str:
    """Samples another expression."""
    return generator.choice([expression for expression in EXPRESSIONS if expression != answer])


SUM_EXAMPLE = "User: What is 4 + 5?\n\nAssistant: 9\n\n"
EXAMPLE_SHARE = 0.25
"""Share of the sums that follow the example; shorter prompts take less time to learn from."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
Lesson: TypeAlias = tuple[list[int], list[int]]
"""Prompt and answer tokens of one example."""
REWRITE = [(r"^Spell this word backward \(example: sun -> nus\): (\w+)$", r"reverse \1")]
DEMO_TASK: dict[str, JsonValue] = {
    "name": "spell_backward",
    "params": {"min_word_len": 3, "max_word_len": 5},
    "rewrite": [list(pair) for pair in REWRITE],
    "reward": "correct",
}
"""Task that the embedded model was made for."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings of the supervised phase; a change of any value makes another model."""

    width: int = 128
    layers: int = 2
    heads: int = 4
    feed_forward: int = 256
    context: int = 512
    rope_theta: float = 1000.0
    seed: int = 0
    steps: int = 600
    batch: int = 64
    lr: float = 3e-3
    lr_end_share: float = 0.1
    warmup_steps: int = 20
    max_grad_norm: float = 1.0
    slip_share: float = 0.7
    long_share: float = 0.2
    pool: int = 12000
    lesson: Literal["spell_backward", "fill_in", "hanoi", "sums", "tools"] = "spell_backward"
    tokenizer: Literal["characters", "pairs", "tools"] = "characters"
    muon_lr: float | None = None
    """Learning rate of the layers' matrices under Muon; None leaves them to AdamW, as all other weights are."""


RECIPES: Mapping[str, Recipe] = {
    "demo": Recipe(),
    "demo-code": Recipe(lesson="fill_in", steps=400, slip_share=0.6, long_share=0.1),
    "demo-turns": Recipe(lesson="hanoi", steps=300, slip_share=0.75),
    "demo-sums": Recipe(lesson="sums", layers=3, steps=350, lr=2e-3, muon_lr=0.02, slip_share=0.3),
    "demo-tools": Recipe(
        lesson="tools",
        tokenizer="tools",
        context=4096,
        seed=1,
        steps=800,
        batch=32,
        lr=2e-3,
        muon_lr=0.02,
        slip_share=0.2,
    ),
}
"""Recipes by the names that `model.path` gives them."""
MODEL_TYPE: Final = "seed_oss"
"""Qwen2's architecture, whose tokenizer transformers leaves as it is; see `architecture.ModelType`."""
CODE_EVAL_SHARE = 0.2
"""Share of held-out questions as in examples/code, which the model never sees."""


def demo_model(recipe: Recipe | None = None) -> tuple[Path, float]:
    """Makes the embedded model unless it is in the cache. Raises `ModelError`.

    Returns its directory, and the seconds that its making took just now: 0 from the cache.
    """
    given = {name: value for name, value in asdict(recipe or Recipe()).items() if value is not None}
    settings = msgspec.json.encode(given)
    digest = hashlib.blake2b(MODEL_TYPE.encode() + RULE + settings, digest_size=6).hexdigest()
    return make(f"demo-{digest}", "shoal.run.demo_model.warm_start", [settings.decode()])


def slip(generator: random.Random, answer: str) -> str:
    """Swaps, drops, doubles or replaces one letter of an answer."""
    i = generator.randrange(len(answer))
    match generator.randrange(4):
        case 0:
            i = generator.randrange(len(answer) - 1)
            return answer[:i] + answer[i + 1] + answer[i] + answer[i + 2 :]
        case 1:
            return answer[:i] + answer[i + 1 :]
        case 2:
            return answer[:i] + answer[i] + answer[i:]
    return answer[:i] + generator.choice(LETTERS) + answer[i + 1 :]


def _tower_lessons(recipe: Recipe, renderer: ChatRenderer) -> list[Lesson]:
    turns = itertools.islice(played_turns(recipe.seed, recipe.slip_share), recipe.steps * recipe.batch)
    stop = renderer.stop_token_ids[0]
    return [(renderer.prompt_ids(messages), [*renderer.token_ids(said), stop]) for messages, said in turns]


def _tool_lessons(recipe: Recipe, renderer: ChatRenderer) -> list[Lesson]:
    def slipped(generator: random.Random, value: str) -> str:
        return _wrong_digit(generator, value) if generator.random() < recipe.slip_share else value

    shown = itertools.islice(tool_talks.talks(recipe.seed, slipped), recipe.steps * recipe.batch)
    stop = renderer.stop_token_ids[0]
    return [(renderer.prompt_ids(talk, tools), [*renderer.token_ids(said), stop]) for talk, tools, said in shown]


def _fill_in_lessons(recipe: Recipe, renderer: ChatRenderer) -> list[Lesson]:
    generator = random.Random(seed_for("warm start", recipe.seed))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "questions.jsonl"
        write(path, recipe.pool)
        config = TaskConfig(name="fill_in", service="jsonl", path=str(path), scorer="code", eval_share=CODE_EVAL_SHARE)
        service = JsonlService(config, recipe.seed)
        drawn = (service.draw(Split.TRAIN, index) for index in itertools.count())
        rare = RARE
        kept = (task for task in drawn if task.answer not in rare or generator.random() < recipe.long_share)
        tasks = list(itertools.islice(kept, recipe.steps * recipe.batch))
    questions = ((renderer.prompt_ids(task.messages), task.answer or "") for task in tasks)
    return _taught(recipe, renderer, generator, questions, slip_of_program)


def _word_lessons(recipe: Recipe, renderer: ChatRenderer) -> list[Lesson]:
    generator = random.Random(seed_for("warm start", recipe.seed))
    pools = []
    for shortest, longest, count in ((3, 4, recipe.pool), (5, 5, recipe.pool // 2)):
        config = TaskConfig(
            name="spell_backward", params={"min_word_len": shortest, "max_word_len": longest}, rewrite=REWRITE
        )
        with Library([config], recipe.seed) as library:
            tasks = [library.draw(Split.TRAIN, index) for index in range(count)]
        pools.append([(renderer.prompt_ids(task.messages), task.answer or "") for task in tasks])
    rows = range(recipe.steps * recipe.batch)
    questions = (generator.choice(pools[generator.random() < recipe.long_share]) for _ in rows)
    return _taught(recipe, renderer, generator, questions, slip)


def _sum_lessons(recipe: Recipe, renderer: ChatRenderer) -> list[Lesson]:
    """Sums of two numbers up to 100, in the words of the tinker-cookbook's `math_rl` and `role_colon`."""
    generator = random.Random(seed_for("warm start", recipe.seed))

    def question() -> tuple[list[int], str]:
        x, y = generator.randint(0, 100), generator.randint(0, 100)
        before = SUM_EXAMPLE if generator.random() < EXAMPLE_SHARE else ""
        return renderer.token_ids(f"{before}User: What is {x} + {y}?\n\nAssistant:"), f" {x + y}"

    questions = (question() for _ in range(recipe.steps * recipe.batch))
    return _taught(recipe, renderer, generator, questions, _wrong_digit)


def _wrong_digit(generator: random.Random, answer: str) -> str:
    """Replaces one digit of an answer."""
    i = generator.choice([i for i, sign in enumerate(answer) if sign.isdigit()])
    return answer[:i] + generator.choice([digit for digit in string.digits if digit != answer[i]]) + answer[i + 1 :]


def _taught(
    recipe: Recipe,
    renderer: ChatRenderer,
    generator: random.Random,
    questions: Iterable[tuple[list[int], str]],
    slip: Callable[[random.Random, str], str],
) -> list[Lesson]:
    """Answers of the careless teacher, who slips in some. Each question is drawn after the answer before it."""
    shown = ((ids, slip(generator, a) if generator.random() < recipe.slip_share else a) for ids, a in questions)
    return [(ids, [*renderer.token_ids(said), renderer.stop_token_ids[0]]) for ids, said in shown]


def _optimizers(model: "PreTrainedModel", recipe: Recipe) -> list["torch.optim.Optimizer"]:
    """AdamW; for a recipe with `muon_lr`, Muon for the layers' matrices, with which sums are learned in half the steps.

    Source of Muon: arXiv 2502.16982.
    """
    import torch

    if recipe.muon_lr is None:
        return [torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=0.0, fused=True)]
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    return [
        torch.optim.AdamW(others, lr=recipe.lr, weight_decay=0.0, fused=True),
        torch.optim.Muon(matrices, lr=recipe.muon_lr, weight_decay=0.0),
    ]


def main(arguments: Sequence[str]) -> None:
    """Makes the model of a recipe in a directory."""
    import torch

    die_with_parent()
    torch.set_num_threads(1)
    directory, recipe = Path(arguments[0]), msgspec.json.decode(arguments[1], type=Recipe)
    with Making("making the small model") as making:
        _make(directory, recipe, making)


def _make(directory: Path, recipe: Recipe, making: Making) -> None:
    """Teaches a new model the lessons of a recipe."""
    import torch

    from shoal.model.loading import load_model
    from shoal.model.packed import packed_outputs
    from shoal.run.demo_model.architecture import Shape, character_tokenizer, pair_tokenizer, save, untrained

    shape = Shape(
        recipe.width, recipe.layers, recipe.heads, recipe.feed_forward, recipe.context, recipe.rope_theta, MODEL_TYPE
    )
    tokenizers = {"characters": character_tokenizer, "pairs": pair_tokenizer, "tools": tool_talks.tokenizer}
    tokenizer = tokenizers[recipe.tokenizer]()
    save(untrained(shape, recipe.seed, tokenizer), directory, tokenizer)
    lessons = {
        "fill_in": _fill_in_lessons,
        "hanoi": _tower_lessons,
        "spell_backward": _word_lessons,
        "sums": _sum_lessons,
        "tools": _tool_lessons,
    }
    making.now("writing its lessons")
    rows = lessons[recipe.lesson](recipe, load_renderer(directory))  # of every step, in order
    model = load_model(directory)
    optimizers = _optimizers(model, recipe)
    for step in range(recipe.steps):
        decay = 1 - (1 - recipe.lr_end_share) * step / recipe.steps
        for optimizer in optimizers:
            lr = optimizer.defaults["lr"]
            optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / recipe.warmup_steps) * decay
        # The order changes the last bits of a model, and the name in the cache does not contain it.
        batch = sorted(rows[step * recipe.batch : (step + 1) * recipe.batch], key=lambda row: len(row[0]) + len(row[1]))
        lengths = [len(prompt) + len(answer) for prompt, answer in batch]
        tokens_T = torch.tensor([token for prompt, answer in batch for token in (*prompt, *answer)])
        answers = [j >= len(prompt) for prompt, answer in batch for j in range(len(prompt) + len(answer))]
        loss = -packed_outputs(model, tokens_T, lengths, at=torch.tensor(answers).nonzero()[:, 0]).logp_N.mean()
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
        making.now(f"step {step + 1} of {recipe.steps}, loss {loss.item():.3f}")
    making.tell(f"step {recipe.steps} of {recipe.steps}, loss {loss.item():.3f}")
    save(model, directory, tokenizer)


if __name__ == "__main__":
    main(sys.argv[1:])
