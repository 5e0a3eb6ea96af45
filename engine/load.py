"""From a model folder to a model that runs."""

from pathlib import Path
from typing import Final, Literal

import torch

from engine.limits import dtype_name
from engine.model_config import ModelConfig, read_model_config
from engine.models.decoder import Decoder
from engine.sharding import Share, share_of
from engine.weights import (
    Progress,
    check_weights,
    fill_with_dummies,
    load_weights,
    no_progress,
)
from gpu_ops.collectives import RankGroup

_DTYPES: Final = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def load_model(
    folder: Path,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    load_format: Literal["auto", "dummy"] = "auto",
    max_positions: int | None = None,
    seed: int = 0,
    group: RankGroup | None = None,
    progress: Progress = no_progress,
) -> tuple[ModelConfig, Decoder]:
    """The model in `folder`, loaded on `device` and ready to run.

    dtype          auto, float32, float16 or bfloat16
    max_positions  longest sequence, tokens; None: the checkpoint's own limit
    seed           of dummy weights
    group          the ranks that share the model, this one's part of which is loaded; None: all

    Raises ModelError for a checkpoint that is broken or not supported.
    """
    config = read_model_config(folder)
    with torch.inference_mode():
        if load_format != "dummy":
            shapes = outline(share_of(config), torch.float32, positions=1)
            check_weights(folder, shapes.destinations(), tied=config.tied)
        model = Decoder(
            share_of(config) if group is None else share_of(config, group.rank, group.size),
            dtype=resolve_dtype(dtype, config, torch.device(device)),
            device=device,
            max_positions=max_positions or config.max_positions,
            group=group,
        )
        if load_format == "dummy":
            fill_with_dummies(model.destinations(), seed, progress)
        else:
            load_weights(folder, model.destinations(), tied=config.tied, progress=progress)
        model.prepare_for_inference()
    return config, model


def outline(share: Share, dtype: torch.dtype, positions: int) -> Decoder:
    """The model without memory: names, shapes and sizes of its tensors."""
    return Decoder(share, dtype=dtype, device="meta", max_positions=positions)


def resolve_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype that `name` stands for, as `limits.dtype_name` says."""
    on_cpu, native = device.type == "cpu", _cpu_multiplies_bfloat16()
    return _DTYPES[dtype_name(name, config.dtype, on_cpu=on_cpu, cpu_bfloat16=native)]


def _cpu_multiplies_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
