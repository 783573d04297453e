"""The engine: a torch-free scheduling core and the data plane that executes its decisions."""
