"""Filling a model's tensors from safetensors files, or with random numbers.

Guarantees
- One checkpoint tensor is in memory at a time beside the model.
- Every tensor of the model is filled exactly once with a tensor of its shape, or ModelError names
  the one that is not.

Assumes nothing of the model but `name → where the tensor goes`.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelError

Tensor = torch.Tensor
Progress = Callable[[int, int], None]  # bytes of checkpoint read so far, and in all
Slice = Callable[[str, Tensor], Tensor]  # what of a checkpoint's tensor this rank keeps

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
# In some checkpoints though no model needs them: recomputed tables, a tied output layer.
_RECOMPUTED_SUFFIX: Final = ".rotary_emb.inv_freq"
_TIED_HEAD: Final = "lm_head.weight"


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
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{index} cannot be read: {error!r}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map must be a non-empty object")
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index}: weight_map must name files")
    return weight_map


def load_weights(
    folder: Path,
    destinations: Mapping[str, Tensor],
    *,
    tied: bool,
    progress: Progress = no_progress,
    take: Slice | None = None,
) -> None:
    """Copies the checkpoint into `destinations`, converting to their dtype.

    tied  the checkpoint may repeat the output layer, which is then passed over
    take  maps (name, tensor) to the part that this rank keeps; None keeps all

    Raises ModelError naming the tensor that is missing, unexpected, repeated or of another shape.
    """
    files = checkpoint_files(folder)
    total_bytes = sum(file.stat().st_size for file in files)
    done_bytes = 0
    filled: set[str] = set()
    for file in files:
        for name, tensor in _tensors(file):
            done_bytes += tensor.nbytes
            if name.endswith(_RECOMPUTED_SUFFIX) or (tied and name == _TIED_HEAD):
                continue
            if name in filled:
                raise ModelError(f"{file}: {name} is in the checkpoint twice")
            _fill(destinations, name, take(name, tensor) if take else tensor, file)
            filled.add(name)
            progress(min(done_bytes, total_bytes), total_bytes)
    missing = [name for name in destinations if name not in filled]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{folder}: the checkpoint lacks {missing[0]}{more}")
    progress(total_bytes, total_bytes)


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:  # type: ignore[no-untyped-call]
            for name in opened.keys():
                yield name, opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _fill(destinations: Mapping[str, Tensor], name: str, tensor: Tensor, file: Path) -> None:
    destination = destinations.get(name)
    if destination is None:
        raise ModelError(f"{file}: {name} is not a tensor of this model")
    if destination.shape != tensor.shape:
        raise ModelError(
            f"{file}: {name} is {[*tensor.shape]}; config.json makes it {[*destination.shape]}"
        )
    if not tensor.is_floating_point():
        raise ModelError(f"{file}: {name} is {tensor.dtype}, which is not supported")
    destination.copy_(tensor)


def fill_with_dummies(
    destinations: Mapping[str, Tensor], seed: int, progress: Progress = no_progress
) -> None:
    """Random weights of a plausible size; the same for the same seed, name, shape and device.

    For tests and speed runs: norms are 1 and the rest is normal with deviation 0.02.
    """
    total_bytes = sum(tensor.nbytes for tensor in destinations.values())
    done_bytes = 0
    for name, tensor in destinations.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            generator = torch.Generator(tensor.device)
            generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            tensor.normal_(0.0, 0.02, generator=generator)
        done_bytes += tensor.nbytes
        progress(done_bytes, total_bytes)
