"""Engines that can stand side by side on one machine: how each is found, started and spoken to."""
