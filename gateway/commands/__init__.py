"""What the commands of `gateway.cli` do; each is imported when it runs."""
