"""Devices assign each process of a run its cores and a separate GPU, unless the configuration asks for sharing.

GPUs are named as in CUDA_VISIBLE_DEVICES. Each child process sees only its own. Without any the CPU computes.
"""

import ctypes
import os
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from shoal.config import Config
from shoal.errors import ConfigError
from shoal.net.process import cores

VISIBLE = "CUDA_VISIBLE_DEVICES"


def _half() -> int:
    return max(1, cores() // 2)


@dataclass(frozen=True, slots=True)
class Threads:
    """Cores of each computing process: half of the machine's, unless said otherwise."""

    engine: int = field(default_factory=_half)
    trainer: int = field(default_factory=_half)


@dataclass(frozen=True, slots=True)
class Devices:
    """GPUs of engines and ranks, in order; none on the CPU."""

    engines: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()

    def __str__(self) -> str:
        """
        >>> print(Devices(("1", "2"), ("0",)), Devices(), sep="; or: ")
        engines on GPU 1, 2; trainer on GPU 0; or: CPU
        """
        parts = (("engines", self.engines), ("trainer", self.ranks))
        return "; ".join(f"{name} on GPU {', '.join(gpus)}" for name, gpus in parts if gpus) or "CPU"


def visible_gpus(environment: Mapping[str, str], present: int) -> tuple[str, ...]:
    """Names the GPUs that this process may use, of those `present` on the machine.

    >>> visible_gpus({}, 2), visible_gpus({"CUDA_VISIBLE_DEVICES": "3,1,-1,2"}, 4), visible_gpus({}, 0)
    (('0', '1'), ('3', '1'), ())
    """
    listed = environment.get(VISIBLE)
    if listed is None or not present:
        return tuple(map(str, range(present)))
    names = [name.strip() for name in listed.split(",")]
    end = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))  # CUDA reads no further either
    return tuple(names[:end])


def launched_gpu(environment: Mapping[str, str], visible: Sequence[str]) -> str:
    """Names the GPU of one process of several that torchrun or srun started on a host; empty on the CPU, or when it
    is alone. Raises `ConfigError` for more processes than GPUs.

    >>> launched_gpu({"LOCAL_RANK": "1"}, ("4", "7")), launched_gpu({"SLURM_LOCALID": "1"}, ("4", "7"))
    ('7', '7')
    >>> launched_gpu({"SLURM_LOCALID": "3"}, ("3",)), launched_gpu({}, ("0", "1"))
    ('3', '')
    """
    number = environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", ""))
    if not number or not visible:
        return ""
    if len(visible) == 1:  # the launcher shows each process its own
        return visible[0]
    if int(number) >= len(visible):
        raise ConfigError(f"LOCAL_RANK: expected a number below the {len(visible)} GPUs of this host, got {number}")
    return visible[int(number)]


def gpus_present() -> list[int]:
    """Bytes of memory of each GPU that the installed torch can use; loads no torch."""
    found = find_spec("torch")
    assert found is not None
    assert found.origin is not None
    if runpy.run_path(str(Path(found.origin).with_name("version.py"))).get("cuda") is None:
        return []
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    count, memory = ctypes.c_uint(), list[int]()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    for index in range(count.value):
        gpu, sizes = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # total, free, used
        if not nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(gpu)):
            nvml.nvmlDeviceGetMemoryInfo(gpu, ctypes.byref(sizes))
        memory.append(int(sizes[0]))
    return memory


def gpu_bytes() -> int:
    """Memory of this machine's smallest GPU; 0 without one."""
    return min(gpus_present(), default=0)


def devices_of(config: Config, visible: Sequence[str] | None = None, *, trains: bool = True) -> Devices:
    """Assigns GPUs to the parts of a run, by default those that this process sees; `trains` is false without a trainer.

    Ranks take the first GPUs and engines the next. Raises `ConfigError` for too few, or for two ranks on one GPU.
    """
    visible = visible_gpus(os.environ, len(gpus_present())) if visible is None else visible
    engines = 0 if config.engine.urls else config.engine.count
    ranks = config.train.ranks if trains and config.cluster.trainer is None else 0
    chosen, own = config.engine.gpus, config.train.gpus if trains else []
    named = chosen if isinstance(chosen, list) else []
    device = config.model.device
    if device == "cuda" and not visible and engines + ranks:
        raise ConfigError(
            "model.device: expected a GPU that torch can use for 'cuda', got none; 'auto' takes the CPU then"
        )
    if device == "cpu" or not visible:
        if named or own:
            where = "model.device = 'cpu'" if device == "cpu" else "no GPU that torch can use"
            raise ConfigError(f"{'engine' if named else 'train'}.gpus: expected none with {where}, got {named or own}")
        if ranks and config.train.offload != "none":
            raise ConfigError(
                f"train.offload: expected 'none' without a GPU for the trainer, got {config.train.offload!r}; "
                "on a CPU Adam's moments are in main memory anyway"
            )
        return Devices()
    _check_numbers("engine.gpus", named, engines, "engine", visible)
    _check_numbers("train.gpus", own, ranks, "rank", visible)
    if len(set(own)) < len(own):
        raise ConfigError(f"train.gpus: expected one GPU per rank, got {own}")
    taken = own or _free(ranks, named, visible, config)
    if chosen == "shared":
        on = taken or range(len(visible))
        named = [on[i % len(on)] for i in range(engines)]
    placed = named or _free(engines, taken, visible, config)
    return Devices(tuple(visible[i] for i in placed), tuple(visible[i] for i in taken))


def _check_numbers(setting: str, numbers: Sequence[int], count: int, part: str, visible: Sequence[str]) -> None:
    if numbers and len(numbers) != count:
        raise ConfigError(f"{setting}: expected a GPU for each {part}, {count} in all, got {list(numbers)}")
    if any(number >= len(visible) for number in numbers):
        raise ConfigError(f"{setting}: expected numbers below {len(visible)}, the GPUs there are, got {list(numbers)}")


def _free(count: int, taken: Sequence[int], visible: Sequence[str], config: Config) -> list[int]:
    """Finds the first free GPUs. Raises `ConfigError` when there are too few."""
    free = [number for number in range(len(visible)) if number not in taken]
    if len(free) < count:
        raise ConfigError(
            f"engine.gpus, train.gpus: expected a GPU for each of {config.engine.count} engines and "
            f"{config.train.ranks} ranks, got {len(visible)}; engine.gpus = 'shared' puts engines on the trainer's GPUs"
        )
    return free[:count]
