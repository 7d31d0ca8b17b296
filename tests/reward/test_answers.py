"""A right answer is worth 1 with and without a thought, under every template and in every format."""

import asyncio
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from chat_templates import ANSWERING, renderer_of
from shoal.config import RewardConfig, TaskConfig
from shoal.model.answer import harmony, parted, stated, written
from shoal.model.chat_template import ChatRenderer
from shoal.reward.service import RewardService
from shoal.tasks.procedural_client import ProceduralClient, ReasoningGymService
from shoal.types import Message, Reward, RewardStatus, Role, Split, Task

ASK = Message(Role.USER, "What is the sum? Think in <think> if you like.")
FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
THEN_FINAL = "<|end|><|start|>assistant" + FINAL
# Template, what was drawn after its prompt ({} is the truth), and who must find it right.
BARE, SAID = "exact number math reasoning_gym", "number math reasoning_gym"
TABLE = [
    ("qwen3", "{}", BARE),
    ("qwen3", "<think>\n\n</think>\n\n{}", BARE),
    ("qwen3", "<think>\nFirst 3, then 4? No.\n</think>\n\n{}", BARE),
    ("qwen3", "<think>\nIt is 9.\n</think>\n\n<answer>{}</answer>", BARE),
    ("qwen3", "<think>\nIt is 9.\n</think>\n\nSo it is $\\boxed{{{}}}$.", BARE),
    ("qwen3", "<think>\nThe answer is 9.\n</think>\n\nThe answer is {}.", SAID),
    ("qwen3", "<think>\nHm.\n</think>\n\nAdding up step by step:\n\n**Final answer: {}**", SAID),
    ("qwen3", "<think>\nHm, </think> is a mark.\n</think>\n\n{}", BARE),
    ("deepseek-r1", "First 3, then 4? No.\n</think>\n\n{}", BARE),
    ("deepseek-r1", "</think>\n\n{}", BARE),
    ("deepseek-r1", "It is 9.\n</think>\n<answer> {} </answer>", BARE),
    ("deepseek-r1", "It is 9.\n</think>\n\n**Solution**\n\n\\[ \\boxed{{{}}} \\]", BARE),
    ("deepseek-r1", "It is 9.\n</think>\n\nThe answer is {}.", SAID),
    ("deepseek-r1", "<think>\nIt is 9.\n</think>\n\n{}", BARE),
    ("deepseek-r1", "\\boxed{{9}} it seems.\n</think>\n\n\\boxed{{{}}}", BARE),
    ("deepseek-r1", "It is 9.\n</think>\n\nAdding up:\n{}", SAID),
    ("smollm2", "{}", BARE),
    ("smollm2", " {}\n", BARE),
    ("smollm2", "So, the answer is {}.", SAID),
    ("smollm2", "3 and 4 first.\n#### {}", SAID),
    ("smollm2", "<think>3 and 4 first</think>{}", BARE),
    ("smollm2", "<think>3 and 4 first</think>\n<answer>{}</answer>", BARE),
    ("smollm2", "I add up 3 and 4.\n<answer>{}</answer>", BARE),
    ("smollm2", "I add up 3 and 4, which gives $\\boxed{{{}}}$.", BARE),
    ("llama3", "{}", BARE),
    ("llama3", "The final answer is: $\\boxed{{{}}}$", BARE),
    ("llama3", "## Step 1: 3 and 4\n\nThe final answer is: {}", SAID),
    ("llama3", "<think>\n3 and 4\n</think>\n<answer>\n{}\n</answer>", BARE),
    ("llama3", "<answer>9</answer>, no: <answer>{}</answer>", BARE),
    ("llama3", "<think>9</think><think>no</think>{}", BARE),
    ("llama3", "Adding up 3 and 4:\n\n{}", SAID),
    ("llama3", "The answer is **{}**", SAID),
    ("gpt-oss", FINAL + "{}", BARE),
    ("gpt-oss", ANALYSIS + "3 and 4." + THEN_FINAL + "{}", BARE),
    ("gpt-oss", ANALYSIS + "It is 9." + THEN_FINAL + "The answer is {}.", SAID),
    ("gpt-oss", ANALYSIS + "It is 9." + THEN_FINAL + "\\boxed{{{}}}", BARE),
    ("gpt-oss", ANALYSIS + "It is 9." + THEN_FINAL + "<answer>{}</answer>", BARE),
    ("gpt-oss", ANALYSIS + "3." + THEN_FINAL.replace("final", "commentary") + "Adding." + THEN_FINAL + "{}", BARE),
    ("magistral", "[THINK]3 and 4[/THINK]{}", BARE),
    ("magistral", "{}", BARE),
]
UNFINISHED = [
    ("qwen3", "<think>\nIt is {}"),
    ("deepseek-r1", "It is {}. The answer is {}"),
    ("smollm2", "<think>The answer is {}"),
    ("gpt-oss", ANALYSIS + "It is {}"),
    ("magistral", "[THINK]It is {}"),
]


@cache
def renderer(name: str) -> ChatRenderer:
    return renderer_of(ANSWERING[name])


@pytest.fixture(scope="module")
def drawn() -> Iterator[Task]:
    """A sum of reasoning-gym's."""
    with ProceduralClient() as drawer:
        yield ReasoningGymService(TaskConfig(name="chain_sum"), 0, drawer).draw(Split.TRAIN, 0)


@pytest.fixture(scope="module")
def scored() -> Iterator[Callable[[Task, list[str]], list[Reward]]]:
    with asyncio.Runner() as runner:
        service = RewardService(RewardConfig(timeout_s=20))
        runner.run(service.__aenter__())
        yield lambda task, texts: runner.run(service.score(task, texts))
        runner.run(service.__aexit__())


def said(template: str, drawn_text: str) -> str:
    """What a scorer is given of a drawn text."""
    made = renderer(template)
    prompt_ids = made.prompt_ids([ASK])
    return written(made.message([*made.token_ids(drawn_text), made.stop_token_ids[0]], prompt_ids))


def tasks(drawn: Task) -> dict[str, Task]:
    assert drawn.answer is not None
    named = {
        name: Task(f"quiz/{name}", "quiz", (ASK,), drawn.answer, f'{{"scorer": "{name}"}}')
        for name in ("exact", "number", "math")
    }
    return {**named, "reasoning_gym": drawn}


def test_a_right_answer_is_worth_one_under_every_template_and_in_every_format(
    drawn: Task, scored: Callable[[Task, list[str]], list[Reward]]
) -> None:
    assert len(TABLE) >= 40
    for name, task in tasks(drawn).items():
        wanted = [row for row in TABLE if name in row[2].split()]
        rewards = scored(task, [said(template, text.format(drawn.answer)) for template, text, _ in wanted])
        assert [row for row, reward in zip(wanted, rewards, strict=True) if reward.value != 1.0] == []


def test_a_wrong_answer_after_a_right_thought_is_wrong(
    drawn: Task, scored: Callable[[Task, list[str]], list[Reward]]
) -> None:
    texts = [
        said("qwen3", f"<think>\n{drawn.answer}\n</think>\n\n-1"),
        said("deepseek-r1", f"<answer>{drawn.answer}</answer></think>\n\n-1"),
        said("gpt-oss", f"{ANALYSIS}{drawn.answer}{THEN_FINAL}-1"),
    ]
    for task in tasks(drawn).values():
        assert all(reward.value < 0.5 for reward in scored(task, texts))


def test_a_thought_that_was_cut_off_is_wrong_and_not_failed(
    drawn: Task, scored: Callable[[Task, list[str]], list[Reward]]
) -> None:
    texts = [said(template, text.replace("{}", drawn.answer or "")) for template, text in UNFINISHED]
    for task in (*tasks(drawn).values(), Task("q", "q", (ASK,), None, '{"scorer": {"name": "regex", "pattern": ""}}')):
        rewards = scored(task, texts)
        assert [(one.value, one.status) for one in rewards] == [(0.0, RewardStatus.SCORED)] * len(texts)
        assert {one.evidence for one in rewards} == {"a thought without an end"}


def test_form_and_length_are_judged_of_the_whole_completion(
    scored: Callable[[Task, list[str]], list[Reward]],
) -> None:
    form = Task("f", "f", (), None, '{"scorer": {"name": "format", "tags": ["think", "answer"]}}')
    short = Task("l", "l", (), None, '{"scorer": {"name": "length", "at_most": 9, "unit": "words"}}')
    thinking = "3 and 4\n</think>\n<answer>7</answer>"
    assert scored(form, [said("deepseek-r1", thinking), said("smollm2", f"<think>{thinking}")])[0].value == 1.0
    assert scored(short, [said("deepseek-r1", f"{'well ' * 9}</think>7")])[0].value == 0.0


def test_marks_that_the_truth_or_the_pattern_names_stay(scored: Callable[[Task, list[str]], list[Reward]]) -> None:
    tagged = Task("t", "t", (), "<answer>7</answer>", '{"scorer": "exact"}')
    pattern = Task("p", "p", (), None, '{"scorer": {"name": "regex", "pattern": "^<think>.+</think>\\\\s*\\\\d+$"}}')
    assert [one.value for one in scored(tagged, ["<think>x</think><answer>7</answer>", "7"])] == [1.0, 0.0]
    assert [one.value for one in scored(pattern, ["<think>x</think> 7", "7"])] == [1.0, 0.0]


@pytest.mark.parametrize("name", ANSWERING)
@pytest.mark.parametrize("text", ["7", "<think>\n3 and 4\n</think>\n\n7", "<think>\n3 and"])
def test_a_peer_s_text_is_said_in_the_own_template_s_words(name: str, text: str) -> None:
    made = renderer(name)
    prompt_ids = made.prompt_ids([ASK])
    ids = made.completion_ids(text, prompt_ids)
    assert ids is not None
    assert parted(written(made.message(ids, prompt_ids))) == parted(text)
    assert ("<think>" in made.text(ids)) == ("<think>" in text and name in ("qwen3", "smollm2", "llama3"))


@pytest.mark.parametrize("name", ANSWERING)
def test_a_peer_s_text_with_a_special_token_in_it_is_not_read(name: str) -> None:
    made = renderer(name)
    prompt_ids = made.prompt_ids([ASK])
    for text in (f"7{ANSWERING[name].stops[0]}", f"<think>\n{ANSWERING[name].stops[0]}\n</think>\n\n7"):
        assert made.completion_ids(text, prompt_ids) is None


def test_a_prompt_without_a_template_may_open_the_thought() -> None:
    made = renderer("smollm2")
    assert made.message(made.token_ids("3 and 4</think>7"), made.token_ids("What? <think>\n")) == Message(
        Role.ASSISTANT, "7", reasoning="3 and 4"
    )


@pytest.mark.parametrize(
    "text", ["", "</think>", "<think>", "<|channel|>", "<|channel|>final", "<|channel|>x<|message|>"]
)
def test_no_text_breaks_the_parting(text: str) -> None:
    assert parted(text).answer in ("", text)
    assert harmony(text).answer in ("", text)
    assert stated(text) is None
