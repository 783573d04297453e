"""The packaged demo model `tidemill-demo` (README.md says how it was trained)."""
