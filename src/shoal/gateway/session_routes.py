"""Opening and ending sessions over HTTP, and what a session hands out when it ends."""

import msgspec

from shoal.errors import SessionError
from shoal.gateway.sessions import Session, SessionLimits
from shoal.gateway.token_tree import HistoryPolicy
from shoal.types import Message, Sampling


class OpenRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /v1/sessions`."""

    sampling: Sampling | None = None
    limits: SessionLimits | None = None
    history_policy: HistoryPolicy = HistoryPolicy.PRESERVE


class OpenResponse(msgspec.Struct):
    """Where an OpenAI client (`openai_base_url`) or an Anthropic one (`anthropic_base_url`) finds the session.

    The `api_key` opens it at the gateway's common URL.
    """

    session_id: str
    api_key: str
    openai_base_url: str
    anthropic_base_url: str


class DrawnTurn(msgspec.Struct):
    """One generation, as it was drawn."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    ill_formed: bool


class Export(msgspec.Struct):
    """`POST /s/<token>/end`: the session's turns, in the order in which they were begun."""

    messages: tuple[Message, ...]
    turns: list[DrawnTurn]
    truncated: bool


def export(session: Session) -> Export:
    """What the session drew."""
    ledger = session.ledger
    return Export(
        ledger.messages(),
        [
            DrawnTurn(
                list(ledger.prompt_ids(one)),
                list(one.completion.token_ids),
                list(one.completion.logprobs),
                list(one.completion.versions),
                one.completion.finish_reason,
                one.ill_formed,
            )
            for one in sorted(ledger.exported(), key=lambda generation: generation.id)
        ],
        ledger.truncated,
    )


class Unauthorized(SessionError):
    """A token that names no session (HTTP 401)."""

    http_status = 401
