"""The planner, the watchdogs and the fault log of the engine's loop."""
