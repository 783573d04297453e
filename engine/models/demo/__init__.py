"""The packaged demo model ``tidemill-demo``: its text, its training script and its weights."""
