"""narrowgauge: train in FP8, watch every number, and know whether it was safe and worth it."""
