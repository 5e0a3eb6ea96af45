"""Kernels from cubins, launched through the driver: a launch is one ctypes call, about 3 µs.

Every kernel here is launched with programmatic dependent launch: its blocks may start while the
kernel before it in the stream drains. Three rules make that safe, and each source in csrc/ keeps
them. Every block calls `wait_for_previous()`, and `let_next_start()` only after it: so when a
kernel's first block starts, all that ran two or more kernels ago has ended. Before that wait a
kernel writes nothing, and reads only what such earlier kernels wrote.
"""

import ctypes
import functools
import struct
import threading
from collections.abc import Mapping
from typing import Final

import torch

from gpu_ops.cuda_compile import compiled
from gpu_ops.rows_copy import RowsCopy

_CLUSTER_DIMENSION: Final = 4  # CUlaunchAttributeID
_PROGRAMMATIC_STREAM_SERIALIZATION: Final = 6
_MAX_DYNAMIC_SHARED: Final = 8  # CUfunction_attribute
_UNIFIED: Final = 4  # CUmemorytype: the address says whose it is
_MOST_PITCH: Final = 2**31 - 1  # CU_DEVICE_ATTRIBUTE_MAX_PITCH of every device there is
_BYTES_OF: Final = {"T": "128s", "A": "64s"}  # parameters that are handed over as bytes


class CudaError(RuntimeError):
    """The driver refused a call."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("_pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@functools.cache
def driver() -> ctypes.CDLL:
    """The CUDA driver's library."""
    return ctypes.CDLL("libcuda.so.1")


def check(status: int, what: str) -> None:
    """Raises CudaError where a driver call's status is not success."""
    if status:
        message = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(message))
        text = message.value.decode() if message.value else "?"
        raise CudaError(f"{what}: error {status}, {text}")


@functools.cache
def _attributes(overlap: bool, cluster: int) -> "ctypes.Array[_Attribute]":
    values: list[tuple[int, tuple[int, ...]]] = []
    if overlap:
        values.append((_PROGRAMMATIC_STREAM_SERIALIZATION, (1,)))
    if cluster > 1:
        values.append((_CLUSTER_DIMENSION, (cluster, 1, 1)))
    attributes = (_Attribute * len(values))()
    for attribute, (name, words) in zip(attributes, values, strict=True):
        attribute.id = name
        attribute.value[: len(words)] = words
    return attributes


class Kernel:
    """One `extern "C"` kernel of a program. Safe from any thread once built.

    Holds its parameters' layout: `parameters` has a letter each, P pointer, i int32, q int64,
    f float32, T tensor map (128 bytes), A eight addresses (64 bytes), in the order of the kernel's
    signature; T and A before all others.
    """

    def __init__(self, library: ctypes.c_void_p, name: str, parameters: str) -> None:
        self.name = name
        formats = [_BYTES_OF.get(letter, letter) for letter in parameters]
        self._layout = struct.Struct("@" + "".join(formats))
        self._offsets = [
            struct.calcsize("@" + "".join(formats[: i + 1])) - struct.calcsize("@" + formats[i])
            for i in range(len(formats))
        ]
        self._handle = ctypes.c_void_p()
        self._own = _OwnLaunch()
        get = driver().cuLibraryGetKernel
        check(get(ctypes.byref(self._handle), library, name.encode()), name)

    def allow_shared(self, shared_bytes: int) -> "Kernel":
        """Raises the limit of dynamic shared memory on the current device; returns itself."""
        device = ctypes.c_int()
        check(driver().cuCtxGetDevice(ctypes.byref(device)), self.name)
        set_attribute = driver().cuKernelSetAttribute
        status = set_attribute(_MAX_DYNAMIC_SHARED, shared_bytes, self._handle, device)
        check(status, f"{self.name}: {shared_bytes} bytes of shared memory")
        return self

    def launch(
        self,
        grid: tuple[int, int],
        threads: int,
        *arguments: int | float | bytes,
        shared_bytes: int = 0,
        overlap: bool = True,
        cluster: int = 1,
    ) -> None:
        """Launches on torch's current stream; does not synchronise; capturable.

        overlap  False where it reads, before its wait, what the kernel just launched writes
        cluster  blocks of the grid's first dimension to a cluster

        Raises CudaError.
        """
        bound = self._own.launch
        if bound is None:
            bound = self._own.launch = BoundLaunch(
                self.name, self._handle, self._layout, self._offsets
            )
        bound.settle(grid, threads, arguments, shared_bytes, overlap, cluster)
        bound(torch.cuda.current_stream().cuda_stream)

    def bind(
        self,
        grid: tuple[int, int],
        threads: int,
        *arguments: int | float | bytes,
        shared_bytes: int = 0,
        overlap: bool = True,
        cluster: int = 1,
    ) -> "BoundLaunch":
        """What `launch` would do, to be done any number of times; the arguments stay valid."""
        bound = BoundLaunch(self.name, self._handle, self._layout, self._offsets)
        bound.settle(grid, threads, arguments, shared_bytes, overlap, cluster)
        return bound


class BoundLaunch:
    """A launch whose arguments are settled: one driver call each time. Owned by one thread.

    Making one costs several times what settling it again does: the driver copies all it is given
    during the call, so the buffers may be written anew right after.
    """

    def __init__(
        self, name: str, handle: ctypes.c_void_p, layout: struct.Struct, offsets: list[int]
    ) -> None:
        self._name, self._layout, self._config = name, layout, _Config()
        self._packed = ctypes.create_string_buffer(layout.size)  # kept alive, as is the config
        base = ctypes.addressof(self._packed)
        pointers = (ctypes.c_void_p * len(offsets))(*[base + at for at in offsets])
        self._arguments = ctypes.byref(self._config), handle, pointers, None
        self._launch = driver().cuLaunchKernelEx
        self._config.grid[2] = 1
        self._config.block[1] = self._config.block[2] = 1

    def settle(
        self,
        grid: tuple[int, int],
        threads: int,
        arguments: tuple[int | float | bytes, ...],
        shared_bytes: int,
        overlap: bool,
        cluster: int,
    ) -> None:
        """As `Kernel.launch` takes them."""
        self._layout.pack_into(self._packed, 0, *arguments)
        config, attributes = self._config, _attributes(overlap, cluster)
        config.grid[0], config.grid[1] = grid
        config.block[0] = threads
        config.shared_bytes = shared_bytes
        config.attributes, config.attribute_count = attributes, len(attributes)

    def __call__(self, stream: int) -> None:
        """Launches on the stream with this handle. Raises CudaError."""
        self._config.stream = stream
        check(self._launch(*self._arguments), self._name)


class _OwnLaunch(threading.local):
    """The launch that a thread settles anew each time, for one kernel."""

    launch: BoundLaunch | None = None


def copy_no_sync(to: int, source: int, size_bytes: int, stream: int) -> None:
    """Copies between two addresses, of a device or of pinned memory, on a stream.

    Raises CudaError.
    """
    call = driver().cuMemcpyAsync
    check(
        call(_pointer(to), _pointer(source), ctypes.c_size_t(size_bytes), _pointer(stream)), "copy"
    )


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D: either side is host memory or an address of the device."""

    _fields_ = (
        *(("source_x", ctypes.c_size_t), ("source_y", ctypes.c_size_t)),
        *(("source_type", ctypes.c_int), ("source_host", ctypes.c_void_p)),
        *(("source_device", ctypes.c_void_p), ("source_array", ctypes.c_void_p)),
        *(("source_pitch", ctypes.c_size_t),),
        *(("to_x", ctypes.c_size_t), ("to_y", ctypes.c_size_t)),
        *(("to_type", ctypes.c_int), ("to_host", ctypes.c_void_p)),
        *(("to_device", ctypes.c_void_p), ("to_array", ctypes.c_void_p)),
        *(("to_pitch", ctypes.c_size_t),),
        *(("width", ctypes.c_size_t), ("rows", ctypes.c_size_t)),
    )


def copy_rows_no_sync(copy: RowsCopy, stream: int) -> None:
    """Copies between a device and pinned memory, on a stream.

    One call, unless the rows are too far apart for the driver. Raises CudaError.
    """
    if max(copy.to_pitch, copy.source_pitch) > _MOST_PITCH:
        for to, source in copy.addresses():
            copy_no_sync(to, source, copy.width, stream)
        return
    both = _Copy2D(
        source_type=_UNIFIED, source_device=copy.source, source_pitch=copy.source_pitch,
        to_type=_UNIFIED, to_device=copy.to, to_pitch=copy.to_pitch, width=copy.width,
        rows=copy.rows,
    )  # fmt: skip
    check(driver().cuMemcpy2DAsync_v2(ctypes.byref(both), _pointer(stream)), "copy of rows")


def pin_memory(address: int, size_bytes: int) -> None:
    """Pins host memory, so that copies to and from it need no host. Raises CudaError."""
    call = driver().cuMemHostRegister_v2
    check(call(_pointer(address), ctypes.c_size_t(size_bytes), 0), f"pinning {size_bytes} bytes")


def unpin_memory(address: int) -> None:
    """Takes `pin_memory` back. Raises CudaError."""
    check(driver().cuMemHostUnregister(_pointer(address)), "unpinning")


_pointer = ctypes.c_void_p


@functools.cache
def _library(source: str, arch: str, macros: tuple[tuple[str, int], ...]) -> ctypes.c_void_p:
    return load_cubin(compiled(source, arch, dict(macros)), source)


def load_cubin(cubin: bytes, what: str) -> ctypes.c_void_p:
    """The driver's handle of machine code. Raises CudaError."""
    library = ctypes.c_void_p()
    load = driver().cuLibraryLoadData
    check(load(ctypes.byref(library), cubin, None, None, 0, None, None, 0), f"load {what}")
    return library


def kernel(
    source: str, name: str, parameters: str, macros: Mapping[str, int], *, own_arch: bool = False
) -> Kernel:
    """Kernel `name` of csrc/`source`, compiled for the current device's architecture.

    own_arch  with the instructions that only this architecture has (sm_90a)

    Slow the first time (a compilation, or a read of the cache): callers keep the result.
    """
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}" + ("a" if own_arch else "")
    library = _library(source, arch, tuple(sorted(macros.items())))
    return Kernel(library, name, parameters)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many SMs the device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count
