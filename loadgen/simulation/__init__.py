"""Workloads through the engine's own core on a virtual clock: devices, runs, and the capacity planner."""
