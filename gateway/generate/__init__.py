"""Endpoints that ask the model: from a body to a plan, from tokens to an answer."""
