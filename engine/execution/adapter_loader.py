"""LoRA adapters that come and go while an engine runs: an `engine.adapters.AdapterLoader`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from engine.adapters import AdapterFiles, NamedFolder, stamp_of
from engine.errors import ModelLoadError
from engine.execution.runner import Device
from engine.machine.free_memory import available_memory
from engine.models.lora import AdapterPlan, Delta, Site, load_adapter, plan_adapter
from engine.models.spec import ModelShape
from engine.models.transformers_model import TransformersModel

Read = tuple[AdapterPlan, Mapping[Site, Delta]]


class RuntimeAdapters:
    """For a model on `device`; `modules` where transformers' run it. `like`: a weight, for type and device."""

    def __init__(self, device: Device, shape: ModelShape, like: Tensor, modules: TransformersModel | None) -> None:
        self._device, self._shape, self._like, self._modules = device, shape, like, modules

    def read(self, adapter: AdapterFiles) -> Read:
        """See AdapterLoader. Raises ModelLoadError."""
        name, folder = adapter.name, Path(adapter.folder)
        try:
            if adapter.stamp and stamp_of(folder) != adapter.stamp:
                raise ModelLoadError(f"adapter {name}: other files lie in {folder} than when it was loaded")
            plan = plan_adapter(NamedFolder(name, folder), self._shape)
            if self._like.device.type == "cpu" and 4 * plan.num_parameters > available_memory():
                raise ModelLoadError(f"adapter {name}: its {plan.num_parameters} numbers do not fit into memory")
            deltas = load_adapter(plan, self._shape, self._like)
            if self._like.is_cuda:  # steps run on another stream
                torch.cuda.current_stream(self._like.device).synchronize()
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"adapter {name}: {folder} cannot be read: {error}") from None
        except (MemoryError, torch.OutOfMemoryError):
            raise ModelLoadError(f"adapter {name} does not fit into memory") from None
        return plan, deltas

    def put(self, number: int, matrices: Any) -> None:
        """See AdapterLoader. Raises ModelLoadError."""
        plan, deltas = matrices
        if self._modules is not None:
            self._modules.take_adapters([plan])
        self._device.adapt(number, deltas)

    def drop(self, number: int) -> None:
        """See AdapterLoader."""
        lane = self._device.lane
        with lane.use():
            lane.mark().synchronize()  # a step of a request that has ended since may still read it
        self._device.adapters.drop(number)
