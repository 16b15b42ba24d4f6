"""What is marked for torch's compiler is marked without loading it."""

import subprocess
import sys

import torch

from narrowgauge.compute.nn.tracing.marks import constant

NEEDED = "import narrowgauge.compute.nn, narrowgauge.session.process.live, sys; print('torch._dynamo' in sys.modules)"


def test_a_watched_program_loads_no_compiler_that_it_does_not_use():
    assert subprocess.run([sys.executable, "-c", NEEDED], capture_output=True, text=True).stdout == "False\n"


def test_a_constant_is_marked_as_the_compiler_marks_it():
    def ours():
        return 1

    def theirs():
        return 1

    assert vars(constant(ours)) == vars(torch.compiler.assume_constant_result(theirs))
