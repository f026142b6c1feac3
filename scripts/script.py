"""How the scripts end at a signal, read and print text, and put files in place. Scripts import it first, because other imports take time.

SIGINT and SIGTERM end a script with one line and remove its unfinished files. So does a standard output that cannot be
written, on a full disk. Standard library only.
"""
import least_python  # noqa: F401

import io
import os
import signal
import sys

SIGNALS = signal.SIGINT, signal.SIGTERM
OWNER = os.getpid()
unfinished = []  # files and folders under temporary names


def clear_and_say(message):
    if os.getpid() != OWNER:  # a process of a pool ends with the script
        os._exit(1)
    for path in unfinished:
        remove(path)
    try:
        os.write(2, os.fsencode(f"{os.path.basename(sys.argv[0])}: {message}\n"))
    except OSError:  # nobody listens
        pass


def end(number, _):
    clear_and_say(f"ended by {signal.Signals(number).name}")
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


for number in SIGNALS:
    if signal.getsignal(number) != signal.SIG_IGN:  # as in the background of a shell
        signal.signal(number, end)

import codecs  # noqa: E402
import contextlib  # noqa: E402
import errno  # noqa: E402
import fcntl  # noqa: E402
import pathlib  # noqa: E402

NOT_OFFERED = errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK  # by some network and FUSE file systems


class Output(io.FileIO):
    """Standard output. Its error is no error of a file that the script reads or writes meanwhile."""

    def write(self, data):
        try:
            return super().write(data)
        except OSError as error:
            clear_and_say(f"error: standard output: {error.strerror}")
            os._exit(1)


def printable(error):
    """Bytes of file names as they are; characters that the locale lacks as \\u2026."""
    error.end = error.start + 1
    kind = "surrogateescape" if "\udc80" <= error.object[error.start] <= "\udcff" else "backslashreplace"
    return codecs.lookup_error(kind)(error)


codecs.register_error("printable", printable)
if sys.stdout:
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(Output(1, "w", closefd=False)), sys.stdout.encoding, errors="printable",
                                  line_buffering=sys.stdout.line_buffering, write_through=sys.stdout.write_through)


class Failure(Exception):
    """An error that the user can mend; it has the message."""


def text(argument, errors="surrogateescape"):
    """Text of the command line or of a file's name, in UTF-8 whatever the locale."""
    return os.fsencode(argument).decode("utf-8", errors)


def remove(path):
    """A file or a folder, if it is there."""
    with contextlib.suppress(OSError):
        if os.path.isdir(path) and not os.path.islink(path):
            import shutil
            shutil.rmtree(path)
        else:
            os.remove(path)


def lock(file):
    """Locks a file, which another run may have locked (BlockingIOError). Returns why the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise
        return error.strerror
    return None


@contextlib.contextmanager
def undisturbed():
    """Signals that come meanwhile do nothing."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def in_place(path, part=None, create=lambda part: part.touch(exist_ok=False)):
    """A new file or folder under the temporary name `part`. It replaces `path` when complete. Links are not followed."""
    part = part or pathlib.Path(f"{path}.tmp")
    try:
        create(part)
    except FileExistsError as error:
        raise Failure(f"{part} is there already; remove it, if a killed run left it") from error
    unfinished.append(part)
    try:
        yield part
        os.replace(part, path)
    except OSError as error:
        if error.errno:
            error.filename = error.filename2 or error.filename or path  # a write names no file
        raise
    finally:
        remove(part)  # it is there no more if it is in its place
        unfinished.remove(part)
