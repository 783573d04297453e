"""What is told of requests and of the server: accounts, metrics, the request log, traces."""
