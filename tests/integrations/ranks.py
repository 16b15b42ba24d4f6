"""Starts so many ranks of a script on this machine, as torchrun does, but by forks: what is loaded is loaded once.

python ranks.py COUNT PORT SCRIPT ARGS          exits with the first code that is not 0, and ends the other ranks
"""

import os
import runpy
import signal
import sys
from pathlib import Path


def main(count, port, script, *arguments):
    ranks = {}
    for rank in range(int(count)):
        child = os.fork()
        if not child:
            here = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            os.environ.update(here, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            sys.argv[:] = [script, *arguments]
            sys.path[0] = str(Path(script).resolve().parent)
            # What the program had lives on to the end of the process. DDP waits, as it is taken apart, with Python's
            # lock for gloo's threads, which may wait for that lock: a program alone hung 4 times of 60 (torch 2.13).
            sys.modules["__main__"].ended = runpy.run_path(script, run_name="__main__")
            return
        ranks[child] = rank
    while ranks:
        child, status = os.wait()
        del ranks[child]
        if code := os.waitstatus_to_exitcode(status):
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit(abs(code))


if __name__ == "__main__":
    main(*sys.argv[1:])
