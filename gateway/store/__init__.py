"""Persistent state of the gateway: rows in a database, bodies in files."""
