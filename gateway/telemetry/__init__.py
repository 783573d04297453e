"""Observability: measurements of requests, Prometheus metrics, the request log and traces."""
