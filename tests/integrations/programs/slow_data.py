"""Samples that take their time, and what a program waits for its batches by its own clock.

slept     how long the samples slept that were made meanwhile, by the clock too: never less than they should
waited    from before the next batch is asked for until it is there
"""

import json
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils.data import Dataset


class Slow(Dataset):
    """Samples of which each sleeps so long; how long it was is seen by every process, of whichever it was made in."""

    def __init__(self, samples, seconds=0.005):
        self.samples, self.seconds = samples, seconds
        self.slept = torch.zeros(len(samples), dtype=torch.float64).share_memory_()
        self.waits = []

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, n):
        began = time.perf_counter()
        time.sleep(self.seconds)
        self.slept[n] = time.perf_counter() - began
        return self.samples[n]

    def made(self, count):
        """Come back when so many samples have been made, by whoever makes them."""
        while self.slept.count_nonzero() < count:
            time.sleep(0.001)

    @contextmanager
    def waiting(self, *, first=True):
        """Batches are asked for inside of this, the `first` of a step or further ones."""
        slept, began = self.slept.sum().item(), time.perf_counter()
        yield
        waited = time.perf_counter() - began
        if first:
            self.waits.append({"slept": 0.0, "waited": 0.0})
        self.waits[-1]["slept"] += self.slept.sum().item() - slept
        self.waits[-1]["waited"] += waited


def write(waits, rank=0):
    Path(f"waits{rank}.json").write_text(json.dumps(waits))
