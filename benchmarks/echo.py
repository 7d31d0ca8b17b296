"""The echo process serves the gateway before an engine that computes nothing: `python -m benchmarks.echo 1 2 [PORT]`.

An answer then takes from 1 to 2 seconds. The process writes its URL to standard output and serves until its standard
input ends.
"""

import asyncio
import random
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from functools import cache
from pathlib import Path

import uvicorn
import uvloop
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from shoal.gateway.server import Gateway
from shoal.interfaces import EngineInfo, LogitRules, ServedToken, ServedTokens
from shoal.model.chat_template import ChatRenderer
from shoal.net.collection import collect_rarely
from shoal.types import Completion, FinishReason, Sampling

CONTEXT = 8192
ANSWER_TOKENS = 48
ANSWERS = 1024
END = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = "zero one two three four five six seven eight nine and is plus minus the answer of user assistant"


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer on sums in words, which never spells single letters."""
    numbers = random.Random(0)
    words = WORDS.split(" ")
    corpus = [" ".join(numbers.choices(words, k=12)) + f" {numbers.randrange(1000)}." for _ in range(400)]
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    specials = [AddedToken(text, special=True, normalized=False) for text in (END, "<|im_start|>")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        corpus,
        trainers.BpeTrainer(vocab_size=600, special_tokens=specials, initial_alphabet=alphabet, show_progress=False),
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=END)
    wrapped.chat_template = TEMPLATE
    return wrapped


@cache
def _letter_ids() -> dict[str, int]:
    return {letter: tokenizer().encode(letter, add_special_tokens=False)[0] for letter in set(WORDS)}


@cache
def _answers() -> list[tuple[int, ...]]:
    """Token ids of words, letter by letter, then the end; made before any measurement, since an engine is another
    process."""
    ids, words = _letter_ids(), random.Random(1)
    said = (
        " ".join(words.choices(WORDS.split(" "), k=ANSWER_TOKENS // 2))[: ANSWER_TOKENS - 1] for _ in range(ANSWERS)
    )
    return [(*(ids[letter] for letter in text), tokenizer().eos_token_id) for text in said]


def answer_ids(seed: int) -> tuple[int, ...]:
    """Picks the engine's answer for a seed."""
    return _answers()[seed % ANSWERS]


def answer_s(seed: int, shortest_s: float, longest_s: float) -> float:
    """Seconds that the engine waits for a seed, uniform between the two bounds."""
    return shortest_s + (longest_s - shortest_s) * (seed // ANSWERS % 4096) / 4096


class EchoEngine:
    """Engine that waits as long as one would compute, and answers by the seed; implements `interfaces.Engine`."""

    def __init__(self, shortest_s: float, longest_s: float) -> None:
        self._shortest_s, self._longest_s = shortest_s, longest_s
        self.version = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, n: int = 1, priority: int = 0, session: str = ""
    ) -> list[Completion]:
        """Returns one completion."""
        seed = sampling.seed or 0
        if self._longest_s:
            await asyncio.sleep(answer_s(seed, self._shortest_s, self._longest_s))
        ids = answer_ids(seed)
        return [Completion(ids, (-0.5,) * len(ids), (self.version,) * len(ids), FinishReason.STOP)]

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, rules: LogitRules, *, every: int
    ) -> AsyncGenerator[ServedTokens, None]:
        """Yields one completion at once."""
        (whole,) = await self.generate(prompt_ids, sampling)
        rows = zip(whole.token_ids, whole.logprobs, strict=True)
        yield ServedTokens(tuple(ServedToken(*row) for row in rows), whole.finish_reason)

    async def prompt_logprobs(self, token_ids: Sequence[int], top: int) -> list[ServedToken]:
        """Returns no logprobs."""
        raise NotImplementedError

    async def update_weights(self, version: int, path: Path) -> None:
        """Sets the version; there are no weights."""
        self.version = version

    async def info(self) -> EngineInfo:
        """Describes the context only."""
        return EngineInfo(0, "", CONTEXT, 0.0, 0, 0, 0, 0, 0)


async def serve(shortest_s: float, longest_s: float, port: int = 0) -> None:
    """Serves until standard input ends."""
    made, _ = tokenizer(), _answers()
    engine = EchoEngine(shortest_s, longest_s)
    gateway = Gateway(
        engine,
        ChatRenderer(made, (made.eos_token_id,)),
        max_model_len=CONTEXT,
        model="echo",
        model_server=engine,
    )
    listening = socket.create_server(("127.0.0.1", port), backlog=4096)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = uvicorn.Server(uvicorn.Config(gateway.app, log_level="warning", access_log=False, lifespan="on"))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    collect_rarely()
    sys.stdout.write(f"http://127.0.0.1:{listening.getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.should_exit = True
    await serving


if __name__ == "__main__":
    SHORTEST_S, LONGEST_S, PORT = (*sys.argv[1:], "0")[:3]
    uvloop.run(serve(float(SHORTEST_S), float(LONGEST_S), int(PORT)))
