"""Conversations through the gateway's ledger, or as text; and the rows that either trains on."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from experiments.tito.words import Style, asked, renderer, right, tokenizer, whole
from shoal.engine.compute.request import Request
from shoal.engine.compute.step_engine import StepEngine
from shoal.gateway.token_tree import Conversation, TokenTree
from shoal.model.chat_template import ChatRenderer
from shoal.trainer.advantage import rows
from shoal.types import Completion, Message, Reward, Role, Rollout, Sample, Sampling, seed_for

MAX_TOKENS = 12


@dataclass(slots=True)
class Talk:
    """One conversation, as its client and the engine saw it."""

    numbers: list[int]
    seed: int
    messages: list[Message] = field(default_factory=list)
    drawn: list[Completion] = field(default_factory=list)
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    tree: TokenTree = field(default_factory=TokenTree)

    @property
    def reward(self) -> float:
        """Share of the answers that are right."""
        answers = [message.content for message in self.messages if message.role is Role.ASSISTANT]
        return sum(said == right(n) for said, n in zip(answers, self.numbers, strict=True)) / len(self.numbers)


def hold(engine: StepEngine, style: Style, talks: Sequence[Talk], *, gateway: bool) -> None:
    """Has all conversations, turn by turn. Without the gateway each prompt is the text so far, tokenised anew."""
    made = renderer(style)
    for turn in range(len(talks[0].numbers)):
        requests = []
        for talk in talks:
            talk.messages.append(asked(talk.numbers[turn]))
            prompt = _ledger_prompt(made, talk) if gateway else tuple(made.prompt_ids(talk.messages))
            seed = seed_for("tito draw", talk.seed, turn)
            requests.append(Request(prompt, Sampling(MAX_TOKENS, stop_token_ids=made.stop_token_ids, seed=seed)))
            engine.submit(requests[-1])
        while not engine.idle:
            engine.step()
        for talk, request in zip(talks, requests, strict=True):
            (draft,) = request.drafts
            assert draft.finish_reason is not None
            sampled = (tuple(draft.sampled), tuple(draft.logprobs), tuple(draft.versions))
            completion = Completion(*sampled, draft.finish_reason)
            message = Message(Role.ASSISTANT, made.answer(completion.token_ids, tools=False).content)
            if gateway:
                talk.tree.commit(next(iter(talk.tree.calls.values())), completion, message)
            talk.prompts.append(tuple(request.prompt_ids))
            talk.drawn.append(completion)
            talk.messages.append(message)


def _ledger_prompt(made: ChatRenderer, talk: Talk) -> tuple[int, ...]:
    """What a session does for a request."""
    attachment = talk.tree.attach(Conversation(tuple(talk.messages)))
    ids = made.prompt_ids(talk.messages) if attachment.cause else made.bridge_ids(attachment.tail)
    assert ids is not None, "the template has a bridge"
    return talk.tree.open(attachment, ids).prompt_ids


def ledger_row(talk: Talk, advantage: float) -> Sample:
    """The one row that the gateway gives."""
    (row,) = rows(Rollout("r", talk.tree.messages(), talk.tree.turns(), Reward(0.0)), advantage)
    return row


@dataclass(frozen=True, slots=True)
class Spelling:
    """A conversation tokenised as a whole, and which of its tokens begin within which answer."""

    ids: tuple[int, ...]  # [L]
    spans: tuple[tuple[int, int], ...]  # [L] characters
    answers: tuple[tuple[int, int], ...]  # first and last + 1 token of each


def spelling(style: Style, talk: Talk) -> Spelling:
    """As text-in-text-out sees it: the answer's tokens are those that begin between its header and its close's end."""
    encoded = tokenizer(style).backend_tokenizer.encode(whole(style, talk.messages), add_special_tokens=False)
    at, answers = 0, []
    for end in range(2, len(talk.messages) + 1, 2):
        begin = len(whole(style, talk.messages[: end - 1])) + len(_header(style))
        until = len(whole(style, talk.messages[:end]))
        first = next((i for i in range(at, len(encoded.ids)) if encoded.offsets[i][0] >= begin), len(encoded.ids))
        at = next((i for i in range(first, len(encoded.ids)) if encoded.offsets[i][0] >= until), len(encoded.ids))
        answers.append((first, at))
    return Spelling(tuple(encoded.ids), tuple(encoded.offsets), tuple(answers))


def text_row(spelt: Spelling, talk: Talk, advantage: float) -> Sample:
    """The row of text-in-text-out: the i-th token of an answer gets the i-th logprob that was drawn for it.

    Where the tokens of the text are more than those drawn, the others are not trained.
    """
    size = len(spelt.ids)
    mask, logprobs, versions, advantages = [0] * size, [0.0] * size, [-1] * size, [0.0] * size
    for (first, end), completion in zip(spelt.answers, talk.drawn, strict=True):
        for i, logprob in zip(range(max(first, 1), end), completion.logprobs, strict=False):
            mask[i], logprobs[i], versions[i], advantages[i] = 1, logprob, 0, advantage
    return Sample(spelt.ids, tuple(mask), tuple(logprobs), tuple(versions), tuple(advantages))


def misaligned(style: Style, spelt: Spelling, talk: Talk) -> int:
    """Drawn tokens that the text's tokenisation does not have: the same id over the same characters."""
    there, made, wrong = set(zip(spelt.ids, spelt.spans, strict=True)), tokenizer(style), 0
    for turn, completion in enumerate(talk.drawn):
        at = len(whole(style, talk.messages[: 2 * turn + 1])) + len(_header(style))
        for token in completion.token_ids:
            end = at + len(made.decode([token], skip_special_tokens=False))
            wrong += (token, (at, end)) not in there
            at = end
    return wrong


def changed(row: Sample, talk: Talk) -> int:
    """Drawn tokens that are not where the engine drew them in a row."""
    wrong = 0
    for prompt, completion in zip(talk.prompts, talk.drawn, strict=True):
        context = prompt + completion.token_ids
        is_there = row.tokens[: len(context)] == context and all(row.mask[len(prompt) : len(context)])
        wrong += 0 if is_there else len(completion.token_ids)
    return wrong


def _header(style: Style) -> str:
    return "<|a|>" if style.marks else "A:"
