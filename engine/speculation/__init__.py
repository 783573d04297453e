"""Draft tokens without a draft model, and how often they are accepted. Control plane: no torch, no asyncio."""
