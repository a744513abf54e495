"""What to do about a file that cannot be read: one that is in use, say, may be whole and must stay."""

import errno
import re

_REMEDIES = {
    errno.EACCES: "give this user permission to read it",
    errno.EPERM: "give this user permission to read it",
    errno.EAGAIN: "another process writes it; run again once that has ended",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine; close some",
    errno.ENOMEM: "there is too little memory; free some",
    errno.EIO: "the disk or the network failed to read it; check them, and keep the file",
    errno.ESTALE: "the network's file system has lost it; mount it again",
}


def remedy_for(error: BaseException, damaged: str) -> str:
    """The remedy for an error of reading: by its cause if the machine is at fault, else ``damaged``.

    HDF5 tells of the system's error in its text.
    """
    cause: BaseException | None = error
    while cause is not None:
        in_text = re.search(r"errno = (\d+)", str(cause))
        number = int(in_text[1]) if in_text else getattr(cause, "errno", None)
        if number in _REMEDIES:
            return _REMEDIES[number]
        cause = cause.__cause__
    return damaged
