"""A file of 200 tensors costs about as much memory as its largest one: measured in a process of its own."""

import sys

import pytest
import torch
from safetensors.torch import save_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]
LARGEST = 24  # MiB
WHOLE = 199 / 2 + LARGEST

# What a process holds: pages of its own, and mapped pages of files. Before it is measured, one look at a small file
# loads whatever is loaded once.
MEASURE = """
import sys, threading, time
from pathlib import Path
from narrowgauge.observe.inspect import inspect, open_checkpoint

def held(field):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":")]
    return int(line.split()[1]) / 1024

small, large, field = sys.argv[1:]
inspect(open_checkpoint(Path(small)))
before = most = held(field)
done = False

def watch():
    global most
    while not done:
        most = max(most, held(field))
        time.sleep(0.002)

watcher = threading.Thread(target=watch)
watcher.start()
seen = inspect(open_checkpoint(Path(large)))
done = True
watcher.join()
assert len(seen.rows) == 200
print(most - before)
"""


def growth(warm_python, small, large, field):
    (small.parent / "measure.py").write_text(MEASURE)
    done = warm_python.run([sys.executable, "measure.py", small, large, field], cwd=small.parent)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def tensors():
    many = {f"layers.{i}.weight": torch.randn(256, 512) for i in range(199)}  # half a MiB each
    return many | {"embed.weight": torch.randn(LARGEST * 512, 512)}


def test_a_safetensors_file(warm_python, tmp_path):
    save_file({"w": torch.randn(64, 64)}, tmp_path / "small.safetensors")
    save_file(tensors(), tmp_path / "large.safetensors")
    grown = growth(warm_python, tmp_path / "small.safetensors", tmp_path / "large.safetensors", "VmRSS")
    assert LARGEST / 2 < grown < WHOLE / 2


def test_a_torch_checkpoint(warm_python, tmp_path):
    # Of a mapped file the system drops pages whenever it likes; what must stay small is what it cannot drop.
    torch.save({"w": torch.randn(64, 64)}, tmp_path / "small.pt")
    torch.save({"model": tensors()}, tmp_path / "large.pt")
    assert growth(warm_python, tmp_path / "small.pt", tmp_path / "large.pt", "RssAnon") < WHOLE / 2
