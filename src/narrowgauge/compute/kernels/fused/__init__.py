"""Triton kernels that quantize: the reference's numbers, bit for bit, from one read of the tensor."""
