"""A text that every Python has, as tokens: one per character; and where to train on it."""

import inspect
import os
import textwrap

import torch


def pieces(length=32, count=64):
    """[count, length] token ids below 128; a longer training has COUNT of them."""
    count = int(os.environ.get("COUNT", count))
    codes = torch.tensor([ord(c) % 128 for c in inspect.getsource(textwrap)])
    return codes[: length * count].reshape(count, length)


def place():
    """This rank's device: the CPU, or a GPU of its own where DEVICE says "cuda"."""
    if os.environ.get("DEVICE", "cpu") == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())
