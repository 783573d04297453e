"""The packaged demo model `tidemill-demo`; `benchmarks/demo_training` makes its weights."""
