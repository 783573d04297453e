"""The page at `/`: its files, the events that it follows and the history that it begins with."""
