"""What the engine's loop is watched and helped by."""
