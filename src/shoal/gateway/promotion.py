"""Promotion of a new Version to the users of a model server, and its return when it is worse.

A share of the sessions goes to the new Version, and the application reports how a session went, from 0 to 1. Each
outcome moves the bounds of the difference that the new Version makes. The share grows with the outcomes, to all once
the new Version is surely better; a Version that is surely worse gets none.
"""

import re
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from http import HTTPStatus
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from shoal.confidence import EffectBounds
from shoal.errors import RunDirError
from shoal.files import make_durable
from shoal.gateway.answer_request import Answering, AnswerSampler, TrainedSampler, UntrainedSampler
from shoal.gateway.conversation import session_name
from shoal.gateway.fields import Refusal
from shoal.interfaces import Engine, ModelServer
from shoal.net.server import Refused, body, decoded, json
from shoal.types import Completion, Sampling

if TYPE_CHECKING:
    from shoal.gateway.answer_request import AnswerRequest

MAX_REPORT_BYTES = 4096
MOST_SHOWN = 80
OPEN_TIMEOUT_S = 1.0
_NAME = re.compile(r"(?:^|[-_])([0-9a-f]{16})(?:-\d+)?$")  # at the end of the ids of all dialects
ERROR = 0.05
"""Probability that a Version that is not better is ever promoted, and that one that is not worse is ever returned."""
BLOCKS = ((32, 2), (16, 4), (0, 8))
"""Outcomes from which on one of so many sessions is of the new Version, by chance."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
  pair TEXT, name TEXT, is_new INTEGER, block INTEGER, outcome REAL, place INTEGER, PRIMARY KEY (pair, name)
) WITHOUT ROWID;
"""


class Stage(StrEnum):
    """State of a promotion; only a trial may change."""

    TRIAL = "trial"
    PROMOTED = "promoted"
    RETURNED = "returned"


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/outcomes`."""

    id: str
    """Id of an answer, or of a session."""
    outcome: float
    """0 (worst) to 1 (best)."""


class Promotion:
    """Trial of a new Version: while it lasts, a session is answered by either the old or the new one.

    Which one is drawn before the session's first answer. If the Versions are equal, an outcome says nothing of that
    draw, whenever outcomes come and for whichever sessions. So each bound is wrong with `ERROR`.

    Invariant: a session is on the disk before its first token is sampled, and an outcome before it is acknowledged. The
    next process finds the same values, and so the same stage.
    """

    def __init__(self, path: Path, pair: str, rng: Random, on_end: Callable[[str], None] = lambda words: None) -> None:
        """Opens or makes the file of the sessions of a `pair` of models. `on_end` gets the sentence of the end.

        Raises `RunDirError`.
        """
        self._pair, self._rng, self._on_end = pair, rng, on_end
        self.stage = Stage.TRIAL
        self._bounds = EffectBounds(2 * ERROR)
        self._lost = ""
        self._sums, self._counts = [0.0, 0.0], [0, 0]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, isolation_level=None, timeout=OPEN_TIMEOUT_S)
            make_durable(self._db)
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.executescript(SCHEMA)
            self._restore()
        except (OSError, sqlite3.Error) as error:
            raise RunDirError(f"{path}: expected a file of outcomes that no other process has open: {error}") from error

    def _restore(self) -> None:
        rows = self._db.execute(
            "SELECT is_new, block, outcome FROM sessions WHERE pair = ? AND place > 0 ORDER BY place", (self._pair,)
        )
        for is_new, block, outcome in rows.fetchall():
            self._take(bool(is_new), block, outcome)

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    @property
    def share(self) -> float:
        """Share of the sessions that the new Version answers."""
        if self.stage is not Stage.TRIAL:
            return float(self.stage is Stage.PROMOTED)
        return 1 / self._block

    @property
    def _block(self) -> int:
        return next(block for least, block in BLOCKS if sum(self._counts) >= least)

    def is_new(self, name: str) -> bool:
        """Whether the new Version answers the session `name`; draws it at its first answer."""
        if self.stage is Stage.TRIAL:
            try:
                return self._drawn(name)
            except sqlite3.Error as error:
                self.lose(f"the file of outcomes cannot be written: {error}")
        return self.stage is Stage.PROMOTED

    def _drawn(self, name: str) -> bool:
        known = "SELECT is_new FROM sessions WHERE pair = ? AND name = ?"
        if (row := self._db.execute(known, (self._pair, name)).fetchone()) is not None:
            return bool(row[0])
        block = self._block
        is_new = self._rng.randrange(block) == 0
        self._db.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, NULL, 0)", (self._pair, name, is_new, block))
        return is_new

    def report(self, id_: str, outcome: float) -> None:
        """Takes the outcome of a session, named by its id or by that of one of its answers.

        Raises `Refusal` for a number outside [0, 1]. Raises `Refused` with 404 for a session that the trial has not
        drawn, 409 for a second outcome, 410 after the trial, and 503 when the outcome cannot be kept.
        """
        if not 0 <= outcome <= 1:
            raise Refusal("outcome", "a number from 0 to 1", outcome)
        if self.stage is not Stage.TRIAL:
            raise Refused(HTTPStatus.GONE, f"outcome: expected none after the trial, {self.sentence}")
        found = _NAME.search(id_)
        key = self._pair, found[1] if found else ""
        try:
            known = "SELECT is_new, block, place FROM sessions WHERE pair = ? AND name = ?"
            row = self._db.execute(known, key).fetchone()
            if row is None:
                why = f"id: expected the id of an answer or session of this trial, got {id_[:MOST_SHOWN]!r}"
                raise Refused(HTTPStatus.NOT_FOUND, why)
            is_new, block, place = row
            if place:
                raise Refused(HTTPStatus.CONFLICT, f"id: expected one outcome per session, {key[1]} has one")
            place = sum(self._counts) + 1
            change = "UPDATE sessions SET outcome = ?, place = ? WHERE pair = ? AND name = ?"
            self._db.execute(change, (outcome, place, *key))
        except sqlite3.Error as error:
            raise Refused(
                HTTPStatus.SERVICE_UNAVAILABLE, f"outcome: it cannot be written, try again: {error}"
            ) from error
        self._take(bool(is_new), block, outcome)
        if self.stage is not Stage.TRIAL:
            self._on_end(self.sentence)

    def _take(self, is_new: bool, block: int, outcome: float) -> None:
        self._sums[is_new] += outcome
        self._counts[is_new] += 1
        self._bounds.add(is_new, 1 / block, outcome)
        if self.stage is Stage.TRIAL and self._bounds.low > 0:
            self.stage = Stage.PROMOTED
        elif self.stage is Stage.TRIAL and self._bounds.high < 0:
            self.stage = Stage.RETURNED

    def lose(self, why: str) -> None:
        """Ends the trial of this process without a verdict: the old Version answers all. The next process goes on."""
        self.stage, self._lost = Stage.RETURNED, why
        self._on_end(self.sentence)

    @property
    def sentence(self) -> str:
        """Says which Version answers the users, and what is certain about the new one."""
        low, high = 100 * self._bounds.low, 100 * self._bounds.high
        sure = f"(anytime-valid, {1 - ERROR:.0%}; {sum(self._counts)} outcomes)"
        if self._lost:
            return f"returned to the old Version: {self._lost}"
        if self.stage is Stage.PROMOTED:
            return f"promoted: the new Version is better by at least {low:.1f} points {sure}"
        if self.stage is Stage.RETURNED:
            return f"returned to the old Version: the new one is worse by at least {-high:.1f} points {sure}"
        return (
            f"the new Version answers {self.share:.0%}: a difference between {low:+.1f} and {high:+.1f} points {sure}"
        )

    @property
    def values(self) -> dict[str, object]:
        """JSON values by name."""
        named = zip(("old", "new"), self._sums, self._counts, strict=True)
        means = {name: {"outcomes": n, "mean": total / n if n else None} for name, total, n in named}
        bounds = {"low": self._bounds.low, "high": self._bounds.high}
        return {"stage": self.stage, "share": self.share, **means, **bounds, "sentence": self.sentence}


@dataclass(frozen=True, slots=True)
class Trial:
    """A promotion with the engine of its new Version, and its routes."""

    promotion: Promotion
    engine: Engine
    model_server: ModelServer

    def sampler(self, old: TrainedSampler | UntrainedSampler) -> "TrialSampler":
        """Sampler of a session, whose answers are those of the sampler `old` or of its like for the new Version."""
        if isinstance(old, TrainedSampler):
            return TrialSampler(self.promotion, old, replace(old, engine=self.engine))
        return TrialSampler(self.promotion, old, replace(old, server=self.model_server))

    async def take(self, http: Request) -> Response:
        """Answers `POST /v1/outcomes`."""
        report = decoded(await body(http, MAX_REPORT_BYTES), Report)
        self.promotion.report(report.id, report.outcome)
        return json(self.promotion.values)

    async def show(self, _: Request) -> Response:
        """Answers `GET /v1/promotion`."""
        return json(self.promotion.values)


@dataclass(frozen=True, slots=True)
class TrialSampler:
    """Implements `AnswerSampler`: a session's answers are all sampled under one Version while the trial lasts."""

    promotion: Promotion
    old: AnswerSampler
    new: AnswerSampler

    @property
    def is_trained(self) -> bool:
        """Implements `AnswerSampler`."""
        return self.old.is_trained

    async def completion(
        self, answering: Answering, ask: "AnswerRequest", sampling: Sampling, session: str
    ) -> Completion:
        """Implements `AnswerSampler`."""
        chosen = self.new if self.promotion.is_new(session_name(session)) else self.old
        return await chosen.completion(answering, ask, sampling, session)
