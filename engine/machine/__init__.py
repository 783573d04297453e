"""The machine that the engine runs on: its facts, threads and processes of our own. Torch-free."""
