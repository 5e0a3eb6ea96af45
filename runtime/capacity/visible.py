"""Which of the machine's GPUs a process sees: NVML knows them all, CUDA those it was left."""

from collections.abc import Mapping, Sequence

from runtime.capacity.gpu import Gpu


def visible_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order; what it names wrongly ends the list, as
    for CUDA itself.

    Numbers are taken as NVML counts: CUDA's own order, too, under CUDA_DEVICE_ORDER=PCI_BUS_ID, and
    wherever all GPUs are of one kind.
    """
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return tuple(gpus)
    found: list[Gpu] = []
    for name in (each.strip() for each in named.split(",")):
        gpu = next((g for g in gpus if name and _is_named(g, name)), None)
        if gpu is None:
            break
        found.append(gpu)
    return tuple(found)


def _is_named(gpu: Gpu, name: str) -> bool:
    if name.isdecimal():
        return gpu.index == int(name)
    return gpu.uuid is not None and gpu.uuid.startswith(name)
