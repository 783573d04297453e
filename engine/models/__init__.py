"""Model specifications, the one decoder that covers the supported families, and weight loading."""
