"""Where the past of a request lives: the unified unit pool, cache maps and the prefix index; torch-free."""
