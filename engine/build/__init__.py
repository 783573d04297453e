"""The composition root: build a plan, a runner and an Engine from a configuration.

`plan_launch` decides everything that does not need the weights. `build_engine` loads the weights and connects the
parts. Apart from `engine.engine`, only this package imports both the scheduler and the model execution.
"""

from engine.build.join import build_engine as build_engine
from engine.build.join import profile_key as profile_key
from engine.build.join import stored_profile as stored_profile
from engine.build.plan import READ_TOGETHER as READ_TOGETHER
from engine.build.plan import host_bytes as host_bytes
from engine.build.plan import local_config as local_config
from engine.build.plan import plan_launch as plan_launch
from engine.build.plan import profile_folder as profile_folder
from engine.build.plan import resolve_model as resolve_model
from engine.build.plan import scheduler_config as scheduler_config
from engine.build.runner import build_runner as build_runner
from engine.colocation.waits import slo_warning as slo_warning
