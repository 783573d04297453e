"""The engine in a process of its own: what is said between the two, the child, and its supervisor."""
