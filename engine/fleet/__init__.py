"""Several engines behind one client: which of them a request goes to, and what becomes of it when that one dies."""
