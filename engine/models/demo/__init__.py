"""The packaged demo model ``tidemill-demo``: its weights, and how they are made (`training/`, not in the wheel)."""
