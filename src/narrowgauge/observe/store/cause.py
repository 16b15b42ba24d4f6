"""Why writing failed, in plain words: what stands in run.json, a warning and the report.

OSError       by its number
DuckDB's      by the number in its text, which is JSON where a thread of its own wrote; else that text
"""

from __future__ import annotations

import errno
import json
import os
import re

FULL = {
    errno.ENOSPC: "no space left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file reached the size that this process may write",
    errno.EMFILE: "no file descriptor is left to this process",
    errno.ENOMEM: "too little memory is left to this process",
    errno.EROFS: "the file system became read-only",
}


def cause(error: BaseException) -> str:
    """
    >>> cause(OSError(28, "No space left on device", "/runs/a/run.json"))
    'no space left on the device'
    >>> cause(ValueError('IO Error: {"exception_message":"Could not sync \\\\"a\\\\"","errno":"5"}'))
    'Could not sync "a"'
    """
    text = " ".join(str(error).split()) or type(error).__name__
    told = re.search(r'"errno":"(\d+)"', text)
    number = getattr(error, "errno", None) or (int(told[1]) if told else None)
    for known, words in FULL.items():
        if number == known or os.strerror(known) in text:
            return words
    inner = re.search(r'"exception_message":("(?:[^"\\]|\\.)*")', text)
    try:
        return str(json.loads(inner[1])) if inner else text
    except ValueError:
        return text
