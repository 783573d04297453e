"""The engine: a torch-free scheduling core and the data plane that executes its decisions."""

__version__ = "0.1.0"  # the one place: a source tree has no distribution to ask
