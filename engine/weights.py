"""Filling a model's tensors from safetensors files, or with random numbers.

Guarantees
- One checkpoint tensor is in memory at a time beside the model, and only the part that is needed.
- What `check_weights` accepts fills every tensor of the model exactly once, with one of its shape.

Assumes nothing of the model but `name → where the tensor goes`.
"""

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from engine.destination import Destination
from engine.errors import ModelError

Places = Mapping[str, Destination]
Progress = Callable[[int, int], None]  # bytes of checkpoint read so far, and in all

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
# In some checkpoints though no model needs them: recomputed tables, a tied output layer.
_RECOMPUTED_SUFFIX: Final = ".rotary_emb.inv_freq"
_TIED_HEAD: Final = "lm_head.weight"
_DTYPES: Final = ("F32", "BF16", "F16")  # as safetensors names them; a scaled one would need more


def no_progress(done_bytes: int, all_bytes: int) -> None:
    """For callers that show none."""


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, in order. Raises ModelError where one is missing."""
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if index.exists():
        names = sorted(set(_weight_map(index).values()))
        files = [folder / name for name in names]
    elif single.exists():
        files = [single]
    else:
        raise ModelError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}")
    for file in files:
        if file.parent != folder or not file.is_file():
            raise ModelError(f"{file} is named by {index.name} but is no file in {folder}")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{index} cannot be read: {error!r}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map must be a non-empty object")
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index}: weight_map must name files")
    return weight_map


def load_weights(
    folder: Path,
    destinations: Places,
    *,
    tied: bool,
    progress: Progress = no_progress,
) -> None:
    """Copies the checkpoint into `destinations`, converting to their dtype.

    Reads what has a destination and, of tensors that are divided among ranks, this rank's part.

    tied  the checkpoint may repeat the output layer, which is then passed over

    Raises ModelError as `check_weights` does, which looks at all that can be known beforehand.
    """
    files = checkpoint_files(folder)
    total_bytes = sum(file.stat().st_size for file in files)
    done_bytes = 0
    for file in files:
        with _opened(file) as tensors:
            for name in tensors.keys():
                destination = destinations.get(name)
                if destination is None or not _is_needed(name, tied):
                    continue
                whole = tensors.get_slice(name)
                tensor = whole[destination.part]
                destination.tensor.copy_(tensor)
                done_bytes += math.prod(whole.get_shape()) * tensor.itemsize
                progress(min(done_bytes, total_bytes), total_bytes)
    progress(total_bytes, total_bytes)


def check_weights(folder: Path, destinations: Places, *, tied: bool) -> None:
    """Holds the files' headers against `destinations`, which may be on any device, meta included.

    Raises ModelError naming the tensor that is missing, unexpected, repeated or of another shape or
    dtype, or the file that is missing or cut off.
    """
    found: dict[str, Path] = {}
    for file in checkpoint_files(folder):
        with _opened(file) as tensors:
            for name in tensors.keys():
                if not _is_needed(name, tied):
                    continue
                if name in found:
                    raise ModelError(f"{file}: {name} is in the checkpoint twice")
                header = tensors.get_slice(name)
                _check(file, name, header.get_shape(), header.get_dtype(), destinations)
                found[name] = file
    missing = [name for name in destinations if name not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{folder}: the checkpoint lacks {missing[0]}{more}")


def _is_needed(name: str, tied: bool) -> bool:
    return not (name.endswith(_RECOMPUTED_SUFFIX) or (tied and name == _TIED_HEAD))


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """The open safetensors file. Raises ModelError where it is none, or is cut off."""
    try:
        with safe_open(file, framework="pt") as tensors:  # type: ignore[no-untyped-call]
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _check(file: Path, name: str, shape: list[int], dtype: str, destinations: Places) -> None:
    destination = destinations.get(name)
    if destination is None:
        raise ModelError(f"{file}: {name} is not a tensor of this model")
    if [*destination.shape] != shape:
        raise ModelError(f"{file}: {name} is {shape}; config.json makes it {[*destination.shape]}")
    if dtype not in _DTYPES:
        raise ModelError(f"{file}: {name} is {dtype}; supported are {', '.join(_DTYPES)}")


def fill_with_dummies(destinations: Places, seed: int, progress: Progress = no_progress) -> None:
    """Random weights of a plausible size; the same for the same seed, name, shape and device.

    For tests and speed runs: norms are 1 and the rest is normal with deviation 0.02. Ranks get
    their parts of the same weights.
    """
    total_bytes = sum(destination.tensor.nbytes for destination in destinations.values())
    done_bytes = 0
    for name, destination in destinations.items():
        tensor = destination.tensor
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            generator = torch.Generator(tensor.device)
            generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            whole = tensor if destination.is_whole else tensor.new_empty(destination.shape)
            whole.normal_(0.0, 0.02, generator=generator)
            if whole is not tensor:
                tensor.copy_(whole[destination.part])
        done_bytes += tensor.nbytes
        progress(done_bytes, total_bytes)
