"""Several engines behind one client: routing of requests, and failover when an engine dies."""
