"""HTTP layers common to all endpoints: connections, hosts, API keys, quotas, JSON, errors and event streams."""
