"""Trainer process of the Tinker server: `python -m shoal.tinker.worker --fd N BASES`, with BASES as JSON."""

import argparse
import json
import socket
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from shoal import wire
from shoal.errors import RequestRefused, ShoalError
from shoal.model.loading import resolve_device
from shoal.net.process import die_with_parent, serve
from shoal.tinker import messages as m
from shoal.tinker.data import data_of, output_of, settings_in
from shoal.tinker.losses import LOSSES, MOST_FLOAT, check_inputs, finite, settings_of
from shoal.tinker.models import GradientJob, TrainedModels


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
    models = TrainedModels(bases, options.dtype, resolve_device(options.device))
    with socket.socket(fileno=options.fd) as connection:
        serve(connection, lambda frame: _answer(models, frame, options.work))


def _answer(models: TrainedModels, frame: bytes, work: Path) -> Iterable[bytes]:
    try:
        answer: m.Answer = carried_out(models, m.with_folder(m.request_from(frame), lambda name: work / name))
    except ShoalError as error:
        answer = m.Failed(str(error), True)
    except Exception as error:  # of this request: raised here, it would end the trainer of all
        traceback.print_exception(error, file=sys.stderr)  # our own bug: the log keeps where
        answer = m.Failed(f"{type(error).__name__}: {error}", False)
    yield wire.encode(answer)


def carried_out(models: TrainedModels, request: m.Request) -> m.CarriedOut:
    """Carries out one request."""
    match request:
        case m.Open():
            models.open(request.model_id, request.base, request.adapter)
            if request.folder:
                try:
                    models.load(request.model_id, Path(request.folder), optimizer=request.optimizer)
                except BaseException:
                    models.close(request.model_id)
                    raise
        case m.Close():
            models.close(request.model_id)
            return m.CarriedOut()
        case m.ForwardBackward():
            return forward_backward(models, request.bodies)
        case m.OptimStep():
            metrics = models.optim_step(request.model_id, request.adam)
            return m.CarriedOut(models.steps(request.model_id), metrics=metrics)
        case m.Save(served=True):
            models.write_served(request.model_id, Path(request.folder))
        case m.Save():
            models.save(request.model_id, Path(request.folder))
        case m.Load():
            models.load(request.model_id, Path(request.folder), optimizer=request.optimizer)
    return m.CarriedOut(models.steps(request.model_id))


def forward_backward(models: TrainedModels, bodies: Sequence[bytes]) -> m.CarriedOut:
    """Carries out the requests that are right, together."""
    jobs: list[GradientJob | m.Failed] = []
    for body in bodies:
        try:
            jobs.append(_job(models, pb.ForwardBackwardRequest.FromString(body)))
        except DecodeError as error:
            jobs.append(m.Failed(f"body: expected a ForwardBackwardRequest: {error}", True))
        except RequestRefused as error:
            jobs.append(m.Failed(str(error), True))
    right = [job for job in jobs if isinstance(job, GradientJob)]
    outputs = iter(models.forward_backward(right))
    parts: list[m.CarriedOut | m.Failed] = []
    for job in jobs:
        if isinstance(job, GradientJob):
            logps, losses = next(outputs)
            sums = {"loss": sum(losses), "tokens": float(sum(len(d.tokens) for d in job.data))} if job.backward else {}
            parts.append(m.CarriedOut(models.steps(job.model_id), output_of(logps, losses), sums))
        else:
            parts.append(job)
    return m.CarriedOut(parts=tuple(parts))


def _job(models: TrainedModels, message: pb.ForwardBackwardRequest) -> GradientJob:
    """Checked job of a request. Raises `RequestRefused`, naming what is wrong."""
    given = settings_in(message)
    most = finite("loss_fn_config.max_staleness", given.pop("max_staleness", MOST_FLOAT))
    settings = settings_of(message.loss_fn, given)
    vocabulary, longest = models.bounds(message.model_id)
    data = data_of(message, vocabulary, longest, LOSSES[message.loss_fn][1])
    version = models.steps(message.model_id)
    for number, datum in enumerate(data):
        check_inputs(message.loss_fn, datum.targets, datum.inputs)
        oldest = datum.oldest()
        if oldest is not None and version - oldest > most:
            raise RequestRefused(
                f"data[{number}].versions: expected at most {most:g} steps before version {version}, got {oldest}"
            )
    return GradientJob(message.model_id, data, message.loss_fn, settings, not message.forward_only)


if __name__ == "__main__":
    main(sys.argv[1:])
