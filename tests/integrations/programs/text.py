"""A text that every Python has, as tokens: one per character."""

import inspect
import textwrap

import torch


def pieces(length=32, count=64):
    """[count, length] token ids below 128."""
    codes = torch.tensor([ord(c) % 128 for c in inspect.getsource(textwrap)])
    return codes[: length * count].reshape(count, length)
