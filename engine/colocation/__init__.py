"""Keeps the SLO beside offline work: judges requests, learns step times, drives the breaker and looks for budgets."""
