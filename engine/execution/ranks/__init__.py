"""One model on several ranks: processes with a part of each layer, which take every step together."""
