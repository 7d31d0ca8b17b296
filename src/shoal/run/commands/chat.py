"""`shoal chat` asks a model line by line and shows its answers as they come; a separate engine computes them."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

from shoal.config import Config
from shoal.errors import SessionError
from shoal.interfaces import LogitRules, ModelServer, Renderer
from shoal.model.renderer_loading import load_renderer
from shoal.net.process import cores
from shoal.run.commands.serve import chat_directory, lone_engine
from shoal.types import Message, Role, Sampling

PIECE_TOKENS = 16
"""Tokens of an answer that are shown at once."""
NEW = "/new"
READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Beginning of a conversation, and the sampling of its answers."""

    system: str = ""
    temperature: float = 0.0
    max_tokens: int = 512


@dataclass(slots=True)
class Prompt:
    """Lines of standard input, read without a thread, so that Ctrl-C is never held up."""

    _buffered: bytes = b""

    async def line(self) -> str | None:
        """The next line; None at the end."""
        while b"\n" not in self._buffered:
            await self._readable()
            if not (data := os.read(sys.stdin.fileno(), READ_BYTES)):
                rest, self._buffered = self._buffered, b""
                return rest.decode(errors="replace") or None
            self._buffered += data
        line, _, self._buffered = self._buffered.partition(b"\n")
        return line.decode(errors="replace")

    async def _readable(self) -> None:
        """Waits for input; a file always has some."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        try:
            loop.add_reader(sys.stdin.fileno(), ready.set)
        except OSError:
            return
        try:
            await ready.wait()
        finally:
            loop.remove_reader(sys.stdin.fileno())


@dataclass(slots=True)
class Dialogue:
    """Messages so far, and the engine that continues them."""

    engine: ModelServer
    renderer: Renderer
    sampling: Sampling
    longest: int
    """The most tokens of prompt and answer together."""
    messages: list[Message] = field(default_factory=list)

    async def answer(self, question: str) -> AsyncIterator[str]:
        """Asks, and gives the answer's text piece by piece. Raises `SessionError` when the context is full."""
        asked = [*self.messages, Message(Role.USER, question)]
        prompt_ids = self.renderer.prompt_ids(asked)
        room = min(self.sampling.max_tokens, self.longest - len(prompt_ids))
        if room < 1:
            raise SessionError(f"the conversation has {len(prompt_ids)} tokens and the model's context {self.longest}")
        said: list[int] = []
        shown, sampling = "", replace(self.sampling, max_tokens=room)
        async for piece in self.engine.stream(prompt_ids, sampling, LogitRules(), every=PIECE_TOKENS):
            said += [token.id for token in piece.tokens]
            ended = piece.finish_reason is not None
            text = self.renderer.message(said, prompt_ids).content
            # A character of several tokens may be incomplete, and a thought is not an answer.
            if text.startswith(shown) and (ended or not text.endswith("\N{REPLACEMENT CHARACTER}")):
                yield text[len(shown) :]
                shown = text
        self.messages = [*asked, self.renderer.message(said, prompt_ids)]


async def chat_with(config: Config, options: ChatOptions, prompt: Prompt, say: Callable[[str], None]) -> None:
    """Answers line by line until the input ends. Raises a `ShoalError`."""
    directory = chat_directory(config.model.path)
    renderer = load_renderer(directory)
    async with lone_engine(directory, config.model, cores()) as (_, engine):
        longest = (await engine.info()).max_model_len
        sampling = Sampling(options.max_tokens, options.temperature, stop_token_ids=renderer.stop_token_ids)
        begun = [Message(Role.SYSTEM, options.system)] if options.system else []
        talk = Dialogue(engine, renderer, sampling, longest, list(begun))
        say(f"{directory}; {NEW} begins anew, Ctrl-D ends\n> ")
        while (line := await prompt.line()) is not None:
            if line.strip() == NEW:
                talk.messages = list(begun)
                say("(a new conversation)\n")
            elif line.strip():
                try:
                    async for piece in talk.answer(line.strip()):
                        say(piece)
                except SessionError as error:
                    say(f"({error}; {NEW} begins anew)")
                say("\n")
            say("> ")
        say("\n")
