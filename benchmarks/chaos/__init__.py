"""Break a server of the demo model in every known way and check its promises. `make chaos`."""
