"""Without vLLM only the tests of the planner, the promises and the HTTP part run; `check.sh` runs all."""

import os
from importlib.util import find_spec

collect_ignore = [] if find_spec("vllm") else ["simulated.py", "test_policy.py", "test_scheduler.py"]
if not collect_ignore:  # vLLM reads these at import
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": ""}
