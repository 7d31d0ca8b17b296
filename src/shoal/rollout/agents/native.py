"""Agents of this process: tasks that hold their conversations themselves, in the token tree and without HTTP."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.gateway.sessions import AnswerRequest, Session
from shoal.gateway.token_tree import Conversation
from shoal.interfaces import Playable
from shoal.rollout.agents.host import AgentSession
from shoal.rollout.agents.runner import Play
from shoal.types import Message, Outcome, Task


@dataclass(frozen=True, slots=True)
class SessionChat:
    """Implements `interfaces.Chat` on a session; the URL and key are for clients of OpenAI's, where there is HTTP."""

    session: Session
    base_url: str = ""
    api_key: str = ""

    async def answer(self, messages: Sequence[Message], *, tools: str = "", max_tokens: int | None = None) -> Message:
        """The model's next message; messages that extend an answer are not tokenised again."""
        asked = AnswerRequest(Conversation(tuple(messages), tools), digest="", max_tokens=max_tokens)
        generation = await self.session.generation(asked)
        self.session.deliver(generation)
        return generation.message


def native_play(service: Playable) -> Play:
    """Has a task service hold the conversation itself."""

    async def play(task: Task, seat: AgentSession) -> Outcome:
        return await service.play(task, SessionChat(seat.session, seat.base_url, seat.api_key))

    return play
