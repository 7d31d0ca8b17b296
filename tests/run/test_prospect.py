"""Before a run starts, `shoal doctor run.toml` tells whether it will learn."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from command import shoal
from shoal.run.commands.prospect import judged
from shoal.run.demo_model.warm_start import REWRITE
from shoal.trainer.advantage import turn_returns
from shoal.types import (
    UNREAD,
    Completion,
    FinishReason,
    Group,
    Message,
    Reward,
    Role,
    Rollout,
    RolloutStatus,
    Task,
    Turn,
)

SPELLING = f"""
[[tasks]]
name = "spell_backward"
params = {{ min_word_len = 3, max_word_len = 5 }}
rewrite = {json.dumps([list(pair) for pair in REWRITE])}
reward = "correct"
"""
WORDS = """
[[tasks]]
name = "{name}"
service = "jsonl"
path = "words.jsonl"
scorer = {scorer}
"""


def asked(folder: Path, tasks: str, *options: str, code: int) -> tuple[dict[str, Any], str]:
    """What `shoal doctor run.toml --json` says of a run, and its progress."""
    rows = ({"prompt": f"reverse {letter}at", "answer": "7"} for letter in "abcdefghijklmnopqrstuvwxyz")
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(f'run_dir = "{folder}/run"\n{tasks}[rollout]\ngroup_size = 4\nmax_tokens = 12\n')
    done = shoal("doctor", str(folder / "run.toml"), "--json", "--seconds=1000", *options)
    assert done.returncode == code, done.stderr
    assert not (folder / "run").exists()
    return json.loads(done.stdout), done.stderr


def test_each_task_is_told_to_teach_to_be_unreadable_or_too_easy(tmp_path: Path) -> None:
    form = WORDS.format(name="form", scorer='"number"')
    easy = WORDS.format(name="easy", scorer='{ name = "length", at_most = 1000 }')
    said, progress = asked(tmp_path, SPELLING + form + easy, code=0)
    teaching, unread, right = (said["tasks"][name] for name in ("spell_backward", "form", "easy"))
    assert said["verdict"].startswith("this run can learn, but hardly from form, easy: ")
    assert (teaching["groups"], teaching["set"]) == (31, "")
    assert 0.25 < teaching["signal"] < 1
    assert 0 < teaching["reward"] == teaching["full_marks"] < 0.5
    assert teaching["distinct_answers"] > 2
    assert (unread["signal"], unread["unread_reason"]) == (0, "no number")
    assert unread["unread"] > 0.9
    assert "(no number): name the form in tasks.system_prompt, or set another tasks.scorer" in unread["set"]
    assert (right["signal"], right["full_marks"]) == (0, 1)
    assert "set tasks.params to harder questions" in right["set"]
    assert all(f"{name}: {said['tasks'][name]['set']}" in said["verdict"] for name in ("form", "easy"))
    assert "93 groups in" in progress


def test_answers_that_are_cut_are_told_and_no_signal_is_exit_code_1(tmp_path: Path) -> None:
    said, _ = asked(tmp_path, SPELLING, "--rollout.max_tokens=1", code=1)
    task = said["tasks"]["spell_backward"]
    assert said["verdict"].startswith("this run learns nothing as it is: 0 of 31 groups have differing rewards; ")
    assert (task["signal"], task["cut"]) == (0, 1)
    assert task["set"] == "100% of the answers are cut at their end: set rollout.max_tokens higher"


@pytest.mark.parametrize(
    ("tasks", "options", "why"),
    [
        ("", ("--train.teacher=demo",), "train.teacher: expected a run that learns from rewards"),
        ('[[stages]]\nkind = "rl"\n', (), "stages: expected a run whose model exists"),
    ],
)
def test_a_run_that_rewards_do_not_describe_is_refused(
    tasks: str, options: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(SPELLING + tasks)
    done = shoal("doctor", str(tmp_path / "run.toml"), *options)
    assert (done.returncode, why in done.stderr) == (2, True), done.stderr


def test_without_a_configuration_the_doctor_tells_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not" / "made"))
    done = shoal("doctor", "--json")
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["cache"] == f"{tmp_path / 'not' / 'made' / 'shoal'} (writable)"


def test_settings_without_a_configuration_are_refused() -> None:
    done = shoal("doctor", "--train.lr=1e-4")
    assert (done.returncode, "expected a CONFIG.toml before settings" in done.stderr) == (2, True)


def group(rewards: list[float | None], answers: str = "abcdefgh", evidence: str = "", cut: bool = False) -> Group:
    """Group with these rewards; None is a failed rollout."""
    ends = FinishReason.LENGTH if cut else FinishReason.STOP
    turn = Turn((1,), Completion((2,), (-1.0,), (0,), ends))

    def rollout(i: int, reward: float | None) -> Rollout:
        messages = (Message(Role.ASSISTANT, answers[i % len(answers)]),)
        if reward is None:
            return Rollout(f"r{i}", messages, (), Reward(0.0), RolloutStatus.FAILED, "engine: away")
        return Rollout(f"r{i}", messages, (turn,), Reward(reward, evidence=evidence))

    return Group("g", Task("t", "s", ()), tuple(rollout(i, reward) for i, reward in enumerate(rewards)), 0)


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ([group([1.0, 1.0])], "harder questions"),
        ([group([0.0, 0.0], cut=True)], "rollout.max_tokens higher"),
        ([group([0.0, 0.0], evidence=f"sums: {UNREAD}no number")], "(no number): name the form"),
        ([group([0.0, 0.0], answers="a")], "rollout.temperature higher"),
        ([group([0.0, 0.0])], "easier questions"),
        ([group([None, None])], "engine: away"),
        ([group([0.0, 1.0]), *[group([0.0, 0.0])] * 7], "rollout.group_size higher"),
        ([group([0.0, 1.0], cut=True)], "rollout.max_tokens higher"),
        ([], "set --seconds higher"),
        ([group([0.0, 0.01])], "no answer is right, and rewards differ by 0.01 in a group: set tasks.params to easier"),
        ([group([0.0, 1.0, None, None])], "too many rollouts fail, mostly for this reason: engine: away"),
    ],
)
def test_each_cause_of_missing_signal_has_its_own_setting(groups: list[Group], told: str) -> None:
    found = judged({"s": groups}, turn_returns, within_groups=True)
    assert told in found.verdict
    assert found.learns is any(each.usable and len({one.reward.value for one in each.finished}) > 1 for each in groups)


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.5, 1.0, None]), min_size=2, max_size=4).map(group), min_size=1, max_size=6
    ),
    st.booleans(),
)
def test_the_shares_are_those_of_the_groups_whatever_they_are(groups: list[Group], within_groups: bool) -> None:
    found = judged({"s": groups}, turn_returns, within_groups=within_groups)
    each = [{one.reward.value for one in one_group.finished} for one_group in groups if one_group.usable]
    differing = len(set().union(*each)) > 1
    share = sum(len(values) > 1 if within_groups else differing for values in each) / len(groups)
    table: Any = found.tables["s"]
    assert table["signal"] == pytest.approx(share)
    assert found.learns is (share > 0)
    assert bool(table["set"]) >= (share < 0.25)
    assert table["failed"] == sum(len(one.rollouts) - len(one.finished) for one in groups) / sum(
        len(one.rollouts) for one in groups
    )
    json.dumps(found.values, allow_nan=False)
