"""A folder that stands first on PYTHONPATH in every process below `narrowgauge run`; it holds `sitecustomize` alone."""
