"""What every request passes, whatever it asks for: the connection, names, keys, limits, errors, streams."""
