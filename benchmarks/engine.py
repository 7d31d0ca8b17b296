"""How near the local engine comes to what the machine can do: against a loop written by hand, against
`model.generate`, against draining before updates, and against copying the weights' bytes.

    share_of_limit          tokens/s of the engine over those of `limit.StaticLoop` at equal batch, greedy, both with
                            the better of one and two threads; the rounds of the sides take turns
    over_generate           tokens/s that were asked for, over those of `model.generate` in static batches (the best of
                            some sizes), on lengths that are lognormal with sigma 1
    interrupt_over_drain    tokens/s while weights are pushed again and again: recomputing what runs, over draining, at
                            `PUSH_SETTING`; `pushes` has it for other numbers of rows and times between pushes
    push_stall_over_memcpy  how long loading a push keeps an engine that decodes from its next step, over copying as
                            many bytes from memory to memory; what answers wait for in all is `gap_around_push_s`,
                            the recomputing of running ones included, beside `gap_usual_s`
    crowd                   1,000 requests at once over HTTP: how long they waited, and the engine's memory
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import exp
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from benchmarks import say
from benchmarks.crowd import crowd
from benchmarks.limit import StaticLoop
from benchmarks.model import SHAPE
from shoal.engine.compute.options import EngineLimits, OnUpdate
from shoal.engine.compute.request import Request
from shoal.engine.compute.step_engine import StepEngine
from shoal.model.loading import load_model
from shoal.run.demo_model.architecture import Shape, save, untrained
from shoal.types import Sampling, seed_for

Report = dict[str, object]
SHAPES = {"5M": SHAPE, "50M": Shape(width=640, layers=8, heads=10, feed_forward=2560)}
PROMPT_TOKENS = 8
DRAWN_TOKENS = {"5M": 64, "50M": 24}
MEAN_TOKENS = 32
MOST_TOKENS = 256
RUNNING = 128
STALL_ROWS = 8
STALL_STEPS = 24
WAVES = 6
PUSH_SHARES = (0.25, 0.5, 1.0)
PUSH_SETTING = "50M/8 0.5"
"""Weights larger than the caches, so that few rows cost nearly as much as one, as they do on accelerators."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    rounds: dict[str, dict[int, int]]
    """By model and batch: short rounds need more of them."""
    drawn_tokens: dict[str, int]
    answers: int
    """Of varied length."""
    pushes: dict[str, Sequence[float]]
    """By model and rows: mean answers drawn by each row between two pushes."""
    crowd: int
    """Requests at once."""
    stall_rounds: int = 8
    threads: Sequence[int] = (1, 2)
    generate_batches: Sequence[int] = (32, 128)


FULL = Effort(
    {"5M": {8: 10, 32: 6, 128: 3}, "50M": {8: 4, 32: 2, 128: 2}},
    DRAWN_TOKENS,
    answers=384,
    pushes={"5M/8": PUSH_SHARES, "5M/32": PUSH_SHARES, "5M/128": PUSH_SHARES, "50M/8": PUSH_SHARES},
    crowd=1000,
)
QUICK = Effort(
    {"5M": {8: 1}, "50M": {8: 1}},
    {"5M": 8, "50M": 4},
    answers=16,
    pushes={"5M/2": (0.5,)},
    crowd=20,
    stall_rounds=1,
    threads=(1,),
    generate_batches=(16,),
)


def measure(quick: bool) -> Report:
    """The figures of the module's text, and the times that they come from."""
    effort = QUICK if quick else FULL
    threads = torch.get_num_threads()
    try:
        with tempfile.TemporaryDirectory() as folder:
            directories = {name: Path(folder) / name for name in SHAPES}
            for name, shape in SHAPES.items():
                save(untrained(shape, seed=0), directories[name])
            shares, rates = _shares(directories, effort)
            torch.set_num_threads(1)
            say("answers of varied length, beside generate")
            generate = _over_generate(directories["5M"], effort)
            say("pushes: recomputing, keeping and draining")
            interrupt = _interrupt_over_drain(directories, effort)
            stall = _push_stall(directories["50M"], effort.stall_rounds)
            lengths = _lengths(effort.crowd)
            say(f"{effort.crowd} requests at once")
            waits = asyncio.run(crowd(directories["5M"], [_prompt(i) for i in range(effort.crowd)], lengths))
    finally:
        torch.set_num_threads(threads)
    return {"share_of_limit": shares, **generate, **interrupt, **stall, "crowd": waits, "tokens_per_s": rates}


def _shares(directories: dict[str, Path], effort: Effort) -> tuple[dict[str, float], Report]:
    shares: dict[str, float] = {}
    rates: Report = {}
    for name, directory in directories.items():
        for batch, rounds in effort.rounds[name].items():
            drawn = effort.drawn_tokens[name]
            tokens = batch * drawn
            say(f"{name}, batch {batch}: {rounds} rounds of each side")
            limit_s, engine_s = _limit_and_engine_s(directory, batch, rounds, drawn, effort.threads)
            shares[f"{name}/{batch}"] = limit_s / engine_s
            rates[f"{name}/{batch}"] = {"limit": tokens / limit_s, "engine": tokens / engine_s}
    return shares, rates


def _limit_and_engine_s(
    directory: Path, batch: int, rounds: int, drawn: int, threads: Sequence[int]
) -> tuple[float, float]:
    """Seconds of the best round of each side at its better number of threads."""
    loop = StaticLoop(_plain(directory))
    engine = _engine(directory, max_running=batch)
    prompts = [_prompt(i) for i in range(batch)]
    prompt_BL = torch.tensor(prompts)
    answers: list[list[list[int]]] = []

    def limit() -> None:
        answers[:1] = [loop.tokens(prompt_BL, drawn).tolist()]

    def served() -> None:
        requests = [Request(prompt, Sampling(drawn, temperature=0)) for prompt in prompts]
        _finish(engine, requests)
        answers[1:] = [[request.drafts[0].sampled for request in requests]]

    sides = {"limit": limit, "engine": served}
    best = _best_s({(side, t): (run, t) for t in threads for side, run in sides.items()}, rounds)
    assert answers[0] == answers[1], "the two sides drew different tokens"
    return min(best["limit", t] for t in threads), min(best["engine", t] for t in threads)


def _best_s(sides: dict[tuple[str, int], tuple[Callable[[], None], int]], rounds: int) -> dict[tuple[str, int], float]:
    """Seconds of the best round of each side, in turn; `sides` gives what to do with how many threads."""
    best: dict[tuple[str, int], float] = {}
    for turn in range(rounds + 1):  # the first is a warm-up: it counts only if nothing else does
        for key, (run, threads) in sides.items():
            torch.set_num_threads(threads)
            seconds = _seconds(run)
            best[key] = seconds if turn <= 1 else min(best[key], seconds)
    return best


def _over_generate(directory: Path, effort: Effort) -> Report:
    """The same answers from the engine and from `generate`."""
    lengths = _lengths(effort.answers)
    asked = sum(lengths)
    engine = _engine(directory, max_running=RUNNING)
    model = _plain(directory)

    def served() -> None:
        _finish(engine, [Request(_prompt(i), Sampling(length, seed=i)) for i, length in enumerate(lengths)])

    sides: dict[tuple[str, int], tuple[Callable[[], None], int]] = {
        (f"generate/{batch}", threads): (_generating(model, lengths, batch), threads)
        for batch in effort.generate_batches
        for threads in effort.threads
    }
    best = _best_s({**{("engine", t): (served, t) for t in effort.threads}, **sides}, 1)
    engine_s = min(best["engine", t] for t in effort.threads)
    (setting, threads), generate_s = min(((key, best[key]) for key in sides), key=lambda pair: pair[1])
    return {
        "over_generate": generate_s / engine_s,
        "engine_tokens_per_s": asked / engine_s,
        "generate_tokens_per_s": asked / generate_s,
        "generate_setting": f"{setting}, {threads} threads",
    }


def _generating(model: Qwen2ForCausalLM, lengths: Sequence[int], batch: int) -> Callable[[], None]:
    """`generate` in batches in order of arrival; each runs until its longest answer is drawn."""

    @torch.inference_mode()
    def run() -> None:
        for first in range(0, len(lengths), batch):
            longest = max(lengths[first : first + batch])
            prompt_BL = torch.tensor([_prompt(i) for i in range(first, min(first + batch, len(lengths)))])
            model.generate(
                prompt_BL,
                attention_mask=torch.ones_like(prompt_BL),
                do_sample=True,
                min_new_tokens=longest,
                max_new_tokens=longest,
            )

    return run


def _interrupt_over_drain(directories: dict[str, Path], effort: Effort) -> Report:
    """The same answers under pushes, `WAVES` to each row, by setting and what happens at an update; on one thread."""
    pushes: dict[str, dict[str, float]] = {}
    for setting, shares in effort.pushes.items():
        name, _, running = setting.partition("/")
        lengths = _lengths(WAVES * int(running))
        for share in shares:
            every_tokens = share * int(running) * sum(lengths) / len(lengths)
            rates, served = {}, {}
            for mode in OnUpdate:
                engine = _engine(directories[name], max_running=int(running), on_update=mode)
                began_s = time.perf_counter()
                served[mode] = _finish_while_pushing(engine, lengths, directories[name], every_tokens)
                rates[mode] = sum(lengths) / (time.perf_counter() - began_s)
            pushes[f"{setting} {share}"] = {
                "recompute_over_drain": rates[OnUpdate.RECOMPUTE] / rates[OnUpdate.DRAIN],
                "keep_over_drain": rates[OnUpdate.KEEP] / rates[OnUpdate.DRAIN],
                "drain_tokens_per_s": rates[OnUpdate.DRAIN],
                **{f"{mode}_served": served[mode] for mode in OnUpdate},
            }
    chosen = pushes.get(PUSH_SETTING) or next(iter(pushes.values()))
    return {"interrupt_over_drain": chosen["recompute_over_drain"], "pushes": pushes}


def _finish_while_pushing(engine: StepEngine, lengths: Sequence[int], directory: Path, every_tokens: float) -> int:
    """Draws the answers; how many versions were served meanwhile. Files are checked before, as by another thread."""
    staged = engine.slots.staged(1, directory, None)
    version, next_push, served = 0, every_tokens, {0}
    for i, length in enumerate(lengths):
        engine.submit(Request(_prompt(i), Sampling(length, seed=i)))
    while not engine.idle:
        engine.step()
        served.add(engine.version)
        if engine.tokens_drawn >= next_push:
            version += 1
            next_push += every_tokens
            engine.update(replace(staged, version=version))
    return len(served) - 1


def _push_stall(directory: Path, rounds: int) -> Report:
    """What a push costs an engine while it decodes: what it cannot step for, and what its answers wait for.

    The stall is the time in which the thread that steps does nothing but take the weights up: it copies them, drops
    KV and settles what belongs to that. Computing known tokens again comes after it: `recompute_s` is the step that
    does, less the stall.
    """
    engine = _engine(directory, max_running=STALL_ROWS)
    state = engine.model.state_dict()
    size_bytes = sum(tensor.nbytes for tensor in state.values())
    source, target = torch.zeros(size_bytes, dtype=torch.uint8), torch.zeros(size_bytes, dtype=torch.uint8)
    versions = count(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
        found = [
            {**_pushed(engine, next(versions), path), "memcpy_s": _seconds(lambda: target.copy_(source))}
            for _ in range(rounds + 1)
        ][1:]
    best = {name: min(round_[name] for round_ in found) for name in found[0]}
    return {
        "push_stall_over_memcpy": best["push_stall_s"] / best["memcpy_s"],
        **best,
        "pushed_megabytes": size_bytes / 1e6,
    }


def _pushed(engine: StepEngine, version: int, path: Path) -> dict[str, float]:
    """Seconds of a push while `STALL_ROWS` answers are drawn, and the gaps between their tokens with and without it."""
    requests = [Request(_prompt(row), Sampling(4 * STALL_STEPS, temperature=0)) for row in range(STALL_ROWS)]
    for request in requests:
        engine.submit(request)
    for _ in range(STALL_STEPS):
        engine.step()
    plain_s = [_seconds(engine.step) for _ in range(STALL_STEPS)]  # each draws a token of every answer
    drawn = engine.tokens_drawn
    engine.update(engine.slots.staged(version, path, None))
    loaded_s = engine.load_s
    gap_s = _seconds(engine.step)
    stall_s = engine.load_s - loaded_s
    assert engine.version == version, "not loaded"
    assert engine.tokens_drawn == drawn + STALL_ROWS, "more than one gap"
    engine.abort(requests)
    engine.step()
    return {
        "push_stall_s": stall_s,
        "recompute_s": gap_s - stall_s,
        "gap_around_push_s": gap_s,
        "gap_usual_s": sorted(plain_s)[len(plain_s) // 2],
    }


def _engine(directory: Path, *, max_running: int, on_update: OnUpdate = OnUpdate.RECOMPUTE) -> StepEngine:
    limits = EngineLimits(max_model_len=SHAPE.context, max_running=max_running)
    return StepEngine(load_model(directory), limits, on_update=on_update)


def _plain(directory: Path) -> Qwen2ForCausalLM:
    """The model with transformers' own attention."""
    model: Qwen2ForCausalLM = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa").eval()
    return model


def _prompt(index: int) -> list[int]:
    generator = random.Random(seed_for("bench", "engine", index))
    return [generator.randrange(6, 100) for _ in range(PROMPT_TOKENS)]


def _lengths(answers: int) -> list[int]:
    """Lognormal with sigma 1 and a mean of `MEAN_TOKENS` before they are cut."""
    generator = random.Random(seed_for("bench", "engine", "lengths"))
    mean = MEAN_TOKENS / exp(0.5)
    return [min(MOST_TOKENS, max(1, round(mean * exp(generator.gauss(0, 1))))) for _ in range(answers)]


def _finish(engine: StepEngine, requests: Sequence[Request]) -> None:
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        engine.step()


def _seconds(run: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s
