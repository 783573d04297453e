"""What runs on processors alone."""
