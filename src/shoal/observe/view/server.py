"""The pages of `shoal view`, over HTTP. Nothing here writes to a run, and every text is escaped where it is shown.

    GET /                 the overview of all runs
    GET /rollouts         a run's rollouts, filtered; /group: one group side by side; /tokens: the tokens of one answer
    GET /waits, /swarm    what a run waits for; whom it learns with
    GET /charts/NAME      the lines of a page's charts as JSON; 204 when `since` is the newest stamp
    GET /static/NAME      style.css, view.js and plotly.min.js

Beyond loopback a token is wanted: `/?token=...` once, which becomes a cookie.
"""

import hmac
import os
import re
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeVar

import jinja2
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from shoal.errors import RunDirError, ShoalError
from shoal.experience.export import Extras
from shoal.experience.raw import decode_rollout
from shoal.net.listening import is_loopback, listening_socket, url_of
from shoal.net.server import PAGE_HEADERS, Refused, guarded, json, uvicorn_config
from shoal.observe.charts import OVERVIEW, SWARM, WAITS, Chart, Line, drawn, thinned
from shoal.observe.export_extras import extras_of
from shoal.observe.metrics import Record
from shoal.observe.runs import RunRecords, WatchedRun, differences, watched
from shoal.observe.status import lately, warnings_of
from shoal.observe.view.index import Filter, RolloutIndex
from shoal.observe.view.reading import asked, glance, said, shortened, shown
from shoal.observe.view.tokens import shades, tokens_of
from shoal.observe.view.waits import bottleneck

COOKIE = "shoal_view"
SWARM_STATUS = Path("swarm") / "status.json"
HEADERS = {
    **PAGE_HEADERS,
    # plotly.js lays its charts out with styles of its own; scripts come from here alone, and none is inline.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
}
CHARTS: Mapping[str, Sequence[Chart]] = {"overview": OVERVIEW, "waits": WAITS, "swarm": SWARM}
_HIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
MOST_TOKENS = 4000
"""Tokens on one page."""
SCALES = {
    "logprob": "unlikely to certain",
    "version": "oldest to newest",
    "advantage": "negative to positive",
    "fate": "red: masked as too old; light: not trained; blue: trained; grey: given",
}
T = TypeVar("T")


def visible(text: object) -> str:
    """A text whose control, direction and zero-width characters are seen instead of obeyed.

    >>> visible("a\\u202eb")
    'a\\\\u202eb'
    """
    shown = _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))
    return shown.replace("\r\n", "\n").replace("\r", "\\r")


class Place(msgspec.Struct, forbid_unknown_fields=True):
    """Which group, which answer of it, and which of its tokens."""

    seq: int
    run: str = ""
    position: int = 0
    first: int = 0
    by: Literal["logprob", "version", "advantage", "fate"] = "logprob"


class ViewServer:
    """`app` is the ASGI application over some runs."""

    def __init__(self, runs: Mapping[str, WatchedRun], folder: Path, *, token: str = "", host: str = "") -> None:
        """Tables of the runs' rollouts are made in `folder`, which is no run's."""
        self._runs, self._token = runs, token.encode()
        self._indexes = {
            name: RolloutIndex(run.run_dir, folder / f"{number}.sqlite")
            for number, (name, run) in enumerate(runs.items())
        }
        self._extras: dict[str, Extras] = {}
        templates = jinja2.PackageLoader("shoal.observe.view")
        self._pages = jinja2.Environment(loader=templates, autoescape=True, undefined=jinja2.StrictUndefined)
        self._pages.filters["visible"] = visible
        self.app = Starlette(
            routes=[
                Route("/", self._overview),
                Route("/rollouts", self._rollouts),
                Route("/group", self._group),
                Route("/tokens", self._tokens),
                Route("/waits", self._waits),
                Route("/swarm", self._swarm),
                Route("/charts/{name}", self._charts),
                Mount("/static", StaticFiles(packages=[("shoal.observe.view", "static"), ("plotly", "package_data")])),
            ],
            middleware=[Middleware(guarded, host=host), Middleware(BaseHTTPMiddleware, dispatch=self._answered)],
            exception_handlers={ShoalError: self._refusal},
        )

    def close(self) -> None:
        """Ends the reading of logs."""
        for index in self._indexes.values():
            index.close()

    async def _answered(self, http: Request, answer: RequestResponseEndpoint) -> Response:
        """Answers those who know the token, by a cookie that the first visit with `?token=` sets."""
        if self._is_token(http.cookies.get(COOKIE, "")):
            response = await answer(http)
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
        name = http.query_params.get("run", next(iter(self._runs)))
        if name not in self._runs:
            raise Refused(404, f"run: expected one of {', '.join(self._runs)}, got {name[:200]!r}")
        return self._runs[name]

    def _page(self, http: Request, template: str, *, code: int = 200, **values: object) -> Response:
        shown = {"runs": list(self._runs), "page": http.url.path, "run": None, **values}
        return HTMLResponse(self._pages.get_template(template).render(shown), code)

    async def _refusal(self, http: Request, error: Exception) -> Response:
        assert isinstance(error, ShoalError)
        code = 404 if isinstance(error, RunDirError) else error.http_status
        return self._page(http, "refused.html", code=code, why=str(error))

    def _overview(self, http: Request) -> Response:
        records = {name: run.records() for name, run in self._runs.items()}
        facts = [(name, _facts(run), warnings_of(run)) for name, run in records.items()]
        changed = differences(records) if len(records) > 1 else []
        return self._page(http, "overview.html", facts=facts, changed=changed)

    def _rollouts(self, http: Request) -> Response:
        run, wanted = self._run(http), _asked(http, Filter)
        index, steps = self._indexes[run.name], run.records().steps
        found = index.search(wanted)
        return self._page(
            http,
            "rollouts.html",
            run=run.name,
            wanted=msgspec.to_builtins(wanted),
            found=found,
            rows=[(row, *glance(row)) for row in found.rows],
            index=index,
            last_step=steps[-1]["step"] if steps else None,
            previous=http.url.include_query_params(page=wanted.page - 1),
            next=http.url.include_query_params(page=wanted.page + 1),
        )

    def _group(self, http: Request) -> Response:
        run = self._run(http)
        group = self._indexes[run.name].group(_asked(http, Place).seq)
        task = asked(group)
        messages = task.messages if task else ()
        return self._page(
            http,
            "group.html",
            run=run.name,
            group=group,
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
        rollout = decode_rollout(group.bodies[place.position])
        tokens = tokens_of(group, place.position, rollout, extras, run.records().config)
        colors = shades(tokens, place.by)
        part = slice(max(0, place.first), max(0, place.first) + MOST_TOKENS)
        return self._page(
            http,
            "tokens.html",
            run=run.name,
            group=group,
            position=place.position,
            first=part.start,
            by=place.by,
            tokens=list(zip(tokens, colors, strict=True))[part],
            total=len(tokens),
            scale=SCALES[place.by],
            has_text=extras.text is not None,
            has_advantages=any(token.advantage is not None for token in tokens),
            previous=http.url.include_query_params(first=max(0, place.first - MOST_TOKENS)),
            next=http.url.include_query_params(first=place.first + MOST_TOKENS),
        )

    def _waits(self, http: Request) -> Response:
        run = self._run(http)
        return self._page(http, "waits.html", run=run.name, sentence=bottleneck(run.records()))

    def _swarm(self, http: Request) -> Response:
        run = self._run(http)
        return self._page(http, "swarm.html", run=run.name, status=_swarm_status(run.run_dir))

    def _charts(self, http: Request) -> Response:
        name: str = http.path_params["name"]
        if name not in CHARTS:
            raise Refused(404, f"charts: expected one of {', '.join(CHARTS)}, got {name[:200]!r}")
        runs = self._runs if name == "overview" else {(run := self._run(http)).name: run}
        stamp = " ".join(f"{run.size}-{self._indexes[run.name].complete:d}" for run in runs.values())
        if http.query_params.get("since") == stamp:
            return Response(status_code=204)
        charts = drawn(CHARTS[name], {name: run.records() for name, run in runs.items()})
        if name == "overview":
            charts += self._cut()
        return json({"stamp": stamp, "charts": charts})

    def _cut(self) -> list[Chart]:
        """The chart of answers that used up their tokens, which is of the log; of runs that were read to the end."""
        lines = []
        for name, index in self._indexes.items():
            known = index.cut_by_step() if index.complete else []
            x, y = thinned([step for step, _ in known], [share for _, share in known])
            lines += [Line(name, "cut", "Share of the step's answers that used up max_tokens.", x, y)] if known else []
        return [Chart("Answers cut at max_tokens", is_share=True, lines=lines)] if lines else []


def _asked(http: Request, kind: type[T]) -> T:
    """A request's query as `kind`; empty fields are not given. Raises `Refused`, naming the field."""
    given = {name: value for name, value in http.query_params.items() if value != ""}
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise Refused(400, f"address: {error}") from error


def _facts(run: RunRecords) -> list[tuple[str, str]]:
    """Where a run stands, as label and figure."""
    last: Record = run.evals[-1] if run.evals else {}
    of = f" of {run.config.train.steps}" if run.config else ""
    figures = (
        ("reward", lately(run, "reward"), ".3f"),
        ("tokens/s", lately(run, "tokens_per_s"), ",.0f"),
        ("staleness", lately(run, "staleness_mean"), ".2f"),
        ("engine busy", lately(run, "engine_busy"), ".0%"),
        ("trainer busy", lately(run, "trainer_busy"), ".0%"),
        ("held-out reward", last.get("sampled_reward"), ".3f"),
        ("held-out full marks", last.get("sampled"), ".3f"),
    )
    known = [(label, format(value, form)) for label, value, form in figures if isinstance(value, int | float)]
    return [("step", f"{len(run.steps)}{of}"), *known]


def _swarm_status(run_dir: Path) -> dict[str, object] | None:
    """A node's newest status of its swarm; None when the run is in none."""
    try:
        return msgspec.json.decode((run_dir / SWARM_STATUS).read_bytes(), type=dict[str, object])
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


async def serve_view(run_dirs: Sequence[Path], *, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serves the page until told to stop (SIGTERM, SIGINT); `announce` gets its address. Raises a `ShoalError`."""
    token = "" if is_loopback(host) else secrets.token_urlsafe(24)
    with ExitStack() as stack:
        runs = watched(run_dirs)
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="shoal-view-")))
        listening = stack.enter_context(listening_socket(host, port))
        os.nice(10)  # the runs that are watched come first
        url = url_of(listening)
        if not is_loopback(host) and host in ("0.0.0.0", "::", ""):
            url = f"http://{socket.gethostname()}:{listening.getsockname()[1]}"
        announce(f"{url}/?token={token}" if token else url)
        view = ViewServer(runs, folder, token=token, host=host)
        stack.callback(view.close)
        server = uvicorn.Server(uvicorn_config(view.app, grace_s=1))
        await server.serve(sockets=[listening])
