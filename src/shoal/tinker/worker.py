"""Trainer process of the Tinker server: `python -m shoal.tinker.worker --fd N BASES`, with BASES as JSON."""

import argparse
import json
import socket
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from shoal import wire
from shoal.config import ModelConfig
from shoal.errors import RequestRefused, ShoalError, TrainerError
from shoal.net.process import die_with_parent, serve
from shoal.tinker import messages as m
from shoal.tinker.data import gradient_of, output_of
from shoal.trainer.adapters import WEIGHTS_FILE
from shoal.trainer.messages import Gradient, GradientDone, Open
from shoal.trainer.models import TrainedModels


def main(arguments: Sequence[str]) -> None:
    """Serves until the socket closes."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="shoal.tinker.worker")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, default=Path(), help="Where the folders of requests lie.")
    parser.add_argument("bases")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    bases = {name: Path(path) for name, path in json.loads(options.bases).items()}
    base = Base(bases, ModelConfig(dtype=options.dtype, device=options.device).model_dump_json())
    models = TrainedModels()
    with socket.socket(fileno=options.fd) as connection:
        serve(connection, lambda frame: _answer(models, base, frame, options.work))


@dataclass(frozen=True, slots=True)
class Base:
    """Models that may be opened, by name, and how they are loaded."""

    paths: Mapping[str, Path]
    model_json: str


def _answer(models: TrainedModels, base: Base, frame: bytes, work: Path) -> Iterable[bytes]:
    try:
        answer: m.Answer = carried_out(models, base, m.with_folder(m.request_from(frame), lambda name: work / name))
    except ShoalError as error:
        answer = m.Failed(str(error), True)
    except Exception as error:  # of this request: raised here, it would end the trainer of all
        traceback.print_exception(error, file=sys.stderr)  # our own bug: the log keeps where
        answer = m.Failed(f"{type(error).__name__}: {error}", False)
    yield wire.encode(answer)


def carried_out(models: TrainedModels, base: Base, request: m.Request) -> m.CarriedOut:
    """Carries out one request."""
    match request:
        case m.Open():
            if request.base not in base.paths:
                raise RequestRefused(f"base_model: expected one of {', '.join(base.paths)}; got {request.base!r}")
            path, name = str(base.paths[request.base]), request.model_id
            models.open(Open(name, path, base.model_json, request.adapter))
            if request.folder:
                try:
                    models[name].load(Path(request.folder), optimizer=request.optimizer)
                except BaseException:
                    models.close(name)
                    raise
        case m.Close():
            models.close(request.model_id)
            return m.CarriedOut()
        case m.ForwardBackward():
            return forward_backward(models, request.bodies)
        case m.OptimStep():
            norm, updates = models[request.model_id].update(request.adam), models[request.model_id].updates
            lr = request.adam.learning_rate
            metrics = {"unclipped_grad_l2:mean": norm, "learning_rate": lr, "version": float(updates)}
            return m.CarriedOut(updates, metrics=metrics)
        case m.Save(served=True):
            models.write_weights(request.model_id, Path(request.folder) / WEIGHTS_FILE)
        case m.Save():
            models[request.model_id].save(Path(request.folder))
        case m.Load():
            models[request.model_id].load(Path(request.folder), optimizer=request.optimizer)
    return m.CarriedOut(models[request.model_id].updates)


def forward_backward(models: TrainedModels, bodies: Sequence[bytes]) -> m.CarriedOut:
    """Carries out the requests that are right, together."""
    jobs: list[Gradient | m.Failed] = []
    for body in bodies:
        try:
            name = pb.ForwardBackwardRequest.FromString(body).model_id
            jobs.append(gradient_of(body, models[name].updates))
        except DecodeError as error:
            jobs.append(m.Failed(f"body: expected a ForwardBackwardRequest: {error}", True))
        except (RequestRefused, TrainerError) as error:
            jobs.append(m.Failed(str(error), True))
    done = iter(models.accumulate([job for job in jobs if isinstance(job, Gradient)]))
    parts: list[m.CarriedOut | m.Failed] = []
    for job in jobs:
        if isinstance(job, m.Failed):
            parts.append(job)
        elif isinstance(one := next(done), GradientDone):
            tokens = float(sum(datum.shape[0] for datum in job.data))
            sums = {"loss": one.loss, "tokens": tokens} if job.backward else {}
            parts.append(m.CarriedOut(one.updates, output_of(job, one), sums))
        else:
            parts.append(m.Failed(one.reason, True))
    return m.CarriedOut(parts=tuple(parts))


if __name__ == "__main__":
    main(sys.argv[1:])
