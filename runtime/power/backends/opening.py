"""Opens the power backend of every GPU of a host, as the config says; nobody else chooses."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Sequence
from typing import Any, Literal

from runtime.config import Config
from runtime.power.backends.absent import AbsentGpu
from runtime.power.backends.dry_run import DryRun
from runtime.power.backends.nvml import NvmlGpu
from runtime.power.emulated import EmulatedDevice
from runtime.power.port import PowerBackend, PowerError

VISIBLE = "CUDA_VISIBLE_DEVICES"
Kind = Literal["emulated", "nvml", "nvml_read_only", "dry_run"]
_LOG = logging.getLogger(__name__)


def backend_kind(config: Config) -> Kind:
    """The backend that "auto" stands for, else the one that is named."""
    if config.power.backend == "auto":
        return "emulated" if config.cluster.device == "emulated" else "nvml"
    return config.power.backend


def open_backends(
    config: Config,
    gpus: Sequence[str],
    devices: dict[str, EmulatedDevice],
    nvml: Any = None,
) -> dict[str, PowerBackend]:
    """A backend for each of a host's GPUs, by GPU id.

    Args:
        gpus: GPU ids in slot order; the k-th real one is the k-th device that CUDA would see.
        devices: the emulated devices by GPU id; {} on real ones.
        nvml: the module `pynvml`, or one that speaks its interface; None imports it.
    """
    kind = backend_kind(config)
    if devices:
        if kind == "dry_run":
            return {gpu: DryRun(gpu, devices[gpu]) for gpu in gpus}
        return {gpu: devices[gpu] for gpu in gpus}
    module = importlib.import_module("pynvml") if nvml is None else nvml
    visible = visible_indices(os.environ.get(VISIBLE), len(gpus))
    opened: dict[str, PowerBackend] = {}
    for gpu, index in zip(gpus, visible, strict=True):
        try:
            found = NvmlGpu(
                module,
                index,
                normal_w=config.power.normal_cap_w,
                read_only=kind in ("nvml_read_only", "dry_run"),
            )
        except PowerError as error:
            _LOG.warning("%s: its power is neither read nor set: %s", gpu, error)
            normal_w = config.power.normal_cap_w or config.emulated.normal_cap_w
            opened[gpu] = AbsentGpu(str(error), normal_w)
        else:
            opened[gpu] = DryRun(gpu, found) if kind == "dry_run" else found
    return opened


def visible_indices(visible: str | None, num: int) -> list[int]:
    """NVML indices of the first `num` devices CUDA sees. Only plain numbers count; ids by UUID or
    MIG instance leave the order as NVML has it."""
    named = [part.strip() for part in (visible or "").split(",")]
    if visible and all(part.isdigit() for part in named) and len(named) >= num:
        return [int(part) for part in named[:num]]
    return list(range(num))
