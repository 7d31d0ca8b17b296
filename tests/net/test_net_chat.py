"""The client of chat completions: what a refusal says, and what no completion is."""

import asyncio

import pytest

from shoal.errors import EngineUnavailable
from shoal.net.chat import ChatRefused, completion
from shoal.net.client import session
from stub_server import Stub, stubbed


def asked(status: int, body: bytes) -> str:
    """What a server's only answer is as a completion."""

    async def ask() -> str:
        async with stubbed(Stub(otherwise=(status, body))) as url, session() as http:
            return (await completion(http, url, {"messages": []})).message.content or ""

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (
            b'{"error": {"message": "too long", "code": "context_length_exceeded", "param": [{}]}}',
            "context_length_exceeded",
        ),
        (b'{"error": {"code": 400}}', "400"),
        (b'{"error": {"code": null}}', ""),
        (b'{"error": "too long"}', ""),
        (b"[" * 20_000, ""),
        (b"\xff", ""),
    ],
)
def test_a_refusal_has_the_code_that_the_server_gave(body: bytes, code: str) -> None:
    with pytest.raises(ChatRefused, match="HTTP 400") as refused:
        asked(400, body)
    assert refused.value.code == code


@pytest.mark.parametrize("body", [b'{"choices": []}', b"{}", b"no", b'{"choices": [{"message": 3}]}'])
def test_an_answer_that_is_no_completion_makes_the_server_unavailable(body: bytes) -> None:
    with pytest.raises(EngineUnavailable, match="expected a chat completion"):
        asked(200, body)


def test_the_first_choice_is_the_answer() -> None:
    assert asked(200, b'{"choices": [{"message": {"content": "yes"}}, {"message": {"content": "no"}}]}') == "yes"
