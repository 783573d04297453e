"""Scheduling: decides the content of each step. Torch-free."""
