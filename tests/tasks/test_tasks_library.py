"""The task services of a run, with the real process that draws."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest

from shoal.config import TaskConfig
from shoal.errors import OtherRelease, TaskError
from shoal.swarm.trust.claim_verification import OwnTasks
from shoal.swarm.trust.limits import QuestionLimits
from shoal.swarm.trust.refusals import Reason
from shoal.tasks.library import Library
from shoal.tasks.procedural_client import NoReply, ProceduralClient, ReasoningGymService
from shoal.types import Json, Split, Task

SMALL: Json = {
    "name": "base_conversion",
    "params": {"min_base": 2, "max_base": 3, "min_value": 1, "max_value": 31},
    "rewrite": [[r"(?s).*the (\S+) number (\S+) to (\S+)\s*", r"\1 \2 to \3"]],
    "system_prompt": "Convert.",
}


def task_configs(*tables: Json) -> list[TaskConfig]:
    return [TaskConfig.model_validate(table) for table in tables]


def library(*tables: Json, seed: int = 0) -> Library:
    return Library(task_configs(*tables), seed)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_splits_of_a_small_space_share_no_question_and_no_seed_moves_one_across() -> None:
    with library(SMALL, seed=0) as one, library(SMALL, seed=1) as other:
        train = {one.draw(Split.TRAIN, index).messages for index in range(1500)}
        train |= {other.draw(Split.TRAIN, index).messages for index in range(500)}
        held_out = {one.draw(Split.EVAL, index).messages for index in range(500)}
    assert train.isdisjoint(held_out)
    assert len(train | held_out) == 62
    assert 4 <= len(held_out) <= 25  # a fifth of 62, give or take


def test_a_draw_depends_on_its_arguments_alone() -> None:
    indices = range(40)
    tables = (SMALL, {"name": "chain_sum", "weight": 2}, {"name": "word_ladder"})
    with library(*tables) as one:
        first = [one.draw(split, index) for split in Split for index in indices]
    with library(*tables) as other:
        assert [other.draw(split, index) for split in reversed(Split) for index in reversed(indices)] == first[::-1]


def test_the_seed_of_the_run_moves_training_questions_and_leaves_the_held_out_ones() -> None:
    with library({"name": "chain_sum"}, seed=1) as one, library({"name": "chain_sum"}, seed=2) as other:
        assert one.draw(Split.EVAL, 3) == other.draw(Split.EVAL, 3)
        assert one.draw(Split.TRAIN, 3) != other.draw(Split.TRAIN, 3)


def test_a_question_is_rewritten_under_its_system_prompt_and_carries_a_receipt() -> None:
    with library(SMALL) as tasks:
        task = tasks.draw(Split.TRAIN, 5)
    system, question = task.messages
    assert system.content == "Convert."
    assert len(question.content) < 30
    assert task.receipt is not None
    assert task.receipt.dataset == "base_conversion"
    assert task.answer


def test_reasoning_gym_s_own_instruction_is_put_before_the_question_where_a_task_names_it() -> None:
    with library({"name": "chain_sum", "system_prompt": "reasoning_gym:DeepSeekZero"}) as tasks:
        system, question = tasks.draw(Split.TRAIN, 0).messages
    assert "<answer>answer here</answer>" in system.content
    with library({"name": "chain_sum"}) as tasks:
        assert tasks.draw(Split.TRAIN, 0).messages == (question,)


def test_an_example_answer_stands_in_where_a_dataset_has_many_right_ones() -> None:
    with library({"name": "propositional_logic"}) as tasks:
        answers = [tasks.draw(Split.TRAIN, index).answer for index in range(30)]
    assert sum(answer is not None for answer in answers) > 20


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "chain_sums"}, "did you mean 'chain_sum'"),
        ({"name": "chain_sum", "params": {"min_term": 2}}, "did you mean 'min_terms'"),
        ({"name": "chain_sum", "params": 99}, "params: expected a level from 0 to"),
        ({"name": "chain_sum", "rewrite": [["(", ""]]}, "rewrite.0"),
        ({"name": "chain_sum", "system_prompt": "reasoning_gym:defualt"}, "expected one of reasoning_gym:DeepSeekZero"),
        ({"name": "quiz", "service": "jsonl", "path": "nowhere.jsonl"}, "JSONL file not found"),
    ],
)
def test_a_task_that_cannot_be_drawn_is_refused_and_leaves_no_process(table: Json, message: str) -> None:
    before = children()
    with pytest.raises(TaskError, match=message):
        library(SMALL, table)
    assert children() == before


def test_settings_that_never_give_a_question_are_refused_and_the_next_draw_works() -> None:
    endless, fine = task_configs(
        {"name": "base_conversion", "params": {"min_base": 5, "max_base": 5}}, {"name": "chain_sum"}
    )
    with ProceduralClient(draw_timeout_s=2.0) as drawer:
        service = ReasoningGymService(endless, 0, drawer)
        with pytest.raises(TaskError, match="no question came within 2 s"):
            service.draw(Split.TRAIN, 0)
        assert ReasoningGymService(fine, 0, drawer).draw(Split.TRAIN, 0).answer


def test_closing_ends_a_draw_that_another_thread_waits_for() -> None:
    endless, fine = task_configs(
        {"name": "base_conversion", "params": {"min_base": 5, "max_base": 5}}, {"name": "chain_sum"}
    )
    with ThreadPoolExecutor(1) as thread, ProceduralClient(draw_timeout_s=3600.0) as drawer:
        assert ReasoningGymService(fine, 0, drawer).draw(Split.TRAIN, 0).answer  # the child is ready
        service, other = ReasoningGymService(endless, 0, drawer), threading.active_count()
        drawing = thread.submit(service.draw, Split.TRAIN, 0)
        assert psutil.Process(drawer.pid).is_running()
        drawer.close()  # not after the hour that the draw would have
        with pytest.raises(NoReply):
            drawing.result()
        with pytest.raises(NoReply):
            service.draw(Split.TRAIN, 1)  # nobody starts another child
        assert drawer.pid is None
        assert threading.active_count() <= other  # an interpreter that ends would wait for the portal's thread


def test_a_drawing_process_that_was_killed_is_replaced_and_draws_the_same() -> None:
    with ProceduralClient() as drawer:
        service = ReasoningGymService(task_configs({"name": "chain_sum"})[0], 0, drawer)
        before = service.draw(Split.TRAIN, 7)
        assert drawer.pid is not None
        os.kill(drawer.pid, signal.SIGKILL)
        assert service.draw(Split.TRAIN, 7) == before


def test_a_question_of_another_release_is_told_from_one_that_cannot_be() -> None:
    with ProceduralClient() as drawer:
        service = ReasoningGymService(task_configs({"name": "chain_sum"})[0], 0, drawer)
        receipt = service.draw(Split.TRAIN, 7).receipt
        assert receipt is not None
        with pytest.raises(OtherRelease, match=r"drawn with reasoning-gym 0\.0\.1"):
            drawer.redraw(service.spec, replace(receipt, dataset_version="0.0.1"))


def test_a_claim_that_this_node_is_too_slow_to_draw_again_is_no_fault_of_its_author() -> None:
    async def main(tasks: Library) -> None:
        own = OwnTasks(tasks.services, limits=QuestionLimits(draw_s=3.0))
        claim = await own.claim(tasks.draw(Split.TRAIN, 1))
        assert isinstance(await own.task(claim), Task)
        (drawing,) = children() - before
        os.kill(drawing, signal.SIGSTOP)
        assert await own.task(claim) is Reason.TIMED_OUT
        assert isinstance(await own.task(claim), Task)
        own.close()

    with library({"name": "chain_sum"}) as tasks:
        before = children()
        asyncio.run(main(tasks))


def test_closing_leaves_no_process() -> None:
    before = children()
    with library({"name": "chain_sum"}):
        assert children() > before
    assert children() == before


def test_generators_that_print_do_not_reach_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    with library({"name": "bf"}) as tasks:
        tasks.draw(Split.TRAIN, 1)
    assert capfd.readouterr() == ("", "")


def test_the_main_process_loads_neither_reasoning_gym_nor_torch() -> None:
    program = (
        "import sys, shoal.tasks.library, shoal.reward.scorer;"
        "sys.exit(bool({'reasoning_gym', 'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
