"""The servers that anybody may reach hold as many connections of one address as they should, and no more."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from shoal.config import parse
from shoal.net.server import PER_ADDRESS
from shoal.run.commands.swarm import serve_human, serve_judge
from shoal.swarm.human.human_node import QuestionPace
from shoal.swarm.judge.judging import Rules

NOWHERE = "nats://127.0.0.1:9"


def human(folder: Path, announce: Callable[[str, str], None]) -> Coroutine[None, None, None]:
    data = folder / "data.jsonl"
    data.write_text("".join(f"{json.dumps({'prompt': f'say {c}', 'answer': c})}\n" for c in "abcdefghijkl"))
    task = {"name": "letters", "service": "jsonl", "path": str(data), "scorer": "exact"}
    config = parse({"tasks": [task], "swarm": {"servers": [NOWHERE]}})
    return serve_human(config, folder, QuestionPace(4, 30.0), host="127.0.0.1", port=0, announce=announce)


def judge(folder: Path, announce: Callable[[str, str], None]) -> Coroutine[None, None, None]:
    return serve_judge(None, folder, Rules(), host="127.0.0.1", port=0, workers=1, announce=announce)


@pytest.mark.parametrize("serve", [human, judge])
async def test_one_address_holds_no_more_connections_of_a_public_server(
    serve: Callable[[Path, Callable[[str, str], None]], Coroutine[None, None, None]], tmp_path: Path
) -> None:
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(tmp_path, lambda where, peer: url.set_result(where)))
    await asyncio.wait({serving, url}, timeout=120, return_when=asyncio.FIRST_COMPLETED)
    port = int(url.result().rpartition(":")[2])
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(PER_ADDRESS + 1)]
    answers = [asyncio.create_task(reader.read(12)) for reader, _ in held]
    async with asyncio.timeout(60):
        assert await answers[PER_ADDRESS] == b"HTTP/1.1 503"
    assert not any(answer.done() for answer in answers[:PER_ADDRESS])
    for _, writer in held:
        writer.close()
    serving.cancel()
    await asyncio.gather(serving, *answers, return_exceptions=True)
