"""The flight recorder: the last steps of an engine, in memory and on disk."""
