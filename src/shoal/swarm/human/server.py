"""The human UI serves its page and the page's requests over HTTP.

    GET  /                  the page; also look.css, style.css and desk.js
    POST /api/question      {"pass": ID or null} -> a question; the named question is passed over for good
    POST /api/answer        {"question": ID, "text": ...} -> the verdict, and others' answers
    GET  /api/state/ID      whether the answers are an offer yet
    GET  /api/status        counts of the node

A signed cookie names a user. Addresses and all users together have rates too, so a new cookie is no new allowance.
X-Forwarded-For counts only from the proxies named in `FORWARDED_ALLOW_IPS`. Texts of people and peers leave as JSON,
and the script shows them as text.
"""

import hmac
import secrets
import time
from collections.abc import Callable

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.errors import ChildDied, TaskError
from shoal.net.server import HANDLERS, PAGE_HEADERS, Refused, address_of, body, decoded, guarded, json, page_files
from shoal.swarm.human.human_node import MOST_CHARACTERS, Given, HumanNode, OpenQuestion, is_right
from shoal.swarm.trust.rates import Bucket, Buckets
from shoal.types import Reward, Role

COOKIE = "visitor"
MOST_BODY_BYTES = 8 * MOST_CHARACTERS
SHOWN_CHARACTERS = 1000
"""Characters shown of another's answer."""


class NextRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Request for a question."""

    passed: str | None = msgspec.field(default=None, name="pass")


class UserAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """Request that answers a question."""

    question: str
    text: str


class Rates:
    """Limits on the requests of each user, each address, and all together."""

    def __init__(self, clock: Callable[[], float], *, user_per_s: float = 0.5, burst: float = 10) -> None:
        """An address, which a school may share, has ten times a user's rate; all together have a hundred times."""
        self._clock = clock
        self._users, self._addresses = Buckets(user_per_s, burst), Buckets(10 * user_per_s, 5 * burst)
        self._all = Bucket(100 * user_per_s, 20 * burst)

    def check(self, user: str, address: str) -> None:
        """Raises `Refused` for a request above a rate."""
        now_s = self._clock()
        if not (self._users.take(user, now_s) and self._addresses.take(address, now_s)):
            raise Refused(429, "slowly, please: wait a few seconds")
        if not self._all.take(now_s):
            raise Refused(503, "too many people are here; try again in a minute")


class HumanServer:
    """HTTP server of a human node; `app` is the ASGI application."""

    def __init__(self, node: HumanNode, rates: Rates | None = None) -> None:
        self._node = node
        self._rates = rates or Rates(time.monotonic)
        self._key = secrets.token_bytes(32)
        self.app = Starlette(
            routes=[
                *page_files("shoal.swarm.human"),
                Route("/api/question", self._question, methods=["POST"]),
                Route("/api/answer", self._answer, methods=["POST"]),
                Route("/api/state/{id}", self._state),
                Route("/api/status", self._status),
            ],
            middleware=[Middleware(guarded)],
            exception_handlers=HANDLERS,
        )

    async def _question(self, http: Request) -> Response:
        wanted, known = decoded(await body(http, MOST_BODY_BYTES), NextRequest), self._user(http)
        user = known or secrets.token_urlsafe(16)
        self._rates.check(user, address_of(http))
        passed = self._node.questions.get(wanted.passed or "")
        if passed is not None:
            passed.passed_by.add(user)
        try:
            question = await self._node.question_for(user)
        except (TaskError, ChildDied) as error:
            raise Refused(503, f"no question can be drawn: {error}") from error
        answer = json(_asked(question, user), headers=PAGE_HEADERS)
        if not known:
            cookie = f"{user}.{self._signature(user)}"
            answer.set_cookie(COOKIE, cookie, max_age=30 * 86_400, httponly=True, samesite="strict")
        return answer

    async def _answer(self, http: Request) -> Response:
        said, user = decoded(await body(http, MOST_BODY_BYTES), UserAnswer), self._user(http)
        if not user:
            raise Refused(403, "ask for a question first")
        self._rates.check(user, address_of(http))
        question = self._node.questions.get(said.question)
        if question is None:
            raise Refused(404, "this question is closed; take the next one")
        try:
            given = await self._node.answer(question, user, said.text)
        except ChildDied as error:
            raise Refused(503, f"no verdict: {error}") from error
        return json(_verdict(question, user, given), headers=PAGE_HEADERS)

    def _user(self, http: Request) -> str:
        """User named by a cookie that this node signed; empty for any other cookie."""
        user, _, signature = http.cookies.get(COOKIE, "").partition(".")
        known = hmac.compare_digest(signature.encode(), self._signature(user).encode())
        return user if known else ""

    def _signature(self, user: str) -> str:
        return hmac.new(self._key, user.encode(errors="replace"), "blake2b").hexdigest()[:32]

    async def _state(self, http: Request) -> Response:
        state = self._node.questions.state(http.path_params["id"])
        if state is None:
            raise Refused(404, "this question has expired")
        return json({"state": state.value}, headers=PAGE_HEADERS)

    async def _status(self, _: Request) -> Response:
        status = self._node.status()
        return json(
            {name: status[name] for name in ("swarm", "peer_id", "connected", "open", "answers", "shared")},
            headers=PAGE_HEADERS,
        )


def _asked(question: OpenQuestion, user: str) -> dict[str, object]:
    system = [message.content for message in question.task.messages if message.role is Role.SYSTEM]
    return {
        "id": question.id,
        "task": question.task.service,
        "instructions": "\n\n".join(system),
        "question": question.claim.question,
        "tries_left": question.tries_left(user),
        "answers": len(question.answers),
    }


def _verdict(question: OpenQuestion, user: str, given: Given) -> dict[str, object]:
    """Builds the verdict. Others' answers are shown only to users without attempts left, who could copy them
    otherwise."""
    left = question.tries_left(user)
    own = {one.text for one in question.of(user)}
    people = [one for one in question.answers if one.user != user and one.text not in own]
    others = [] if left else [*question.others, *people]
    return {
        **_judged(given.reward),
        "tries_left": left,
        "truth": question.task.answer if not left else None,
        "others": [
            {"generator": one.generator, "model": one.model, "text": one.text[:SHOWN_CHARACTERS], **_judged(one.reward)}
            for one in others
        ],
    }


def _judged(reward: Reward) -> dict[str, object]:
    return {"status": reward.status.value, "reward": round(reward.value, 4), "right": is_right(reward)}
