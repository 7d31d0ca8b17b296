"""HTTP routes of the Tinker API, as version 0.38 of the `tinker` package calls them.

Every request names its client's key; a client sees its own sessions, models, samplers and checkpoints, and no others.
"""

import hmac
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from http import HTTPStatus
from sqlite3 import OperationalError
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Http
from starlette.responses import Response
from starlette.routing import Route
from tinker.proto import tinker_public_pb2 as pb

from shoal.errors import RunDirError, WireError
from shoal.net.server import HANDLERS, Refused, body, decoded, json, refusal
from shoal.tinker import requests as r
from shoal.tinker.bodies import PLACE, checked_name, checkpoint, cursor, encoded, gone, iso_time, page
from shoal.tinker.sampling import checked
from shoal.tinker.service import TinkerService, new_id
from shoal.tinker.store import Sampler, SavedWeights, StoredModel, owner_of
from shoal.tinker.training import LoadBody, Saving
from shoal.trainer.messages import Adapter
from shoal.weights.manifest import decompressed

T = TypeVar("T")

POLL_S = 30.0
PROTO = "application/x-protobuf"
CLIENT_CONFIG = {
    "parallel_fwdbwd_chunks": False,
    "use_pyqwest_transport": False,
    "sample_no_retries": False,
    "fwdbwd_max_chunk_len": r.MOST_ROWS,
}
"""Flags of the package: one request at a time for each model, over its plain HTTP client."""

Handler = Callable[[Http, str], Awaitable[Response]]
"""Answers a request of a client, who is known by an owner's digest."""


class TinkerApp:
    """Application over a service, for clients with one of the keys."""

    def __init__(self, service: TinkerService, keys: tuple[str, ...]) -> None:
        self._service, self._store = service, service.store
        self._owners = {key.encode(): owner_of(key) for key in keys}
        run, checkpoint = "training_runs/{id}", "training_runs/{id}/checkpoints/{checkpoint:path}"
        routes = [
            self._fixed("client/config", CLIENT_CONFIG),
            self._fixed("client/dynamic_config", {"refresh_interval_sec": 3600}),
            self._fixed("cancel_future", {}),  # a request is finished even if its client has stopped waiting
            self._post("create_session", r.CreateSession, self._create_session),
            self._post("session_heartbeat", r.Heartbeat, self._heartbeat),
            self._post("create_model", r.CreateModel, self._create_model),
            self._post("unload_model", r.OfModel, self._unload),
            self._post("get_info", r.OfModel, self._info),
            self._post("optim_step", r.OptimStepBody, self._optim_step),
            self._post("save_weights", r.SaveWeights, self._save),
            self._post("save_weights_for_sampler", r.SaveForSampler, self._save_for_sampler),
            self._post("load_weights", r.LoadWeights, self._load),
            self._post("create_sampling_session", r.CreateSampler, self._create_sampler),
            self._post("weights_info", r.WeightsInfo, self._weights_info),
            self._get("get_server_capabilities", self._capabilities),
            self._get("samplers/{id}", self._sampler_info),
            self._get("sequences/{id:path}", self._versions),
            self._get("sessions", self._sessions),
            self._get("sessions/{id}", self._session),
            self._get("training_runs", self._runs),
            self._get(run, self._run),
            self._get(f"{run}/checkpoints", self._run_checkpoints),
            self._get("checkpoints", self._checkpoints),
            self._route("telemetry", self._telemetry),
            self._route("forward_backward", self._forward_backward),
            self._route("asample", self._sample),
            self._route("retrieve_future", self._future),
            self._route("sessions/{id}/finish", self._finish),
            self._route(f"{checkpoint}/ttl", self._set_ttl, "PUT", "POST"),
            self._route(checkpoint, self._delete, "DELETE"),
            Route("/api/v1/healthz", lambda _: json({"status": "ok"})),
        ]
        self.app = Starlette(
            routes=routes, exception_handlers={**HANDLERS, ClientDisconnect: gone, OperationalError: self._not_stored}
        )

    async def _not_stored(self, _: Http, error: Exception) -> Response:
        assert isinstance(error, OperationalError)
        try:
            self._store.check_passes(error)
        except RunDirError as lasting:
            return refusal(lasting)
        why = f"the server's disk: {error}; free space, then try again"
        return refusal(Refused(HTTPStatus.INSUFFICIENT_STORAGE, why))

    def _route(self, path: str, handler: Handler, *methods: str) -> Route:
        """Route whose client must give a key; POST without `methods`."""

        async def known(http: Http) -> Response:
            given = http.headers.get("x-api-key", "").encode()
            owner = next((owner for key, owner in self._owners.items() if hmac.compare_digest(key, given)), None)
            if owner is None:
                raise Refused(HTTPStatus.UNAUTHORIZED, "expected one of the server's keys as X-API-Key")
            return await handler(http, owner)

        return Route(f"/api/v1/{path}", known, methods=methods or ["POST"])

    def _post(self, path: str, kind: type[T], answer: Callable[[T, str], object]) -> Route:
        """Route with a JSON body; `answer` gets the body and the owner."""

        async def handle(http: Http, owner: str) -> Response:
            return json(answer(decoded(await body(http, r.MOST_JSON_BYTES), kind), owner))

        return self._route(path, handle)

    def _get(self, path: str, answer: Callable[[Http, str], object]) -> Route:
        async def handle(http: Http, owner: str) -> Response:
            return json(answer(http, owner))

        return self._route(path, handle, "GET")

    def _fixed(self, path: str, answer: object) -> Route:
        async def handle(http: Http, owner: str) -> Response:
            return json(answer)

        return self._route(path, handle)

    async def _telemetry(self, http: Http, owner: str) -> Response:
        await body(http, r.MOST_BYTES)
        return json({"status": "accepted"})

    def _capabilities(self, http: Http, owner: str) -> object:
        models = [{"model_name": name, "trainable": True, "sampleable": True} for name in self._service.settings.bases]
        return {"supported_models": models}

    def _create_session(self, request: r.CreateSession, owner: str) -> object:
        session = new_id("session")
        self._store.add_session(session, owner)
        return {"type": "create_session", "session_id": session}

    def _heartbeat(self, request: r.Heartbeat, owner: str) -> object:
        self._session_of(request.session_id, owner)
        return {"type": "session_heartbeat"}

    def _create_model(self, request: r.CreateModel, owner: str) -> object:
        session = self._session_of(request.session_id, owner)
        lora = request.lora_config
        if not lora.train_attn and not lora.train_mlp:
            raise Refused(HTTPStatus.BAD_REQUEST, "lora_config: expected train_attn or train_mlp, got neither")
        adapter = encoded(Adapter(lora.rank, lora.seed or 0, lora.train_attn, lora.train_mlp))
        return self._created(session, request.model_seq_id, self._base(request.base_model), adapter, "", False)

    def _created(
        self, session: str, seq_id: int, base: str, adapter: str, folder: str, optimizer: bool
    ) -> dict[str, str]:
        model_id, owner = f"{session}:train:{seq_id}", self._store.owner(session) or ""
        if self._store.model(model_id) is None:
            self._service.make_room(owner)
        given = base, adapter, folder, optimizer
        with self._store.together():
            self._store.add_model(model_id, session, *given)
            return self._promise(model_id, 0, "create", msgspec.json.encode(given))

    def _unload(self, request: r.OfModel, owner: str) -> object:
        return {"request_id": self._service.unload(self._model_of(request.model_id, owner))}

    def _info(self, request: r.OfModel, owner: str) -> object:
        model = self._model_of(request.model_id, owner)
        data = {"model_name": model.base, "tokenizer_id": str(self._service.settings.bases[self._base(model.base)])}
        info = {"model_id": model.id, "model_data": data, "model_name": model.base, "is_lora": True}
        return info | {"lora_rank": model.lora.rank, "type": "get_info"}

    async def _forward_backward(self, http: Http, owner: str) -> Response:
        data = await body(http, r.MOST_BYTES)
        if http.headers.get("content-encoding") == "zstd":
            try:
                data = decompressed(data, r.MOST_BYTES)
            except WireError as error:
                raise Refused(HTTPStatus.BAD_REQUEST, f"body: {error}") from None
        message = r.head(data)
        model = self._model_of(message.model_id, owner)
        if message.rows > r.MOST_ROWS:
            raise Refused(HTTPStatus.BAD_REQUEST, f"data: expected at most {r.MOST_ROWS} rows, got {message.rows}")
        if message.seq_id < 1:
            raise Refused(HTTPStatus.BAD_REQUEST, f"seq_id: expected at least 1, got {message.seq_id}")
        return json(self._promise(model.id, message.seq_id, "forward_backward", data))

    def _optim_step(self, request: r.OptimStepBody, owner: str) -> object:
        model = self._model_of(request.model_id, owner)
        return self._promise(model.id, request.seq_id, "optim_step", msgspec.json.encode(request.adam()))

    def _save(self, request: r.SaveWeights, owner: str) -> object:
        model = self._model_of(request.model_id, owner)
        path = f"tinker://{model.id}/weights/{checked_name(request.path, request.seq_id)}"
        is_new = self._store.request(f"{model.id}/{request.seq_id}") is None
        if is_new and not request.overwrite and self._store.checkpoint(path) is not None:
            raise Refused(HTTPStatus.CONFLICT, f"path: {path} exists; save it under another name, or with overwrite")
        saving = Saving(path, None, request.ttl_seconds)
        return self._promise(model.id, request.seq_id, "save", msgspec.json.encode(saving))

    def _save_for_sampler(self, request: r.SaveForSampler, owner: str) -> object:
        model = self._model_of(request.model_id, owner)
        if request.sampling_session_seq_id is not None and request.path is None:
            saving = Saving(sampler_id=f"{model.session}:sample:{request.sampling_session_seq_id}")
        else:
            path = f"tinker://{model.id}/sampler_weights/{checked_name(request.path, request.seq_id)}"
            saving = Saving(path, None, request.ttl_seconds)
        return self._promise(model.id, request.seq_id, "save_for_sampler", msgspec.json.encode(saving))

    def _load(self, request: r.LoadWeights, owner: str) -> object:
        checkpoint = self._checkpoint_of(request.path, owner)
        if checkpoint.kind != "training":
            raise Refused(HTTPStatus.BAD_REQUEST, f"path: expected weights of save_state, got {request.path}")
        source = self._store.model(checkpoint.model)
        assert source is not None
        if request.session_id is not None and request.model_seq_id is not None:
            session = self._session_of(request.session_id, owner)
            base = self._base(request.base_model or source.base)
            wanted = request.model_seq_id, base, source.adapter, checkpoint.folder, request.optimizer
            return self._created(session, *wanted)
        if request.model_id is None or request.seq_id is None:
            raise Refused(HTTPStatus.BAD_REQUEST, "expected session_id with model_seq_id, or model_id with seq_id")
        model = self._model_of(request.model_id, owner)
        if model.base != source.base:
            raise Refused(HTTPStatus.BAD_REQUEST, f"path: expected weights on {model.base!r}, got {source.base!r}")
        stored = LoadBody(request.path, checkpoint.folder, request.optimizer)
        return self._promise(model.id, request.seq_id, "load", msgspec.json.encode(stored))

    def _create_sampler(self, request: r.CreateSampler, owner: str) -> object:
        session = self._session_of(request.session_id, owner)
        sampler = self._new_sampler(
            session, request.sampling_session_seq_id, request.model_path, request.base_model, owner
        )
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    def _new_sampler(self, session: str, seq_id: int, path: str | None, base: str | None, owner: str) -> Sampler:
        folder, version = "", 0
        if path is not None:
            checkpoint = self._checkpoint_of(path, owner)
            if checkpoint.kind != "sampler":
                raise Refused(
                    HTTPStatus.BAD_REQUEST, f"model_path: expected weights of save_weights_for_sampler, got {path}"
                )
            model = self._store.model(checkpoint.model)
            assert model is not None
            base, folder, version = model.base, checkpoint.folder, checkpoint.version
        sampler = Sampler(f"{session}:sample:{seq_id}", session, self._base(base or ""), path or "", folder, version)
        self._store.add_sampler(sampler)
        there = self._store.sampler(sampler.id)
        if there is None or (there.base, there.path) != (sampler.base, sampler.path):
            raise Refused(HTTPStatus.CONFLICT, f"sampling_session_seq_id: {seq_id} is another sampler's already")
        return there

    async def _sample(self, http: Http, owner: str) -> Response:
        data = await body(http, r.MOST_SAMPLE_BYTES)
        request = decoded(data, r.SampleBody)
        checked(request)
        sampler = self._sampler_of(request.sampling_session_id, owner)
        request_id = self._service.submit(f"{sampler.id}/{request.seq_id}", sampler.id, "sample", data)
        names = [f"{request_id}/{number}" for number in range(request.num_samples)]
        return json({"request_id": request_id, "sample_sequence_ids": names})

    async def _future(self, http: Http, owner: str) -> Response:
        request_id = decoded(await body(http, r.MOST_JSON_BYTES), r.Retrieve).request_id
        target = request_id.rpartition("/")[0]
        if self._store.model(target) is not None:
            self._model_of(target, owner, closed=True)
        else:
            self._sampler_of(target, owner)
        request = await self._service.futures.result(request_id, POLL_S)
        if request is None:
            raise Refused(HTTPStatus.GONE, f"request_id: {request_id!r} not found, or its result has expired")
        if request.state == "pending":
            waiting = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return json(waiting, HTTPStatus.REQUEST_TIMEOUT)
        is_proto = request.state == "done" and request.kind in ("sample", "forward_backward")
        return Response(request.result, media_type=PROTO if is_proto else "application/json")

    def _weights_info(self, request: r.WeightsInfo, owner: str) -> object:
        checkpoint = self._checkpoint_of(request.tinker_path, owner)
        model = self._store.model(checkpoint.model)
        assert model is not None
        lora, info = model.lora, {"base_model": model.base, "is_lora": True, "train_unembed": False}
        return info | {"lora_rank": lora.rank, "train_mlp": lora.mlp, "train_attn": lora.attention}

    def _sampler_info(self, http: Http, owner: str) -> object:
        sampler = self._sampler_of(http.path_params["id"], owner)
        return {"sampler_id": sampler.id, "base_model": sampler.base, "model_path": sampler.path or None}

    def _versions(self, http: Http, owner: str) -> object:
        request_id, _, number = http.path_params["id"].rpartition("/")
        sampler = self._sampler_of(request_id.rpartition("/")[0], owner)
        request = self._store.request(request_id)
        found = (
            pb.SampleResponse.FromString(request.result or b"").sequences if request and request.state == "done" else []
        )
        if PLACE.fullmatch(number) is None or int(number) >= len(found):
            raise Refused(HTTPStatus.NOT_FOUND, "sequence_id: unknown, or not sampled yet")
        count = len(found[int(number)].tokens) // 4  # int32
        return {"versions": [sampler.version] * count}

    def _sessions(self, http: Http, owner: str) -> object:
        return {"sessions": self._store.sessions(owner)}

    def _session(self, http: Http, owner: str) -> object:
        session = self._session_of(http.path_params["id"], owner)
        models = [model.id for model in self._store.models(session)]
        return {"training_run_ids": models, "sampler_ids": [s.id for s in self._store.samplers(session)]}

    async def _finish(self, http: Http, owner: str) -> Response:
        session = self._session_of(http.path_params["id"], owner)
        await body(http, r.MOST_JSON_BYTES)
        for model in self._store.models(session):
            self._service.unload(model)
        return Response(status_code=HTTPStatus.NO_CONTENT)

    def _runs(self, http: Http, owner: str) -> object:
        runs = [self._described(model, owner) for s in self._store.sessions(owner) for model in self._store.models(s)]
        return {"training_runs": page(http, runs), "cursor": cursor(http, len(runs))}

    def _run(self, http: Http, owner: str) -> object:
        return self._described(self._model_of(http.path_params["id"], owner, closed=True), owner)

    def _described(self, model: StoredModel, owner: str) -> dict[str, object]:
        last = {c.kind: checkpoint(c) for c in self._store.checkpoints(model.id)}
        return {
            "training_run_id": model.id,
            "base_model": model.base,
            "model_owner": "me",
            "is_lora": True,
            "lora_rank": model.lora.rank,
            "last_request_time": iso_time(model.created),
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
        }

    def _run_checkpoints(self, http: Http, owner: str) -> object:
        model = self._model_of(http.path_params["id"], owner, closed=True)
        return {"checkpoints": [checkpoint(c) for c in self._store.checkpoints(model.id)]}

    def _checkpoints(self, http: Http, owner: str) -> object:
        models = [model for session in self._store.sessions(owner) for model in self._store.models(session)]
        found = [checkpoint(c) for model in models for c in self._store.checkpoints(model.id)]
        return {"checkpoints": page(http, found), "cursor": cursor(http, len(found))}

    async def _set_ttl(self, http: Http, owner: str) -> Response:
        checkpoint = self._named(http, owner)
        ttl = decoded(await body(http, r.MOST_JSON_BYTES), r.SetTtl).ttl_seconds
        expires = None if ttl is None else datetime.now(UTC).timestamp() + ttl
        self._store.set_expiry(checkpoint.path, expires)
        return json({})

    async def _delete(self, http: Http, owner: str) -> Response:
        self._service.remove(self._named(http, owner))
        return Response(status_code=HTTPStatus.NO_CONTENT)

    def _named(self, http: Http, owner: str) -> SavedWeights:
        return self._checkpoint_of(f"tinker://{http.path_params['id']}/{http.path_params['checkpoint']}", owner)

    def _promise(self, model_id: str, seq_id: int, kind: str, data: bytes) -> dict[str, str]:
        return {"request_id": self._service.submit(f"{model_id}/{seq_id}", model_id, kind, data), "model_id": model_id}

    def _base(self, name: str) -> str:
        if name not in self._service.settings.bases:
            expected = ", ".join(self._service.settings.bases)
            raise Refused(HTTPStatus.BAD_REQUEST, f"base_model: expected one of {expected}; got {name!r}")
        return name

    def _session_of(self, session: str, owner: str) -> str:
        if self._store.owner(session) != owner:
            raise Refused(HTTPStatus.NOT_FOUND, f"session_id: session {session!r} not found for this API key")
        self._service.hear(session)
        return session

    def _model_of(self, id_: str, owner: str, *, closed: bool = False) -> StoredModel:
        model = self._store.model(id_)
        if model is None or self._store.owner(model.session) != owner or (model.closed and not closed):
            raise Refused(HTTPStatus.NOT_FOUND, f"model_id: model {id_!r} not found for this API key")
        self._service.hear(model.session)
        return model

    def _sampler_of(self, id_: str, owner: str) -> Sampler:
        sampler = self._store.sampler(id_)
        if sampler is None or self._store.owner(sampler.session) != owner:
            raise Refused(HTTPStatus.NOT_FOUND, f"sampling_session_id: sampler {id_!r} not found for this API key")
        return sampler

    def _checkpoint_of(self, path: str, owner: str) -> SavedWeights:
        checkpoint = self._store.checkpoint(path)
        if checkpoint is None:
            raise Refused(HTTPStatus.NOT_FOUND, f"path: checkpoint {path!r} not found for this API key")
        self._model_of(checkpoint.model, owner, closed=True)
        return checkpoint
