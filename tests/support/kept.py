"""The SLO keeper beside a core on a virtual clock, as in the live engine."""

from typing import Any

from engine.api import RequestClass
from engine.colocation.keeper import Colocation
from engine.errors import RetryableError
from engine.virtual import VirtualDriver


class KeptDriver(VirtualDriver):
    """Reports online arrivals and steps to `keeper`."""

    def __init__(self, core: Any, *traffic: Any, keeper: Colocation, **options: Any) -> None:
        super().__init__(core, *traffic, **options)
        add, update = core.add_request, core.update

        def add_request(spec: Any, now: float) -> None:
            try:
                add(spec, now)
            except RetryableError:
                keeper.on_refused(spec.request_class, len(spec.prompt_token_ids), self.now, spec.promise)
                raise
            if spec.request_class is RequestClass.ONLINE:
                keeper.on_arrival(spec.request_class, self.now)
                if spec.promise is not None:
                    keeper.on_promise(spec, self.now)

        def update_and_tell(output: Any, result: Any, now: float) -> Any:
            outputs = update(output, result, now)
            keeper.on_step(output, result.latency, outputs, now)
            return outputs

        core.add_request, core.update = add_request, update_and_tell
