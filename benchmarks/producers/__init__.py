"""Quantizing where a tensor is made: behind a norm, a SwiGLU, or its gradient."""
