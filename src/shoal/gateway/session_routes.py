"""HTTP bodies that open and end sessions, and the export of an ended session."""

import msgspec

from shoal.errors import SessionError
from shoal.gateway.sessions import Session, SessionLimits
from shoal.gateway.token_tree import HistoryPolicy
from shoal.types import Message, Sampling


class OpenRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /v1/sessions`."""

    sampling: Sampling | None = None
    limits: SessionLimits | None = None
    history_policy: HistoryPolicy = HistoryPolicy.PRESERVE


class OpenResponse(msgspec.Struct):
    """URLs of a new session for an OpenAI client (`openai_base_url`) or an Anthropic client (`anthropic_base_url`).

    The `api_key` opens the session at the gateway's common URL.
    """

    session_id: str
    api_key: str
    openai_base_url: str
    anthropic_base_url: str


class SampledTurn(msgspec.Struct):
    """One generation as it was sampled."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    ill_formed: bool
    parent: int | None = None
    """Index of the turn whose tokens `prompt_ids` begins with; None where it begins anew."""


class Export(msgspec.Struct):
    """Answer of `POST /s/<token>/end`: the session's turns, in the order in which they began."""

    messages: tuple[Message, ...]
    turns: list[SampledTurn]
    truncated: bool


def export(session: Session) -> Export:
    """Export of the session's generations."""
    tree = session.tree
    sampled = sorted(tree.exported(), key=lambda generation: generation.id)
    return Export(
        tree.messages(),
        [
            SampledTurn(
                list(tree.prompt_ids(one)),
                list(one.completion.token_ids),
                list(one.completion.logprobs),
                list(one.completion.versions),
                one.completion.finish_reason,
                one.ill_formed,
                turn.parent,
            )
            for one, turn in zip(sampled, tree.turns(), strict=True)
        ],
        tree.truncated,
    )


class Unauthorized(SessionError):
    """Error of a token that names no session (HTTP 401)."""

    http_status = 401
