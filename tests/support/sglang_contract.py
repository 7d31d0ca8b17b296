"""The documented routes of SGLang's HTTP server (0.5.23) before one of Shoal's engine processes.

What a real server answers is followed field by field: its names, its defaults, its traps (`/update_weight_version`
aborts everything unless told not to; a flush fails while requests hold KV; a failed load is HTTP 400 with
`success: false`). The tokens, and what happens to requests under way, are of a real engine: `retract` computes their KV
again, `in_place` keeps it.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from engine_server import TOKEN
from shoal.engine.server import protocol
from shoal.engine.server.http_client import HttpEngine
from shoal.errors import EngineUnavailable, RequestRefused
from shoal.net.client import Client

MODES = ("abort", "retract", "in_place")


@dataclass
class Contract:
    """A server between a client that believes in SGLang and one of Shoal's engines."""

    url: str
    """Of the engine: with `--on-update recompute` it does what `retract` does, with `keep` what `in_place` does."""
    knows_modes: bool = True
    """Older ones do not look at the mode of a pause, and say no versions."""
    label: str = "default"
    labels: dict[int, str] = field(default_factory=dict)
    paused: str = ""
    under_way: int = 0
    asked: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine, self.asking = HttpEngine(self.url, token=TOKEN), Client(self.url, token=TOKEN)
        self.going = asyncio.Event()
        self.going.set()

    def app(self) -> Starlette:
        """The routes that the adapter may use."""
        posts = {
            "/generate": self.generate,
            "/pause_generation": self.pause,
            "/continue_generation": self.go_on,
            "/abort_request": self.abort,
            "/update_weights_from_disk": self.update,
            "/update_weight_version": self.rename,
            "/load_lora_adapter": self.load_adapter,
            "/unload_lora_adapter": self.unload_adapter,
        }
        gets = {
            "/server_info": self.server_info,
            "/model_info": self.model_info,
            "/v1/models": self.models,
            "/health": self.health,
            "/metrics": self.metrics,
        }
        return Starlette(
            routes=[
                *(Route(path, self.noted(path, answer), methods=["POST"]) for path, answer in posts.items()),
                *(Route(path, answer, methods=["GET"]) for path, answer in gets.items()),
            ],
            lifespan=self.connected,
        )

    @asynccontextmanager
    async def connected(self, app: Starlette) -> AsyncIterator[None]:
        """Closes its own connections at the end."""
        yield
        await self.engine.aclose()
        await self.asking.aclose()

    def noted(self, path, answer):  # type: ignore[no-untyped-def]
        """The same, with the body in `asked`."""

        async def noting(request: Request) -> Response:
            body = await request.json() if await request.body() else {}
            self.asked.append((path, body))
            try:
                return await answer(body)
            except RequestRefused as error:
                return JSONResponse({"error": {"message": str(error)}}, 400)
            except EngineUnavailable as error:
                return JSONResponse({"error": {"message": str(error)}}, 503)

        return noting

    async def generate(self, body: dict) -> Response:  # type: ignore[type-arg]
        await self.going.wait()
        params = body["sampling_params"]
        scores = body["logprob_start_len"] == 0
        asked = protocol.GenerateRequest(
            body["input_ids"],
            protocol.SamplingParams(
                max_tokens=params["max_new_tokens"],
                temperature=params.get("temperature", 1.0),
                top_p=params.get("top_p", 1.0),
                top_k=max(0, params.get("top_k", -1)),
                min_p=params.get("min_p", 0.0),
                n=params.get("n", 1),
                stop_token_ids=params.get("stop_token_ids"),
            ),
            model=body.get("lora_path"),
        )
        self.under_way += 1
        try:
            answer = await self.asking.ask("POST", "/inference/v1/generate", protocol.GenerateResponse, asked)
        finally:
            self.under_way -= 1
        ids = body["input_ids"]
        scored = await self.engine.scored(ids, adapter=body.get("lora_path", "")) if scores else None
        logprobs = [None, *scored.logprobs] if scored else []
        prompt = [(logp, token, None) for logp, token in zip(logprobs, ids, strict=scores)]
        given = [self.choice(choice, prompt, len(body["input_ids"])) for choice in answer.choices]
        return JSONResponse(given[0] if len(given) == 1 else given)

    def choice(self, choice: protocol.GeneratedChoice, prompt: list, prompt_tokens: int) -> dict:  # type: ignore[type-arg]
        assert choice.logprobs is not None
        spans = [
            {"version": self.labels.get(int(span.version), self.label), "start": span.start, "end": span.end}
            for span in choice.weight_versions or []
        ]
        meta: dict[str, object] = {
            "id": "rid",
            "finish_reason": {"type": choice.finish_reason},
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(choice.token_ids),
            "cached_tokens": 0,
            "weight_version": self.label,
            "output_token_logprobs": [(entry.logprob, entry.token_id, None) for entry in choice.logprobs.content],
            "input_token_logprobs": prompt,
        }
        if self.knows_modes:
            meta["weight_versions"] = spans
        return {"text": "", "output_ids": choice.token_ids, "meta_info": meta}

    async def pause(self, body: dict) -> Response:  # type: ignore[type-arg]
        mode = body.get("mode", "abort")
        if not self.knows_modes:
            mode = "abort"
        if mode not in MODES:
            return JSONResponse({"detail": [{"msg": "Input should be 'abort', 'retract' or 'in_place'"}]}, 422)
        self.paused = mode
        self.going.clear()
        if mode == "abort":
            await self.engine.abort()
        else:
            await self.engine.pause("keep")
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def go_on(self, body: object) -> Response:
        await self.engine.resume()
        self.paused = ""
        self.going.set()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def abort(self, body: dict) -> Response:  # type: ignore[type-arg]
        if body.get("abort_all"):
            await self.engine.abort()
        return Response(status_code=200)

    async def update(self, body: dict) -> Response:  # type: ignore[type-arg]
        if body.get("flush_cache", True) and self.paused == "in_place" and self.under_way:
            return JSONResponse({"success": False, "message": "Cache flush failed after updating weights."}, 400)
        served = (await self.engine.info()).version
        try:
            await self.engine.update_weights(served + 1, Path(body["model_path"]))
        except RequestRefused as error:
            return JSONResponse({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        self.label = body.get("weight_version") or self.label
        self.labels[served + 1] = self.label
        return JSONResponse(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        )

    async def rename(self, body: dict) -> Response:  # type: ignore[type-arg]
        if body.get("abort_all_requests", True):
            await self.engine.abort()
        self.label = body["new_version"]
        self.labels[(await self.engine.info()).version] = self.label
        return JSONResponse({"success": True, "message": "Weight version updated", "new_version": self.label})

    async def load_adapter(self, body: dict) -> Response:  # type: ignore[type-arg]
        name = body["lora_name"]
        if name in self.adapters:
            message = f"LoRA with name {name} already exists"
            return JSONResponse({"success": False, "error_message": message}, 400)
        await self.engine.load_adapter(name, len(self.asked), Path(body["lora_path"]))
        self.adapters.append(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")  # vLLM's words

    async def unload_adapter(self, body: dict) -> Response:  # type: ignore[type-arg]
        await self.engine.unload_adapter(body["lora_name"])
        self.adapters.remove(body["lora_name"])
        return JSONResponse({"success": True, "error_message": "", "loaded_adapters": {}})

    async def server_info(self, request: Request) -> Response:
        return JSONResponse({"version": "0.5.23", "internal_states": [{}]})

    async def model_info(self, request: Request) -> Response:
        return JSONResponse({"model_path": "m", "is_generation": True, "weight_version": self.label})

    async def models(self, request: Request) -> Response:
        longest = (await self.engine.info()).max_model_len
        adapters = [{"id": one, "owned_by": "sglang", "max_model_len": None} for one in self.adapters]
        return JSONResponse({"data": [{"id": "m", "owned_by": "sglang", "max_model_len": longest}, *adapters]})

    async def health(self, request: Request) -> Response:
        return Response(status_code=200)

    async def metrics(self, request: Request) -> Response:
        info = await self.engine.info()
        lines = {
            "num_running_reqs": info.running,
            "num_queue_reqs": info.waiting,
            "generation_tokens_total": info.tokens_drawn,
            "prompt_tokens_total": info.tokens_prefilled,
        }
        return PlainTextResponse("".join(f'sglang:{n}{{model_name="m"}} {float(v)}\n' for n, v in lines.items()))


@contextmanager
def contract(engine_url: str, *, label: str = "default", knows_modes: bool = True) -> Iterator[tuple[str, Contract]]:
    """The URL of such a server before an engine, and the server; `label` is what it calls its weights."""
    made = Contract(engine_url, knows_modes=knows_modes, label=label)
    server = uvicorn.Server(uvicorn.Config(made.app(), port=0, log_level="warning", lifespan="on"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        (listening,) = server.servers
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", made
    finally:
        server.should_exit = True
        thread.join(10)
