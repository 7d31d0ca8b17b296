"""CUDA devices for fake tensors in a torch that was built without CUDA.

torch makes a guard of CUDA's devices for fake tensors only where CUDA was compiled in, and FSDP asks `torch.cuda` for
streams. Parts of `torch.cpu` stand for these. Backward passes on such devices still need a torch with CUDA.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

import torch

CUDA = 1
REGISTRAR = "_ZN3c104impl24DeviceGuardImplRegistrarC1ENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"


class Event:
    """Event that has always happened."""

    def record(self, stream: object = None) -> "Event":
        return self

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...


@contextmanager
def cuda_of_fakes() -> Iterator[None]:
    """`cuda` is a device of fake tensors inside."""
    if torch.backends.cuda.is_built():
        yield
        return
    guard_cuda()
    cpu = torch.cpu
    stand_ins = {"current_stream": cpu.current_stream, "stream": cpu.stream, "Stream": cpu.Stream, "Event": Event}
    with mock.patch.multiple(torch.cuda, current_device=lambda: 0, **stand_ins):
        yield


@cache
def guard_cuda() -> tuple[object, ...]:
    """Has torch make its guard without operations, as it does where CUDA has no device; returns what must live on."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    zero = ctypes.CFUNCTYPE(ctypes.c_long)(lambda: 0)
    address = ctypes.cast(zero, ctypes.c_void_p).value
    table = (ctypes.c_void_p * 64)(*[address] * 64)  # a guard whose every answer is 0, such as its number of devices
    guard = ctypes.c_void_p(ctypes.addressof(table))
    getattr(library, REGISTRAR)(ctypes.create_string_buffer(16), ctypes.c_int8(CUDA), ctypes.byref(guard))
    torch._C._ensureCUDADeviceGuardSet()  # type: ignore[attr-defined]
    return zero, table, guard
