"""Endpoints that run the model: request parsing, planning and response formats."""
