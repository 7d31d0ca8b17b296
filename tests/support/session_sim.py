"""A client that does to a session whatever clients do, and an oracle that judges what the engine received and drew."""

import random
import re
from collections import Counter
from dataclasses import dataclass, field, replace

from shoal.gateway.conversation import Conversation, minted_id
from shoal.gateway.token_tree import (
    Attachment,
    Cause,
    Generation,
    OpenGeneration,
    TokenTree,
)
from shoal.trainer.advantage import rows
from shoal.types import Completion, FinishReason, Message, Reward, Role, Rollout, ToolCall

SPECIALS = {Role.SYSTEM: "S", Role.USER: "U", Role.TOOL: "T", Role.ASSISTANT: "A"}
END, TOOLS = "E", "#"
PIECES = [*"SUTAE#", *"abc ~!:|0123456789", "ab", "bc", "abc", " a", "c "]  # ambiguous: "abc" has four tokenisations
ID = {piece: i for i, piece in enumerate(PIECES)}
LONGEST_FIRST = sorted(PIECES, key=len, reverse=True)


def decode(ids: tuple[int, ...]) -> str:
    return "".join(PIECES[i] for i in ids)


def encode(text: str) -> tuple[int, ...]:
    """Greedy, so that most drawn sequences are not the encoding of their text."""
    ids, at = [], 0
    while at < len(text):
        piece = next(piece for piece in LONGEST_FIRST if text.startswith(piece, at))
        ids.append(ID[piece])
        at += len(piece)
    return tuple(ids)


def said(message: Message) -> str:
    return message.content + "".join(f"!{call.arguments}|" for call in message.tool_calls)


def rendered(messages: tuple[Message, ...]) -> str:
    return "".join(f"{SPECIALS[message.role]}{said(message)}{END}" for message in messages)


def full_ids(conversation: Conversation) -> tuple[int, ...]:
    tools = f"{TOOLS}{conversation.tools}{END}" if conversation.tools else ""
    return encode(tools + rendered(conversation.messages) + "A")


def bridge_ids(attachment: Attachment) -> tuple[int, ...]:
    return () if attachment.continues else encode(END + rendered(attachment.tail) + "A")


def parsed(ids: tuple[int, ...], session: str, call_id: int) -> Message:
    """Reasoning stands between tildes in front, calls between exclamation mark and bar at the end."""
    text = decode(ids).removesuffix(END)
    reasoning, text = text[1:].split("~", 1) if text.startswith("~") and text.count("~") > 1 else ("", text)
    content, *calls = text.split("!")
    minted = tuple(
        ToolCall(minted_id(session, call_id, i), "f", call.removesuffix("|")) for i, call in enumerate(calls)
    )
    return Message(Role.ASSISTANT, content, minted, reasoning=reasoning)


@dataclass(frozen=True)
class Draw:
    """What the engine received and gave, once."""

    prompt: tuple[int, ...]
    completion: Completion
    digest: str


@dataclass
class Talk:
    """One client's conversation, and which draw stands behind the last answer in it (None once it was edited)."""

    messages: tuple[Message, ...]
    tools: str
    held: int | None = None
    cut: bool = False


@dataclass
class Asked:
    """A request under way."""

    talk: Talk
    conversation: Conversation
    call: OpenGeneration
    draw: int
    held: int | None
    lost: bool


class Wrong(AssertionError):
    """The oracle found the invariant broken."""


@dataclass
class Simulation:
    """One random session. `run` raises `Wrong` when the ledger is."""

    seed: int
    tree: TokenTree
    log: list[Draw] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    delivered: set[int] = field(default_factory=set)
    draw_of: dict[int, int] = field(default_factory=dict)
    did: Counter[str] = field(default_factory=Counter)
    version: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.talks = [Talk((Message(Role.USER, self.words()),), self.random.choice(["", "abc"]))]

    def words(self) -> str:
        return "".join(self.random.choice(["a", "b", "c", "ab", " "]) for _ in range(self.random.randint(1, 4)))

    def run(self) -> "Simulation":
        for _ in range(self.random.randint(6, 30)):
            action = self.random.choices(
                [
                    self.ask,
                    self.answer,
                    self.edit,
                    self.compact,
                    self.rollback,
                    self.change_tools,
                    self.fork,
                    self.fail,
                ],
                [10, 14, 0.5, 0.5, 0.7, 0.5, 1, 0.3],
            )[0]
            action()
        while self.asked:
            self.answer()
        self.judge()
        return self

    # What clients do.

    def ask(self) -> None:
        talk = self.random.choice(self.talks)
        conversation = Conversation(talk.messages, talk.tools)
        self.begin(talk, conversation, talk.held, lost=self.random.random() < 0.1)
        if self.random.random() < 0.15:  # the same request at the same time, on purpose
            self.did["twins"] += 1
            other = replace(talk)
            self.talks.append(other)
            self.begin(other, conversation, other.held, lost=False)

    def begin(self, talk: Talk, conversation: Conversation, held: int | None, *, lost: bool) -> None:
        digest = repr(conversation)
        attachment = self.tree.attach(conversation)
        if attachment.cause is None and self.random.random() < 0.02:
            attachment = self.tree.detached(attachment, Cause.NO_BRIDGE)
        ids = bridge_ids(attachment) if attachment.cause is None else full_ids(conversation)
        call = self.tree.open(attachment, ids, digest)
        self.did[str(attachment.cause)] += 1
        self.check_prompt(held, conversation, attachment, call)
        self.asked.append(Asked(talk, conversation, call, self.drawn(call), held, lost))

    def drawn(self, call: OpenGeneration) -> int:
        """The engine: draws pieces, sometimes a thought and calls; newer weights may come while it does."""
        choice = self.random.choice
        text = [choice(["a", "b", "c", "ab", "bc", "abc", " "]) for _ in range(self.random.randint(0, 3))]
        if self.random.random() < 0.3:
            text = ["~", choice(["a", "b"]), "~", *text]
        if self.random.random() < 0.3:
            text += ["!", choice("01"), "|"] * self.random.randint(1, 2)
        finish = FinishReason.LENGTH if self.random.random() < 0.2 else FinishReason.STOP
        text += [END] if finish is FinishReason.STOP else []
        versions = []
        for _ in text:
            self.version += self.random.random() < 0.05
            versions.append(self.version)
        self.did["versions mid-answer"] += len(set(versions)) > 1
        logprobs = tuple(-self.random.random() - 1e-9 for _ in text)  # unique: they name the drawn token
        completion = Completion(tuple(ID[piece] for piece in text), logprobs, tuple(versions), finish)
        self.log.append(Draw(call.prompt_ids, completion, call.digest))
        return len(self.log) - 1

    def answer(self) -> None:
        if not self.asked:
            return
        asked = self.asked.pop(self.random.randrange(len(self.asked)))
        completion = self.log[asked.draw].completion
        message = parsed(completion.token_ids, str(self.seed), asked.call.id)
        generation = self.tree.commit(asked.call, completion, message)
        self.draw_of[generation.id] = asked.draw
        if asked.lost:
            self.lose(asked)
            return
        self.tree.deliver(generation.id)
        self.delivered.add(asked.draw)
        if asked.talk.messages == asked.conversation.messages and asked.talk.tools == asked.conversation.tools:
            self.hear(asked, message, completion)

    def lose(self, asked: Asked) -> None:
        """The client never got the answer: it retries as its library does, asks again, or gives up."""
        what = self.random.choice(["replay", "again", "give up"])
        self.did[what] += 1
        if what == "replay":
            before = len(self.log)
            found = self.tree.retried(asked.call.digest)
            if not isinstance(found, Generation | OpenGeneration) or len(self.log) != before:
                raise Wrong("a retry is answered without drawing anew")
            if isinstance(found, Generation):
                self.tree.deliver(found.id)
                self.delivered.add(self.draw_of[found.id])
        elif what == "again":
            self.begin(asked.talk, asked.conversation, asked.held, lost=False)

    def hear(self, asked: Asked, message: Message, completion: Completion) -> None:
        talk = asked.talk
        told = replace(message, reasoning="")
        if self.random.random() < 0.3:
            told = replace(told, content=f" {told.content.strip()} ".replace("  ", " "))  # clients strip and wrap
        talk.messages, talk.held = (*talk.messages, told), asked.draw
        cut = completion.finish_reason is FinishReason.LENGTH
        if cut and self.random.random() < 0.3 and not told.tool_calls:
            self.did["continued"] += 1
            return
        for call in told.tool_calls:
            talk.messages = (*talk.messages, Message(Role.TOOL, self.words(), tool_call_id=call.id))
        if not told.tool_calls or self.random.random() < 0.2:
            talk.messages = (*talk.messages, Message(Role.USER, self.words()))

    def edit(self) -> None:
        talk = self.random.choice(self.talks)
        at = self.random.randrange(len(talk.messages))
        edited = replace(talk.messages[at], content=talk.messages[at].content + "abc")
        talk.messages, talk.held = (*talk.messages[:at], edited, *talk.messages[at + 1 :]), None
        self.did["edit"] += 1

    def compact(self) -> None:
        talk = self.random.choice(self.talks)
        talk.messages, talk.held = (Message(Role.SYSTEM, self.words()), Message(Role.USER, self.words())), None

    def rollback(self) -> None:
        talk = self.random.choice(self.talks)
        users = [i for i, message in enumerate(talk.messages) if message.role is Role.USER]
        at = self.random.choice(users) if users else 0
        talk.messages, talk.held = (*talk.messages[:at], Message(Role.USER, self.words())), None

    def change_tools(self) -> None:
        talk = self.random.choice(self.talks)
        talk.tools, talk.held = {"": "abc", "abc": "c b", "c b": ""}[talk.tools], None

    def fork(self) -> None:
        """A sub-agent, or a second attempt from the same point."""
        self.talks.append(replace(self.random.choice(self.talks)))

    def fail(self) -> None:
        """The engine dies: nothing was drawn."""
        if self.asked:
            asked = self.asked.pop()
            if asked.draw == len(self.log) - 1:
                self.log.pop()
                self.tree.cancel(asked.call)
            else:
                self.asked.append(asked)

    # What must be true.

    def check_prompt(
        self, held: int | None, conversation: Conversation, attachment: Attachment, call: OpenGeneration
    ) -> None:
        """The engine is shown the conversation that the client sent, on the very tokens of the answer it holds."""
        sent = decode(full_ids(conversation))
        shown = decode(call.prompt_ids)
        if attachment.continues:
            sent = sent[:-2]
        if visible(shown) != visible(sent):
            raise Wrong(f"the client sent {sent!r}, the engine was shown {shown!r}")
        if held is None or attachment.cause is Cause.NO_BRIDGE:
            return
        before = (self.log[held].prompt, self.log[held].completion.token_ids)
        answers = [m for m in conversation.messages if m.role is Role.ASSISTANT]
        if any(message.tool_calls for message in answers[-1:]):
            candidates = [before]
        else:  # equal answers to equal requests cannot be told apart
            text = visible(decode(before[0] + before[1]).removesuffix(END))
            candidates = [(d.prompt, d.completion.token_ids) for d in self.log]
            candidates = [pair for pair in candidates if visible(decode(pair[0] + pair[1]).removesuffix(END)) == text]
        if not any(call.prompt_ids[: len(p) + len(d)] == p + d for p, d in candidates):
            raise Wrong("an answer was re-tokenised, or another one was taken for it")

    def judge(self) -> None:
        rollout = Rollout("r", self.tree.messages(), self.tree.turns(), Reward(0.0))
        trained: Counter[float] = Counter()
        contexts = {lp: known for draw in self.log for lp, known in facts(draw)}
        for row in rows(rollout, 1.0):
            context = 0
            for token, mask, lp, version in zip(row.tokens, row.mask, row.logprobs, row.versions, strict=True):
                if mask:
                    trained[lp] += 1
                    if contexts.get(lp) != (context, token, version):
                        raise Wrong("a trained token does not sit where it was drawn")
                context = hash((context, token))
        self.judge_counts(trained)

    def judge_counts(self, trained: Counter[float]) -> None:
        """Each draw is trained once; of equal ones that no client got, the first, if any."""
        answered = {self.log[i].digest for i in self.delivered}
        for i, draw in enumerate(self.log):
            counts = {trained[lp] for lp in draw.completion.logprobs}
            first = all(earlier.digest != draw.digest for earlier in self.log[:i])
            expected = {int(i in self.delivered or (draw.digest not in answered and first))}
            # A later prompt may go on from a lost answer: taken for an equal one, or by chance spelt alike.
            allowed = {0, 1} if i not in self.delivered and self.quoted(i) else expected
            if len(counts) > 1 or not counts <= allowed:
                raise Wrong(f"draw {i} is trained {sorted(counts)} times, expected {sorted(allowed)}")

    def quoted(self, i: int) -> bool:
        """Whether a later prompt goes on from this draw."""
        whole = self.log[i].prompt + self.log[i].completion.token_ids
        return any(draw.prompt[: len(whole)] == whole for draw in self.log[i + 1 :])


def visible(text: str) -> str:
    """Without what clients may drop or change: reasoning, spaces, and where the parts of one answer meet."""
    shown, parts = re.sub(r"~[^~]*~|\s", "", text), 1
    while parts:
        shown, parts = re.subn(r"(A[^A-Z]*)EA", r"\1", shown)
    return shown


def facts(draw: Draw) -> list[tuple[float, tuple[int, int, int]]]:
    """For each drawn token, by its logprob: the hash of all tokens before it, its id, its version."""
    context = 0
    for token in draw.prompt:
        context = hash((context, token))
    found = []
    for token, lp, version in zip(
        draw.completion.token_ids, draw.completion.logprobs, draw.completion.versions, strict=True
    ):
        found.append((lp, (context, token, version)))
        context = hash((context, token))
    return found
