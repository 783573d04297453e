"""Break a server of the demo model and check its promises. `make chaos`."""
