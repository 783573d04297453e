"""Experiments of the papers as commands: checked-in configuration, replayed on the virtual clock."""
