"""The one error that reaches users as `error: …` without a traceback."""

import errno


class SweepError(Exception):
    """Something the user can put right: file, key or row, what was found, what was expected."""


# A disk that is full, over quota or read-only, and folders of other people.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def disk_error(error: OSError) -> str:
    """The message for an error of the file system."""
    return (
        f"{error.filename or 'the file system'}: {error.strerror}; make room or fix the rights and "
        "type the same command again"
    )
