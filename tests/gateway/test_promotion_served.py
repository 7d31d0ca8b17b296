"""`shoal serve --promote` as a user starts it: two engines of two Versions, and an application that judges answers."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from safetensors.torch import load_file, save_file

from command import shoal
from until import until

ASK: list[Any] = [{"role": "user", "content": "say"}]


@pytest.fixture
def models(tmp_path: Path, tiny_model_dir: Path) -> tuple[Path, Path]:
    """Two models of one name whose greedy answers differ."""
    one, other = tmp_path / "m", tmp_path / "other" / "m"
    for copy in (one, other):
        shutil.copytree(tiny_model_dir, copy)
    weights = load_file(other / "model.safetensors")
    save_file(
        {name: -tensor if name == "lm_head.weight" else tensor for name, tensor in weights.items()},
        other / "model.safetensors",
        {"format": "pt"},
    )
    return one, other


@contextmanager
def serving(old: Path, new: Path, folder: Path, end: signal.Signals) -> Iterator[tuple[openai.OpenAI, psutil.Process]]:
    command = [sys.executable, "-m", "shoal.cli", "serve", "--model", str(old), "--promote", str(new), "--port", "0"]
    with (
        (folder / "stderr").open("ab") as said,
        subprocess.Popen(
            [*command, "--folder", str(folder), "--quiet"],
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env=os.environ,
        ) as served,
    ):
        try:
            assert served.stdout is not None
            with openai.OpenAI(base_url=served.stdout.readline().strip(), api_key="-", max_retries=0) as client:
                yield client, psutil.Process(served.pid)
        finally:
            served.send_signal(end)


def sessions(client: openai.OpenAI, count: int, good: str = "") -> list[str]:
    """Greedy answers of so many sessions, each judged by whether it is `good`, until the trial ends."""
    texts = list[str]()
    while len(texts) < count and state(client)["stage"] == "trial":
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id, messages=ASK, temperature=0, max_tokens=6
        )
        texts.append(str(answer.choices[0].message.content))
        if good:
            client.post("/outcomes", body={"id": answer.id, "outcome": float(texts[-1] == good)}, cast_to=object)
    return texts


def answers(client: openai.OpenAI, count: int) -> set[str]:
    made = (client.chat.completions.create(model="m", messages=ASK, temperature=0, max_tokens=6) for _ in range(count))
    return {str(answer.choices[0].message.content) for answer in made}


def state(client: openai.OpenAI) -> Any:
    return client.get("/promotion", cast_to=object)


def engine_of(server: psutil.Process, model: Path) -> psutil.Process:
    return next(child for child in server.children() if f"--model={model}" in child.cmdline())


def both(client: openai.OpenAI) -> tuple[str, str]:
    """The usual answer of the old Version, and that of the new one."""
    said = Counter(sessions(client, 24))
    while len(said) < 2:  # each is of the new Version with one chance in eight
        said.update(sessions(client, 8))
    (of_old, often), (of_new, seldom) = said.most_common()
    assert often > seldom
    return of_old, of_new


def test_users_return_from_a_bad_version_also_past_a_kill(tmp_path: Path, models: tuple[Path, Path]) -> None:
    good, bad = models
    back = tmp_path / "back"
    back.mkdir()
    with serving(good, bad, back, signal.SIGKILL) as (client, _):
        wanted, _ = both(client)
        asked = len(sessions(client, 6, wanted))  # no draws let a trial end before 8
        before = state(client)
        assert before["old"]["outcomes"] + before["new"]["outcomes"] == asked == 6
    with serving(good, bad, back, signal.SIGINT) as (client, _):
        assert state(client) == before
        asked += len(sessions(client, 200, wanted))
        assert (state(client)["stage"], asked <= 200) == ("returned", True)
        assert answers(client, 10) == {wanted}
    said = (back / "stderr").read_text()
    assert before["sentence"] in said
    assert "returned to the old Version: the new one is worse by at least" in said


def test_a_better_version_gets_all_users_and_the_old_engine_is_needed_no_more(
    tmp_path: Path, models: tuple[Path, Path]
) -> None:
    old, new = models
    with serving(old, new, tmp_path, signal.SIGINT) as (client, server):
        _, wanted = both(client)
        asked = len(sessions(client, 400, wanted))
        assert (state(client)["stage"], asked < 400) == ("promoted", True)
        assert answers(client, 10) == {wanted}
        with pytest.raises(openai.APIStatusError, match="after the trial, promoted: the new Version is better by"):
            client.post("/outcomes", body={"id": "0" * 16, "outcome": 1}, cast_to=object)
        engine_of(server, old).kill()
        assert answers(client, 10) == {wanted}
        engine_of(server, new).kill()
        server.wait(60)
    assert "promoted: the new Version is better by at least" in (tmp_path / "stderr").read_text()
    with serving(old, new, tmp_path, signal.SIGINT) as (client, _):  # the file keeps the end
        assert (state(client)["stage"], answers(client, 10)) == ("promoted", {wanted})


def test_the_old_version_answers_all_when_the_new_engine_ends_during_the_trial(
    tmp_path: Path, models: tuple[Path, Path]
) -> None:
    old, new = models
    with serving(old, new, tmp_path, signal.SIGINT) as (client, server):
        wanted, _ = both(client)
        sessions(client, 6, wanted)
        before = state(client)
        engine_of(server, new).kill()
        asyncio.run(until(lambda: state(client)["stage"] == "returned"))
        assert state(client)["sentence"].startswith("returned to the old Version: ")
        assert answers(client, 20) == {wanted}
    with serving(old, new, tmp_path, signal.SIGINT) as (client, server):  # the next process goes on with the trial
        assert state(client) == before
        engine_of(server, old).kill()
        server.wait(60)
    assert "engine" in (tmp_path / "stderr").read_text()


def test_a_model_with_other_tokens_is_no_version_of_this_one(tiny_model_dir: Path) -> None:
    done = shoal("serve", "--model", str(tiny_model_dir), "--promote", "demo", "--port", "0")
    assert done.returncode == 2
    assert "--promote: expected a model with the tokenizer and chat template of" in done.stderr


@pytest.mark.parametrize("more", [("--promote", "./nothing-here"), ("tinker", "--promote", "demo")])
def test_a_model_that_is_not_there_and_tinker_are_refused(tiny_model_dir: Path, more: tuple[str, ...]) -> None:
    assert shoal("serve", "--model", str(tiny_model_dir), *more).returncode == 2
