"""The server's instance groups applied to an engine: kind, count and device id. Runs before torch is imported.

    KIND_MODEL  the engine argument `device` decides
    KIND_CPU    the CPU
    KIND_GPU    the GPU the server assigned to this instance; an instance per GPU is a whole engine per GPU

Knows the server's arguments and the environment; imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, MutableMapping

from paged_backend.config import EngineConfig
from paged_backend.errors import ConfigError

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def claim_device(
    config: EngineConfig, args: Mapping[str, str], environ: MutableMapping[str, str] = os.environ
) -> EngineConfig:
    """The configuration for the instance being initialized with `args`; makes only its GPU visible to torch.

    Raises:
        ConfigError: the instance group does not fit the engine.
    """
    kind = args.get("model_instance_kind", "MODEL").removeprefix("KIND_")
    for group in json.loads(args["model_config"]).get("instance_group", []):
        if int(group.get("count", 1)) > 1:
            raise ConfigError(
                f"instance_group count {group['count']} in config.pbtxt: an engine batches its requests itself, so "
                "set count to 1",
                field="instance_group",
            )
    if kind == "CPU":
        return _with_device(config, "cpu", "KIND_CPU")
    if kind != "GPU":
        return config
    device_id = int(args.get("model_instance_device_id", "0"))
    visible = [name for name in environ.get(_VISIBLE, "").split(",") if name.strip()]
    if visible and device_id >= len(visible):
        message = f"instance_group names GPU {device_id}, but {_VISIBLE} shows {len(visible)}"
        raise ConfigError(message, field="instance_group")
    environ[_VISIBLE] = visible[device_id].strip() if visible else str(device_id)
    return _with_device(config, "cuda", "KIND_GPU")


def _with_device(config: EngineConfig, device: str, kind: str) -> EngineConfig:
    if config.device not in ("auto", device):
        message = f"engine argument `device` is {config.device}, but instance_group says {kind}: make them agree"
        raise ConfigError(message, field="device")
    return dataclasses.replace(config, device=device)
