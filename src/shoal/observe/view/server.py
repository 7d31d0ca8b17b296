"""The pages of `shoal view`, over HTTP. Nothing here writes to a run, and every text is escaped where it is shown.

    GET /                 the overview of all runs
    GET /rollouts         a run's rollouts, filtered; /group: one group side by side; /tokens: the tokens of one answer
    GET /heldout          held-out questions across time; /question: all answers to one; also of two runs side by side
    GET /waits, /swarm    what a run waits for; whom it learns with
    GET /cost             hours, tokens and prices of all runs
    GET /charts/NAME      the lines of a page's charts as JSON; 204 when `since` is the newest stamp
    GET /static/NAME      look.css, style.css, view.js and plotly.min.js

Beyond loopback a token is wanted: `/?token=...` once, which becomes a cookie.
"""

import asyncio
import hmac
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from shoal.errors import RunDirError, ShoalError
from shoal.experience.export import Extras
from shoal.net.listening import is_loopback, listening_socket
from shoal.net.server import PAGE_HEADERS, Refused, guarded, json, look, serving, until_cancelled
from shoal.observe.charts import CHARTS, drawn
from shoal.observe.export_extras import extras_of
from shoal.observe.metrics import WatchedRun, differences, watched
from shoal.observe.status import figures, influence, last_step, lead, swarm_status, warnings_of
from shoal.observe.token_files import trained_tokens
from shoal.observe.view.cost import Prices, costs
from shoal.observe.view.index import Filter, RolloutIndex
from shoal.observe.view.prose import PAGES, markdown_of_a_page
from shoal.observe.view.reading import Questions, answers, asked, glances, questions, said, shortened, shown
from shoal.observe.view.tokens import By, shades, tokens_of
from shoal.observe.view.waits import bottleneck, other_waits, timeline

WAIT_S = 0.2
COOKIE = "shoal_view"
HEADERS = {
    **PAGE_HEADERS,
    # plotly.js sets inline styles; scripts come only from this server, never inline.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
}
MOST_TOKENS = 4000
"""Tokens on one page."""
SCALES: Mapping[By, str] = {
    "logprob": "unlikely to certain",
    "version": "oldest to newest",
    "ratio": "less likely to more likely than when sampled",
    "advantage": "negative to positive",
    "entropy": "certain to open",
    "gradient": "made less likely to made more likely",
    "fate": "red: clipped or masked; light: no gradient; pale blue: capped; blue: trained; grey: given",
}
MOST_NUMBER = 2**53
"""Numbers of an address, which SQLite computes with."""
T = TypeVar("T")


class Place(msgspec.Struct, forbid_unknown_fields=True):
    """Query: a group, one of its answers, and a page of its tokens."""

    seq: int
    run: str = ""
    position: int = 0
    first: int = 0
    by: By = "logprob"
    raw: bool = False
    """Whether texts are shown as written."""


class QuestionOf(msgspec.Struct, forbid_unknown_fields=True):
    """Which held-out question."""

    id: str
    run: str = ""
    other: str = ""
    """Another run whose answers are shown, too."""
    raw: bool = False


class ViewServer:
    """`app` is the ASGI application over some runs."""

    def __init__(self, runs: Mapping[str, WatchedRun], folder: Path, *, token: str = "", host: str = "") -> None:
        """Rollout indexes are made in `folder`, outside any run directory. Without runs, call `show` later."""
        self._token, self._folder = token.encode(), folder
        self.show(runs)
        self._extras: dict[str, Extras] = {}
        self.app = Starlette(
            routes=[
                Route("/", self._overview),
                Route("/rollouts", self._rollouts),
                Route("/group", self._group),
                Route("/tokens", self._tokens),
                Route("/heldout", self._held_out),
                Route("/question", self._question),
                Route("/waits", self._waits),
                Route("/cost", self._cost),
                Route("/swarm", self._swarm),
                Route("/charts/{name}", self._charts),
                Route("/static/look.css", look),
                Mount("/static", StaticFiles(packages=[("shoal.observe.view", "static"), ("plotly", "package_data")])),
            ],
            middleware=[Middleware(guarded, host=host), Middleware(BaseHTTPMiddleware, dispatch=self._answered)],
            exception_handlers={ShoalError: self._refusal},
        )

    def show(self, runs: Mapping[str, WatchedRun]) -> None:
        """Sets the runs to show; with no runs every page says that it waits."""
        self._runs = runs
        self._indexes = {
            name: RolloutIndex(run.run_dir, self._folder / f"{number}.sqlite")
            for number, (name, run) in enumerate(runs.items())
        }

    def close(self) -> None:
        """Ends the threads that read logs."""
        for index in self._indexes.values():
            index.close()

    async def _answered(self, http: Request, answer: RequestResponseEndpoint) -> Response:
        """Answers requests with the token's cookie, which the first visit with `?token=` sets."""
        if self._is_token(http.cookies.get(COOKIE, "")):
            ready = self._runs or http.url.path.startswith("/static/")
            response = await answer(http) if ready else self._page(http, "waiting.html")
        elif self._is_token(http.query_params.get("token", "")):
            response = RedirectResponse(str(http.url.remove_query_params("token").replace(scheme="", netloc="")))
            response.set_cookie(COOKIE, self._token.decode(), httponly=True, samesite="strict")
        else:
            response = Response("expected the token: open the address that shoal view printed", 401)
        caching = {"Cache-Control": "no-cache"} if http.url.path.startswith("/static/") else {}
        response.headers.update({**HEADERS, **caching})
        return response

    def _is_token(self, given: str) -> bool:
        return not self._token or hmac.compare_digest(given.encode(errors="replace"), self._token)

    def _run(self, http: Request) -> WatchedRun:
        """The run that a request names; the first one when it names none."""
        return self._named(http.query_params.get("run", next(iter(self._runs))))

    def _named(self, name: str) -> WatchedRun:
        if name not in self._runs:
            raise Refused(404, f"run: expected one of {', '.join(self._runs)}, got {name[:200]!r}")
        return self._runs[name]

    def _page(self, http: Request, template: str, *, code: int = 200, **values: object) -> Response:
        shown = {"runs": list(self._runs), "page": http.url.path, "run": None, "here": http.url.include_query_params}
        with markdown_of_a_page():
            return HTMLResponse(PAGES.get_template(template).render(shown | values), code)

    async def _refusal(self, http: Request, error: Exception) -> Response:
        assert isinstance(error, ShoalError)
        code = 404 if isinstance(error, RunDirError) else error.http_status
        return self._page(http, "refused.html", code=code, why=str(error))

    def _overview(self, http: Request) -> Response:
        records = {name: run.records() for name, run in self._runs.items()}
        facts = [
            (name, lead(self._runs[name].run_dir, run), figures(run), warnings_of(run), last_step(run))
            for name, run in records.items()
        ]
        changed = differences(records) if len(records) > 1 else []
        return self._page(http, "overview.html", facts=facts, changed=changed)

    def _rollouts(self, http: Request) -> Response:
        run, wanted = self._run(http), _asked(http, Filter)
        index = self._indexes[run.name]
        found, newest = index.search(wanted), last_step(run.records())
        written = wanted.step is None or wanted.step <= (newest or 0)
        return self._page(
            http,
            "rollouts.html",
            run=run.name,
            wanted=msgspec.to_builtins(wanted),
            found=found,
            rows=glances(found.rows),
            index=index,
            comes=not found.rows and not index.problem and written and index.lacks(wanted.step),
            last_step=newest,
        )

    def _group(self, http: Request) -> Response:
        run, place = self._run(http), _asked(http, Place)
        group = self._indexes[run.name].group(place.seq)
        task = asked(group)
        messages = task.messages if task else ()
        return self._page(
            http,
            "group.html",
            run=run.name,
            group=group,
            raw=place.raw,
            task=task,
            truth=shortened(task.answer or "") if task else "",
            question=[said(message) for message in messages],
            answers=[shown(position, body, messages) for position, body in enumerate(group.bodies)],
        )

    def _tokens(self, http: Request) -> Response:
        run, place = self._run(http), _asked(http, Place)
        group = self._indexes[run.name].group(place.seq)
        if not 0 <= place.position < len(group.bodies):
            raise Refused(404, f"position: expected 0 to {len(group.bodies) - 1}, got {place.position}")
        extras = self._extras.get(run.name) or extras_of(run.run_dir, reads_log=False)
        if extras.text is not None:  # else the tokenizer may come later
            self._extras[run.name] = extras
        numbers = trained_tokens(run.run_dir, group, place.position)
        task = asked(group)
        tokens = tokens_of(group, place.position, extras, run.records().config, numbers)
        colors = ["".join(each) for each in zip(*(shades(tokens, by) for by in SCALES), strict=True)]
        part = slice(max(0, place.first), max(0, place.first) + MOST_TOKENS)
        return self._page(
            http,
            "tokens.html",
            run=run.name,
            group=group,
            answer=shown(place.position, group.bodies[place.position], ()),
            truth=shortened(task.answer or "") if task else "",
            others={"prev": place.position - 1, "next": place.position + 1},
            first=part.start,
            by=place.by,
            at=list(SCALES).index(place.by),
            tokens=list(zip(tokens, colors, strict=True))[part],
            total=len(tokens),
            scales=SCALES,
            has_numbers=numbers is not None,
            has_text=extras.text is not None,
            has_advantages=any(token.advantage is not None for token in tokens),
            most=MOST_TOKENS,
        )

    def _waits(self, http: Request) -> Response:
        run = self._run(http)
        records = run.records()
        return self._page(http, "waits.html", run=run.name, sentence=bottleneck(records), others=other_waits(records))

    def _held_out(self, http: Request) -> Response:
        run, wanted = self._run(http), _asked(http, Questions)
        other = self._named(wanted.other).run_dir if wanted.other else None
        steps, found, pages = questions(run.run_dir, wanted, other)
        return self._page(
            http,
            "heldout.html",
            run=run.name,
            wanted=wanted,
            steps=steps,
            found=found,
            pages=pages,
        )

    def _question(self, http: Request) -> Response:
        run, wanted = self._run(http), _asked(http, QuestionOf)
        shown = [run, *([self._named(wanted.other)] if wanted.other else [])]
        of_run = {one.name: answers(one.run_dir, wanted.id) for one in shown}
        given = of_run[run.name]
        if not given:
            raise Refused(404, f"id: expected a held-out question of this run, got {wanted.id[:200]!r}")
        return self._page(
            http,
            "question.html",
            run=run.name,
            raw=wanted.raw,
            first=given[0],
            truth=shortened(given[0].truth or ""),
            question=[said(message) for message in given[0].messages[: given[0].asked]],
            given={
                name: [(one, [said(message) for message in one.messages[one.asked :]]) for one in some]
                for name, some in of_run.items()
            },
        )

    def _cost(self, http: Request) -> Response:
        prices = _asked(http, Prices)
        records = {name: run.records() for name, run in self._runs.items()}
        return self._page(http, "cost.html", prices=prices, costs=costs(records, prices))

    def _swarm(self, http: Request) -> Response:
        run = self._run(http)
        sentence = influence(run.records())
        return self._page(http, "swarm.html", run=run.name, status=swarm_status(run.run_dir), sentence=sentence)

    def _charts(self, http: Request) -> Response:
        name: str = http.path_params["name"]
        if name not in CHARTS:
            raise Refused(404, f"charts: expected one of {', '.join(CHARTS)}, got {name[:200]!r}")
        runs = self._runs if name == "overview" else {(run := self._run(http)).name: run}
        stamp = " ".join(str(run.size) for run in runs.values())
        if http.query_params.get("since") == stamp:
            return Response(status_code=204)
        charts = drawn(CHARTS[name], {name: run.records() for name, run in runs.items()})
        bars = timeline(next(iter(runs.values())).records()) if name == "waits" else []
        return json({"stamp": stamp, "charts": charts, "timeline": bars})


def _asked(http: Request, kind: type[T]) -> T:
    """A request's query as `kind`; empty fields are not given. Raises `Refused`, naming the field."""
    given = {name: value for name, value in http.query_params.items() if value != ""}
    try:
        wanted = msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise Refused(400, f"address: {error}") from error
    for name, value in msgspec.to_builtins(wanted).items():
        if isinstance(value, int) and abs(value) > MOST_NUMBER:
            raise Refused(400, f"address: {name}: expected a number up to {MOST_NUMBER}, got {value}")
    return wanted


async def serve_view(
    run_dirs: Sequence[Path], *, host: str, port: int, announce: Callable[[str], None], waits: bool = False
) -> None:
    """Serves the page until it is cancelled; `announce` gets its address.

    With `waits` the runs need not be there yet: until then the page says so. Raises a `ShoalError`.
    """
    token = "" if is_loopback(host) else secrets.token_urlsafe(24)
    with ExitStack() as stack:
        runs = {} if waits else watched(run_dirs)
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="shoal-view-")))
        listening = stack.enter_context(listening_socket(host, port))
        os.nice(10)  # the runs that are watched come first
        view = ViewServer(runs, folder, token=token, host=host)
        stack.callback(view.close)
        async with serving(view.app, listening=listening, grace_s=1) as at:
            everywhere = host in ("0.0.0.0", "::", "")
            url = f"http://{socket.gethostname()}:{listening.getsockname()[1]}" if everywhere else at
            announce(f"{url}/?token={token}" if token else url)
            if waits:
                await _shown_once_begun(view, run_dirs)
            await until_cancelled()


async def _shown_once_begun(view: ViewServer, run_dirs: Sequence[Path]) -> None:
    while True:
        with suppress(RunDirError):
            view.show(watched(run_dirs))
            return
        await asyncio.sleep(WAIT_S)
