"""What the gateway keeps across restarts: rows in a database, bodies in files."""
