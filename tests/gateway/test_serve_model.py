"""`shoal serve --model demo` as a model server: a real engine, whose rules change the logits as the API says."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import jsonschema
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from browser import browser_path, chromium
from shoal.model.renderer_loading import load_renderer
from shoal.run.prepare import model_directory
from until import until

ASK: list[Any] = [{"role": "user", "content": "Spell the word 'abc' backward."}]


@dataclass(frozen=True)
class Serving:
    client: openai.OpenAI
    log: Path


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    log = tmp_path_factory.mktemp("serve") / "requests.jsonl"
    command = [str(Path(sys.executable).with_name("shoal")), "serve", "--model", "demo", "--port", "0", "--quiet"]
    with subprocess.Popen(
        [*command, "--device", "cpu", "--log", str(log)], stdout=subprocess.PIPE, text=True, env=os.environ
    ) as served:
        try:
            assert served.stdout is not None
            url = served.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), url
            assert served.stdout.readline().startswith(f"curl {url}/chat/completions")
            with openai.OpenAI(base_url=url, api_key="-", max_retries=0) as client:
                assert [model.id for model in client.models.list().data] == ["demo"]
                yield Serving(client, log)
        finally:
            served.send_signal(signal.SIGINT)
        assert served.wait(timeout=60) == 0


def chat(serving: Serving, **asked: Any) -> Any:
    return serving.client.chat.completions.create(model="demo", messages=ASK, **{"max_tokens": 12, **asked})


def test_greedy_logprobs_are_those_of_the_model_and_the_best_come_first(serving: Serving) -> None:
    answer = chat(serving, temperature=0, logprobs=True, top_logprobs=3, extra_body={"return_token_ids": True})
    (choice,) = answer.choices
    directory = model_directory("demo")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    row = torch.tensor([[*answer.prompt_token_ids, *choice.token_ids]])
    with torch.inference_mode():
        logp_TV = model(row).logits[0].log_softmax(-1)[len(answer.prompt_token_ids) - 1 : -1]
    assert len(choice.logprobs.content) == len(choice.token_ids) > 2
    for entry, token, logp_V in zip(choice.logprobs.content, choice.token_ids, logp_TV, strict=True):
        assert entry.logprob == pytest.approx(logp_V[token].item(), abs=1e-3)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(logp_V.topk(3).values.tolist(), abs=1e-3)
        assert entry.top_logprobs[0].token == entry.token
    text = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content[:-1]).decode()
    assert text == choice.message.content


def test_scoring_a_prompt_gives_what_a_harness_needs_to_compare_answers(serving: Serving) -> None:
    ids = load_renderer(model_directory("demo")).token_ids("word abc")
    answer = serving.client.completions.create(
        model="demo", prompt=[ids, ids[:4]], echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    for choice, prompt in zip(answer.choices, (ids, ids[:4]), strict=True):
        found = choice.logprobs
        assert found is not None
        assert found.token_logprobs is not None
        assert found.top_logprobs is not None
        assert len(found.token_logprobs) == len(prompt) + 1
        for logprob, top in zip(found.token_logprobs[1:], found.top_logprobs[1:], strict=True):
            assert logprob in top.values()
            assert logprob <= max(top.values())
    assert (
        answer.choices[0].logprobs.token_logprobs[1:4]
        == pytest.approx(  # type: ignore[union-attr,index]
            answer.choices[1].logprobs.token_logprobs[1:4],  # type: ignore[union-attr,index]
            abs=1e-3,
        )
    )


def test_a_bias_forbids_a_token_and_a_penalty_makes_repetitions_rarer(serving: Serving) -> None:
    ids = {"return_token_ids": True}
    (plain,) = chat(serving, temperature=0, extra_body=ids).choices
    first = plain.token_ids[0]
    (biased,) = chat(serving, temperature=0, logit_bias={str(first): -100}, extra_body=ids).choices
    assert first not in biased.token_ids
    forced = str(plain.token_ids[1])
    (repeating,) = chat(serving, temperature=0, logit_bias={forced: 100}, max_tokens=20, extra_body=ids).choices
    assert set(repeating.token_ids) == {int(forced)}
    many: dict[str, Any] = {"logit_bias": {forced: 6}, "seed": 1, "max_tokens": 40, "n": 4, "extra_body": ids}
    often, seldom = (chat(serving, frequency_penalty=penalty, **many).choices for penalty in (0, 2))
    counts = [sum(choice.token_ids.count(int(forced)) for choice in found) for found in (often, seldom)]
    assert counts[0] > 2 * counts[1]


def test_an_answer_under_a_schema_satisfies_it(serving: Serving) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 99}, "ok": {"enum": ["yes", "no"]}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = chat(serving, response_format=form, n=4, seed=3, max_tokens=100)
    said = [json.loads(choice.message.content) for choice in answer.choices]
    for value in said:
        jsonschema.validate(value, schema)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    with pytest.raises(openai.BadRequestError, match="response_format"):
        chat(serving, response_format={**form, "json_schema": {"name": "x", "schema": {"type": "wrong"}}})


def test_a_stream_equals_the_body_and_ends_at_a_stop_string(serving: Serving) -> None:
    whole = chat(serving, temperature=0).choices[0].message.content
    pieces = [
        chunk.choices[0].delta.content or "" for chunk in chat(serving, temperature=0, stream=True) if chunk.choices
    ]
    assert "".join(pieces) == whole
    cut = chat(serving, temperature=0, stop=[whole[1]]).choices[0]
    assert (cut.message.content, cut.finish_reason) == (whole[0], "stop")


def test_a_browser_is_told_what_is_served_and_how_to_ask(serving: Serving) -> None:
    home = str(serving.client.base_url).removesuffix("v1/")
    with urlopen(home, timeout=30) as answer:
        page = answer.read().decode()
    assert "<h1>demo</h1>" in page
    assert f"curl {home}v1/chat/completions" in page
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


def test_a_browser_talks_with_the_model_and_copies_addresses(serving: Serving) -> None:
    def asked() -> list[str]:
        return [line for line in serving.log.read_text().splitlines() if "/chat/completions" in line]

    async def check() -> None:
        before = len(asked())
        home = str(serving.client.base_url).removesuffix("v1/")
        browser_path()
        async with chromium() as page:
            await page.goto(home)
            await page.tab_to("at.ariaLabel == 'Copy Anthropic base URL'")
            await page.press("Enter")
            await page.until("document.activeElement.textContent == 'Copied'")
            await page.tab_to("at.matches('textarea')")
            await page.command("Input.dispatchKeyEvent", type="keyDown", key="v", commands=["paste"])
            assert await page.value("text.value") == home.removesuffix("/")
            await page.value("text.value = ''")
            for turn in (1, 2):
                await page.type(f"Spell the word 'ab{turn}' backward. <b>")
                await page.press("Enter")
                await page.until(
                    f"said.children.length == {2 * turn} && document.querySelector('form button').textContent == 'Send'"
                )
            words = await page.value("[...said.children].map(one => one.textContent)")
            assert words[0] == "you: Spell the word 'ab1' backward. <b>"
            assert [word.partition(": ")[0] for word in words] == ["you", "model"] * 2
            assert "[" not in words[1] + words[3]  # no error
            await until(lambda: len(asked()) == before + 2)  # a line follows its answer
            first, second = [json.loads(line) for line in asked()[-2:]]
            assert (first["status"], second["status"]) == (200, 200)
            assert second["prompt_tokens"] > 2 * first["prompt_tokens"]  # the conversation goes on
            assert await page.value("document.documentElement.scrollWidth") <= 360
            assert page.complaints == []

    asyncio.run(check())


def test_a_range_error_names_its_field_and_the_log_has_a_line_for_each_request(serving: Serving) -> None:
    def lines() -> list[str]:
        return serving.log.read_text().splitlines()

    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        chat(serving, logprobs=True, top_logprobs=99)
    with pytest.raises(openai.BadRequestError, match="presence_penalty"):
        chat(serving, presence_penalty=3)
    chat(serving)
    asyncio.run(until(lambda: "presence_penalty" in "".join(lines()[-2:-1])))  # a line follows its answer
    records = [json.loads(line) for line in lines()]
    assert (records[-1]["status"], records[-1]["model"], records[-1]["completion_tokens"] > 0) == (200, "demo", True)
    assert [record["status"] for record in records[-3:-1]] == [400, 400]
    assert "presence_penalty" in records[-2]["error"]
