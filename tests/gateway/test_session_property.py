"""Random sessions: whatever clients do, trained tokens sit where they were drawn, each once."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from session_sim import Simulation, Wrong, decode, encode
from shoal.gateway.conversation import Conversation
from shoal.gateway.token_tree import Attachment, Generation, OpenGeneration, TokenTree
from shoal.types import Turn

SESSIONS = 5_000


def test_in_any_session_every_drawn_token_is_trained_once_where_it_was_drawn() -> None:
    did: Counter[str] = Counter()
    for seed in range(SESSIONS):
        did += Simulation(seed, TokenTree()).run().did
    everything = {"None", "first", "diverged", "no_bridge", "roles", "twins", "versions mid-answer", "edit"}
    assert everything | {"replay", "again", "give up", "continued"} <= did.keys(), did
    assert did["None"] > SESSIONS


class ToolsForgotten(TokenTree):
    """Attaches to a conversation that had other tools."""

    def attach(self, conversation: Conversation) -> Attachment:
        return super().attach(replace(conversation, tools=""))


class Retokenised(TokenTree):
    """Text in, text out."""

    def _path_ids(self, generation_id: int | None) -> tuple[int, ...]:
        return encode(decode(super()._path_ids(generation_id)))


class SharedTrainsInEveryLeaf(TokenTree):
    """One row per leaf, all of whose drawn tokens are trained."""

    def turns(self) -> tuple[Turn, ...]:
        turns: list[Turn] = []
        for leaf in self.exported():
            if not self._children[leaf.id]:
                path, at = [leaf], leaf.parent
                while at is not None:
                    path.append(self._generations[at])
                    at = path[-1].parent
                turns += [Turn(self.prompt_ids(one), one.completion) for one in reversed(path)]
        return tuple(turns)


class ClosedTwice(TokenTree):
    """Renders the close of an answer although the engine drew it."""

    def open(self, attachment: Attachment, rendered_ids: object, digest: str = "") -> OpenGeneration:
        rendered = tuple(rendered_ids)  # type: ignore[call-overload]
        return super().open(attachment, rendered[:1] + rendered if attachment.parent is not None else rendered, digest)


class NewestTwin(TokenTree):
    """Ignores tool-call ids."""

    def _twin(self, ids: list[int], messages: object) -> int:
        return max(ids)


class LostAnswersTrain(TokenTree):
    """Exports what no client ever saw, beside the answer it got instead."""

    def _superseded(self, generation: Generation) -> bool:
        return False


class LeavesOnly(TokenTree):
    """Forgets what was drawn before the last answer of a branch."""

    def exported(self) -> list[Generation]:
        return [one for one in super().exported() if not self._children[one.id]]


MUTATIONS = [
    ToolsForgotten, Retokenised, SharedTrainsInEveryLeaf, ClosedTwice, NewestTwin, LostAnswersTrain, LeavesOnly,
]  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_ledger_is_caught(mutation: Callable[[], TokenTree]) -> None:
    def sessions() -> None:
        for seed in range(SESSIONS):
            Simulation(seed, mutation()).run()

    with pytest.raises(Wrong):
        sessions()
