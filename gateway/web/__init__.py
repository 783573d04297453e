"""The web dashboard at `/`: static files, history and live events."""
