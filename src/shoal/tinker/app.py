"""HTTP routes of the Tinker API, as version 0.38 of the `tinker` package calls them.

Every request names its client's key; a client sees its own sessions, models, samplers and checkpoints, and no others.
"""

import hmac
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from http import HTTPStatus

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Http
from starlette.responses import Response
from starlette.routing import Route
from tinker.proto import tinker_public_pb2 as pb

from shoal.errors import WireError
from shoal.net.server import HANDLERS, Refused, body, decoded, json
from shoal.net.zstd import decompressed
from shoal.tinker import requests as r
from shoal.tinker.bodies import PLACE, checked_name, checkpoint, cursor, encoded, gone, iso_time, page
from shoal.tinker.data import MOST_ROWS
from shoal.tinker.requests import read
from shoal.tinker.sampling import checked
from shoal.tinker.service import TinkerService, new_id
from shoal.tinker.store import Sampler, SavedWeights, StoredModel, owner_of
from shoal.tinker.training import LoadBody, Saving
from shoal.trainer.messages import Adapter

POLL_S = 30.0
PROTO = "application/x-protobuf"
CLIENT_CONFIG = {
    "parallel_fwdbwd_chunks": False,
    "use_pyqwest_transport": False,
    "sample_no_retries": False,
    "fwdbwd_max_chunk_len": MOST_ROWS,
}
"""Flags of the package: one request at a time for each model, over its plain HTTP client."""
MOST_OPEN = 64
"""Models of one key that are not unloaded."""

Handler = Callable[[Http, str], Awaitable[Response]]


class TinkerApp:
    """Application over a service, for clients with one of the keys."""

    def __init__(self, service: TinkerService, keys: tuple[str, ...]) -> None:
        self._service, self._store = service, service.store
        self._owners = {key.encode(): owner_of(key) for key in keys}
        post, get = ["POST"], ["GET"]
        routes: list[tuple[str, Handler, list[str]]] = [
            ("healthz", self._health, get),
            ("client/config", self._config, post),
            ("client/dynamic_config", self._dynamic_config, post),
            ("telemetry", self._telemetry, post),
            ("get_server_capabilities", self._capabilities, get),
            ("create_session", self._create_session, post),
            ("session_heartbeat", self._heartbeat, post),
            ("create_model", self._create_model, post),
            ("unload_model", self._unload, post),
            ("get_info", self._info, post),
            ("forward_backward", self._forward_backward, post),
            ("optim_step", self._optim_step, post),
            ("save_weights", self._save, post),
            ("save_weights_for_sampler", self._save_for_sampler, post),
            ("load_weights", self._load, post),
            ("create_sampling_session", self._create_sampler, post),
            ("asample", self._sample, post),
            ("retrieve_future", self._future, post),
            ("cancel_future", self._cancel, post),
            ("weights_info", self._weights_info, post),
            ("samplers/{id}", self._sampler_info, get),
            ("sequences/{id:path}", self._versions, get),
            ("sessions", self._sessions, get),
            ("sessions/{id}", self._session, get),
            ("sessions/{id}/finish", self._finish, post),
            ("training_runs", self._runs, get),
            ("training_runs/{id}", self._run, get),
            ("training_runs/{id}/checkpoints", self._run_checkpoints, get),
            ("training_runs/{id}/checkpoints/{checkpoint:path}/ttl", self._set_ttl, ["PUT", "POST"]),
            ("training_runs/{id}/checkpoints/{checkpoint:path}", self._delete, ["DELETE"]),
            ("checkpoints", self._checkpoints, get),
        ]
        self.app = Starlette(
            routes=[
                Route(f"/api/v1/{path}", self._known(handler), methods=methods) for path, handler, methods in routes
            ],
            exception_handlers={**HANDLERS, ClientDisconnect: gone},
        )

    def _known(self, handler: Handler) -> Callable[[Http], Awaitable[Response]]:
        async def checked(http: Http) -> Response:
            given = http.headers.get("x-api-key", "")
            known = (owner for key, owner in self._owners.items() if hmac.compare_digest(key, given.encode()))
            owner = next(known, None)
            if owner is None and handler != self._health:
                raise Refused(HTTPStatus.UNAUTHORIZED, "expected one of the server's keys as X-API-Key")
            return await handler(http, owner or "")

        return checked

    async def _health(self, http: Http, owner: str) -> Response:
        return json({"status": "ok"})

    async def _config(self, http: Http, owner: str) -> Response:
        return json(CLIENT_CONFIG)

    async def _dynamic_config(self, http: Http, owner: str) -> Response:
        return json({"refresh_interval_sec": 3600})

    async def _telemetry(self, http: Http, owner: str) -> Response:
        await body(http, r.MOST_BYTES)
        return json({"status": "accepted"})

    async def _capabilities(self, http: Http, owner: str) -> Response:
        models = [{"model_name": name, "trainable": True, "sampleable": True} for name in self._service.settings.bases]
        return json({"supported_models": models})

    async def _create_session(self, http: Http, owner: str) -> Response:
        await read(http, r.CreateSession)
        session = new_id("session")
        self._store.add_session(session, owner)
        return json({"type": "create_session", "session_id": session})

    async def _heartbeat(self, http: Http, owner: str) -> Response:
        self._session_of((await read(http, r.Heartbeat)).session_id, owner)
        return json({"type": "session_heartbeat"})

    async def _create_model(self, http: Http, owner: str) -> Response:
        request = await read(http, r.CreateModel)
        session = self._session_of(request.session_id, owner)
        adapter = None
        if (lora := request.lora_config) is not None:
            if not lora.train_attn and not lora.train_mlp:
                raise Refused(HTTPStatus.BAD_REQUEST, "lora_config: expected train_attn or train_mlp, got neither")
            adapter = encoded(Adapter(lora.rank, lora.seed or 0, lora.train_attn, lora.train_mlp))
        return self._created(session, request.model_seq_id, self._base(request.base_model), adapter, "", False)

    def _created(
        self, session: str, seq_id: int, base: str, adapter: str | None, folder: str, optimizer: bool
    ) -> Response:
        model_id, owner = f"{session}:train:{seq_id}", self._store.owner(session) or ""
        if self._store.model(model_id) is None and self._store.open_models(owner) >= MOST_OPEN:
            raise Refused(HTTPStatus.TOO_MANY_REQUESTS, f"expected at most {MOST_OPEN} models of a key; unload one")
        given = base, adapter, folder, optimizer
        with self._store.together():
            self._store.add_model(model_id, session, *given)
            return self._promise(model_id, 0, "create", msgspec.json.encode(given))

    async def _unload(self, http: Http, owner: str) -> Response:
        model = self._model_of((await read(http, r.OfModel)).model_id, owner)
        return json({"request_id": self._service.submit(f"{model.id}/unload", model.id, "unload", b"")})

    async def _info(self, http: Http, owner: str) -> Response:
        model = self._model_of((await read(http, r.OfModel)).model_id, owner)
        adapter = None if model.adapter is None else msgspec.json.decode(model.adapter, type=Adapter)
        data = {"model_name": model.base, "tokenizer_id": str(self._service.settings.bases[self._base(model.base)])}
        info = {"model_id": model.id, "model_data": data, "model_name": model.base, "is_lora": adapter is not None}
        return json(info | {"lora_rank": None if adapter is None else adapter.rank, "type": "get_info"})

    async def _forward_backward(self, http: Http, owner: str) -> Response:
        data = await body(http, r.MOST_BYTES)
        if http.headers.get("content-encoding") == "zstd":
            try:
                data = decompressed(data, r.MOST_BYTES)
            except WireError as error:
                raise Refused(HTTPStatus.BAD_REQUEST, f"body: {error}") from None
        message = r.head(data)
        model = self._model_of(message.model_id, owner)
        if message.rows > MOST_ROWS:
            raise Refused(HTTPStatus.BAD_REQUEST, f"data: expected at most {MOST_ROWS} rows, got {message.rows}")
        if message.seq_id < 1:
            raise Refused(HTTPStatus.BAD_REQUEST, f"seq_id: expected at least 1, got {message.seq_id}")
        return self._promise(model.id, message.seq_id, "forward_backward", data)

    async def _optim_step(self, http: Http, owner: str) -> Response:
        request = await read(http, r.OptimStepBody)
        model = self._model_of(request.model_id, owner)
        return self._promise(model.id, request.seq_id, "optim_step", msgspec.json.encode(request.adam()))

    async def _save(self, http: Http, owner: str) -> Response:
        request = await read(http, r.SaveWeights)
        model = self._model_of(request.model_id, owner)
        path = f"tinker://{model.id}/weights/{checked_name(request.path, request.seq_id)}"
        is_new = self._store.request(f"{model.id}/{request.seq_id}") is None
        if is_new and not request.overwrite and self._store.checkpoint(path) is not None:
            raise Refused(HTTPStatus.CONFLICT, f"path: {path} exists; save it under another name, or with overwrite")
        saving = Saving(path, None, request.ttl_seconds)
        return self._promise(model.id, request.seq_id, "save", msgspec.json.encode(saving))

    async def _save_for_sampler(self, http: Http, owner: str) -> Response:
        request = await read(http, r.SaveForSampler)
        model = self._model_of(request.model_id, owner)
        if request.sampling_session_seq_id is not None and request.path is None:
            saving = Saving(sampler_id=f"{model.session}:sample:{request.sampling_session_seq_id}")
        else:
            path = f"tinker://{model.id}/sampler_weights/{checked_name(request.path, request.seq_id)}"
            saving = Saving(path, None, request.ttl_seconds)
        return self._promise(model.id, request.seq_id, "save_for_sampler", msgspec.json.encode(saving))

    async def _load(self, http: Http, owner: str) -> Response:
        request = await read(http, r.LoadWeights)
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

    async def _create_sampler(self, http: Http, owner: str) -> Response:
        request = await read(http, r.CreateSampler)
        session = self._session_of(request.session_id, owner)
        sampler = self._new_sampler(
            session, request.sampling_session_seq_id, request.model_path, request.base_model, owner
        )
        return json({"type": "create_sampling_session", "sampling_session_id": sampler.id})

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
        request_id = (await read(http, r.Retrieve)).request_id
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

    async def _cancel(self, http: Http, owner: str) -> Response:
        return json({})  # a request is finished even if its client has stopped waiting

    async def _weights_info(self, http: Http, owner: str) -> Response:
        checkpoint = self._checkpoint_of((await read(http, r.WeightsInfo)).tinker_path, owner)
        model = self._store.model(checkpoint.model)
        assert model is not None
        adapter = None if model.adapter is None else msgspec.json.decode(model.adapter, type=Adapter)
        info = {"base_model": model.base, "is_lora": adapter is not None, "train_unembed": False}
        if adapter is not None:
            info |= {"lora_rank": adapter.rank, "train_mlp": adapter.mlp, "train_attn": adapter.attention}
        return json(info)

    async def _sampler_info(self, http: Http, owner: str) -> Response:
        sampler = self._sampler_of(http.path_params["id"], owner)
        return json({"sampler_id": sampler.id, "base_model": sampler.base, "model_path": sampler.path or None})

    async def _versions(self, http: Http, owner: str) -> Response:
        request_id, _, number = http.path_params["id"].rpartition("/")
        sampler = self._sampler_of(request_id.rpartition("/")[0], owner)
        request = self._store.request(request_id)
        found = (
            pb.SampleResponse.FromString(request.result or b"").sequences if request and request.state == "done" else []
        )
        if PLACE.fullmatch(number) is None or int(number) >= len(found):
            raise Refused(HTTPStatus.NOT_FOUND, "sequence_id: unknown, or not sampled yet")
        count = len(found[int(number)].tokens) // 4  # int32
        return json({"versions": [sampler.version] * count})

    async def _sessions(self, http: Http, owner: str) -> Response:
        return json({"sessions": self._store.sessions(owner)})

    async def _session(self, http: Http, owner: str) -> Response:
        session = self._session_of(http.path_params["id"], owner)
        models = [model.id for model in self._store.models(session)]
        return json({"training_run_ids": models, "sampler_ids": [s.id for s in self._store.samplers(session)]})

    async def _finish(self, http: Http, owner: str) -> Response:
        session = self._session_of(http.path_params["id"], owner)
        await body(http, r.MOST_JSON_BYTES)
        for model in self._store.models(session):
            self._service.submit(f"{model.id}/unload", model.id, "unload", b"")
        return Response(status_code=HTTPStatus.NO_CONTENT)

    async def _runs(self, http: Http, owner: str) -> Response:
        runs = [self._described(model, owner) for s in self._store.sessions(owner) for model in self._store.models(s)]
        return json({"training_runs": page(http, runs), "cursor": cursor(http, len(runs))})

    async def _run(self, http: Http, owner: str) -> Response:
        return json(self._described(self._model_of(http.path_params["id"], owner, closed=True), owner))

    def _described(self, model: StoredModel, owner: str) -> dict[str, object]:
        adapter = None if model.adapter is None else msgspec.json.decode(model.adapter, type=Adapter)
        last = {c.kind: checkpoint(c) for c in self._store.checkpoints(model.id)}
        return {
            "training_run_id": model.id,
            "base_model": model.base,
            "model_owner": "me",
            "is_lora": adapter is not None,
            "lora_rank": None if adapter is None else adapter.rank,
            "last_request_time": iso_time(model.created),
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
        }

    async def _run_checkpoints(self, http: Http, owner: str) -> Response:
        model = self._model_of(http.path_params["id"], owner, closed=True)
        return json({"checkpoints": [checkpoint(c) for c in self._store.checkpoints(model.id)]})

    async def _checkpoints(self, http: Http, owner: str) -> Response:
        models = [model for session in self._store.sessions(owner) for model in self._store.models(session)]
        found = [checkpoint(c) for model in models for c in self._store.checkpoints(model.id)]
        return json({"checkpoints": page(http, found), "cursor": cursor(http, len(found))})

    async def _set_ttl(self, http: Http, owner: str) -> Response:
        checkpoint = self._named(http, owner)
        ttl = (await read(http, r.SetTtl)).ttl_seconds
        expires = None if ttl is None else datetime.now(UTC).timestamp() + ttl
        self._store.set_expiry(checkpoint.path, expires)
        return json({})

    async def _delete(self, http: Http, owner: str) -> Response:
        self._service.remove(self._named(http, owner))
        return Response(status_code=HTTPStatus.NO_CONTENT)

    def _named(self, http: Http, owner: str) -> SavedWeights:
        return self._checkpoint_of(f"tinker://{http.path_params['id']}/{http.path_params['checkpoint']}", owner)

    def _promise(self, model_id: str, seq_id: int, kind: str, data: bytes) -> Response:
        return json(
            {"request_id": self._service.submit(f"{model_id}/{seq_id}", model_id, kind, data), "model_id": model_id}
        )

    def _base(self, name: str) -> str:
        if name not in self._service.settings.bases:
            expected = ", ".join(self._service.settings.bases)
            raise Refused(HTTPStatus.BAD_REQUEST, f"base_model: expected one of {expected}; got {name!r}")
        return name

    def _session_of(self, session: str, owner: str) -> str:
        if self._store.owner(session) != owner:
            raise Refused(HTTPStatus.NOT_FOUND, f"session_id: session {session!r} not found for this API key")
        return session

    def _model_of(self, id_: str, owner: str, *, closed: bool = False) -> StoredModel:
        model = self._store.model(id_)
        if model is None or self._store.owner(model.session) != owner or (model.closed and not closed):
            raise Refused(HTTPStatus.NOT_FOUND, f"model_id: model {id_!r} not found for this API key")
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
