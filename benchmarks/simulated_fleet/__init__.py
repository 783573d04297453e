"""Fleets of simulated engines behind a router or with layers dropped under overload, on one virtual clock."""
