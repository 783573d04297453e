"""What runs in a step: the ledger, the scheduler and its policies; torch-free."""
