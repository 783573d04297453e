"""The step budget of tidemill as a scheduler class of vLLM: chats keep their promise, offline work fills what is left.

    vllm serve MODEL --scheduling-policy priority --scheduler-cls tidemill_vllm.Scheduler \
        --additional-config '{"tidemill": {"slo": "ttft_p99=1s,tbt_p99=100ms"}}'

A request with a priority above 0 is offline; any other is online.
"""

from typing import Any


def Scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the scheduler whose base fits the engine's loop. Raises ValueError for wrong options."""
    from tidemill_vllm.scheduler import make  # vLLM is imported by now

    return make(vllm_config, *args, **kwargs)
