"""Files of text as documents, for prepare_text.py.

A plain file is one document, or several with a separator between them. In .jsonl (or .ndjson) and .parquet each
record is one. All but .parquet may be compressed: .gz, .xz, .zst. Documents are yielded a few MiB at a time, so they
need not fit into memory. Exceptions are a line of .jsonl, of MAX_LINE at most, and 256 records of .parquet.

A plain file is text if it has no NUL byte and at most one byte in a thousand of the part read is not UTF-8. Such
bytes are counted. So are those in the records of a .parquet, and halves of surrogate pairs in a .jsonl. A .jsonl file
itself must be UTF-8. A plain file of a folder that is not text is left out as a whole, so each is read once before.
"""
import codecs
import errno
import fnmatch
import gzip
import io
import json
import lzma
import os
import re
import stat
import sys
import zlib

from script import Failure

PIECE = 4 << 20  # bytes of text handled at a time
MAX_LINE = 1 << 30
DAMAGE = 1000  # bytes of a plain file per byte that is not UTF-8, at least


class NotText(Failure):
    """A file is not text: `reason`, which many files can share."""

    def __init__(self, message, reason):
        super().__init__(message)
        self.reason = reason


class LeftOut:
    """Files of folders that are left out, and why. With `strict` the first is an error."""

    def __init__(self, strict):
        self.strict, self.reasons = strict, {}  # by path

    def add(self, path, reason, message=None):
        if self.strict:
            raise Failure(message or f"{path}: {reason}")
        self.reasons[path] = reason

    def summary(self):
        """A line for each reason."""
        for reason in dict.fromkeys(self.reasons.values()):
            paths = [path for path, why in self.reasons.items() if why == reason]
            yield f"{len(paths)} left out ({reason}), such as {shown(paths[0])}"


def shown(path):
    """A path without control characters."""
    return re.sub(r"[\0-\x1f\x7f-\x9f]", lambda match: ascii(match[0])[1:-1], path)


def refuse(error):
    raise error


def unpacked_name(path):
    """The name of a file without its suffix of compression."""
    name, suffix = os.path.splitext(path)
    return name if suffix.lower() in OPENERS else path


def find_files(inputs, patterns, left_out):
    """The files of the inputs in a fixed order, and those of them that come from folders. Folders are searched for the
    patterns, in upper or lower case, without hidden files."""
    files, of_folders = [], set()
    for path in inputs:
        mode = stat.S_IFIFO if path == "-" else os.stat(path).st_mode
        if stat.S_ISREG(mode):
            files.append(path)
            continue
        if not stat.S_ISDIR(mode):
            raise Failure(f"{path}: neither a file nor a folder; a pipe cannot be read twice: write its text to a file first")
        found, others, waiting = [], [], [path]
        while waiting:  # one level of os.walk at a time: it calls itself for each
            folder, folders, names = next(os.walk(waiting.pop(), onerror=refuse))
            folders = [os.path.join(folder, f) for f in sorted(folders) if not f.startswith(".")]
            for link in filter(os.path.islink, folders):
                left_out.add(link, "a link to a folder")
            waiting += [f for f in reversed(folders) if not os.path.islink(f)]
            for name in sorted(n for n in names if not n.startswith(".")):
                if not any(fnmatch.fnmatch(n.lower(), p.lower()) for n in (name, unpacked_name(name)) for p in patterns):
                    others.append(name)
                    continue
                inside = os.path.join(folder, name)
                try:
                    mode = os.stat(inside).st_mode
                except OSError as error:
                    if not os.path.islink(inside) or error.errno not in (errno.ENOENT, errno.ELOOP):
                        raise
                    left_out.add(inside, "a link that leads nowhere")
                    continue
                if stat.S_ISREG(mode):
                    found.append(inside)
                else:  # a pipe would wait for a writer
                    left_out.add(inside, "not a file")
        if not found:
            raise Failure(f"{path}: no file in this folder matches {' '.join(patterns)}; choose others with --glob")
        if others:
            print(f"prepare_text.py: {path}: {len(others)} files left out whose names match no --glob "
                  f"({', '.join(map(shown, others[:3]))}{', ...' * (len(others) > 3)})", file=sys.stderr)
        files += found
        of_folders.update(found)
    return files, of_folders.difference(inputs)


class ZstdFile(io.RawIOBase):
    """Unpacks .zst of any number of frames. The package's own reader takes a file that is cut off for one that ends."""

    def __init__(self, packed):
        try:
            import zstandard
        except ImportError as error:
            raise Failure(f"{packed.name}: .zst needs the zstandard package: pip install zstandard") from error
        self.zstandard, self.packed, self.frame, self.text = zstandard, packed, None, memoryview(b"")

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self.text:
            ended = self.frame is None or self.frame.eof
            # A KiB has at most 32 MiB of text: a block of 128 KiB takes four bytes.
            data = (self.frame.unused_data if self.frame and ended else b"") or self.packed.read(1 << 10)
            if not data:
                if not ended:
                    raise EOFError("it ends within a frame")
                return 0
            try:
                if ended:  # a window of up to 2 GiB: what zstd --long=31 writes
                    self.frame = self.zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
                self.text = memoryview(self.frame.decompress(data))
            except self.zstandard.ZstdError as error:
                raise OSError(error) from error
        count = min(len(buffer), len(self.text))
        buffer[:count] = self.text[:count]
        self.text = self.text[count:]
        return count


OPENERS = {".gz": gzip.open, ".xz": lzma.open, ".zst": ZstdFile}


def cut_point(text, limit):
    """Where to cut text, at most at limit: behind a line end if one is near, or else between two UTF-8 characters."""
    at = text.rfind(b"\n", max(0, limit - 4096), limit) + 1
    if at == 0:
        at = limit
        while at > max(0, limit - 3) and text[at] & 0xC0 == 0x80:
            at -= 1
    return at


def in_pieces(text):
    """Yields (first, text): chunks of one document; none if it is blank."""
    if not text.strip():
        return
    at = 0
    while len(text) - at > 2 * PIECE:
        end = at + cut_point(text[at: at + PIECE + 1], PIECE)
        yield at == 0, text[at: end]
        at = end
    yield at == 0, text[at:]


class Text:
    """The documents of some files. Each iteration starts from the beginning and yields (first, text): chunks in order,
    first 1 where a document begins. `done` of `size` bytes of the files are read so far, and `given` bytes of text were
    yielded. `damaged` counts bytes that are not UTF-8. `crlf` are the files with CR LF line ends. Files of of_folders that
    are not text are added to left_out."""

    def __init__(self, files, of_folders=(), left_out=None, separator=None, field="text"):
        self.files, self.separator, self.field = files, separator, field
        self.size = sum(os.path.getsize(path) for path in files)
        self.unchecked, self.no_text, self.left_out = set(of_folders), set(), left_out
        self.begin()

    def begin(self):
        self.done = self.before = 0  # before: bytes of earlier files
        self.given = 0
        self.damaged, self.first_damage = 0, None
        self.crlf = []

    def reader(self, path):
        kind = os.path.splitext(unpacked_name(path))[1].lower()
        return {".jsonl": self.json_lines, ".ndjson": self.json_lines, ".parquet": self.parquet}.get(kind, self.plain)

    def has_records(self):
        return any(self.reader(path) != self.plain for path in self.files)

    def is_text(self, path):
        """Whether a file is to be taken; a plain one of a folder is read once for that."""
        if path in self.unchecked and self.reader(path) == self.plain:
            before = self.damaged, self.first_damage
            try:
                for _ in self.raw_pieces(path):
                    pass
            except NotText as error:
                self.left_out.add(path, error.reason, str(error))
                self.no_text.add(path)
            self.damaged, self.first_damage = before
        self.unchecked.discard(path)
        return path not in self.no_text

    def __iter__(self):
        self.begin()
        for path in self.files:
            try:
                for first, text in self.reader(path)(path) if self.is_text(path) else ():
                    if self.crlf[-1:] != [path] and b"\r\n" in text:
                        self.crlf.append(path)
                    self.given += len(text)
                    yield first, text
            except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
                raise Failure(f"{path}: cannot read: {error}") from error
            self.before = self.done = self.before + os.path.getsize(path)

    def chunks(self, path, read):
        """Yields read(file) of the decompressed file until the end, and an empty result last."""
        opener = OPENERS.get(os.path.splitext(path)[1].lower())
        if opener and not os.path.getsize(path):
            raise EOFError("it is empty, which no packed file is")
        with open(path, "rb") as packed, io.BufferedReader(opener(packed), PIECE) if opener else packed as file:
            chunk = True
            while chunk:
                chunk = read(file)
                self.done = self.before + packed.tell()
                yield chunk

    def check(self, text, where, final=True):
        """Counts bytes that are not UTF-8; where(offset) names their place. Returns the end of the last whole character."""
        try:
            return codecs.utf_8_decode(text, "strict", final)[1]
        except UnicodeDecodeError as error:
            place = where(error.start)
        replaced, end = codecs.utf_8_decode(text, "replace", final)
        self.damaged += replaced.count("\ufffd") - text[:end].count("\ufffd".encode())
        self.first_damage = self.first_damage or place
        return end

    def raw_pieces(self, path):
        """Yields (text, ends): chunks of a plain file; ends 1: a document ends after the chunk."""
        at, unchecked, rest = 0, b"", b""
        earlier, places = self.damaged, []

        def place(i):
            places.append(at + i)
            return f"{path}: byte {at + i}"

        for chunk in self.chunks(path, lambda file: file.read(PIECE)):
            # Only whole characters go on.
            unchecked += chunk
            nul = unchecked.find(b"\0")
            if nul >= 0:
                raise NotText(f"{path}: byte {at + nul} is NUL: not text", "not text: it holds NUL bytes")
            end = self.check(unchecked, place, final=not chunk)
            at, unchecked, rest = at + end, unchecked[end:], rest + unchecked[:end]
            if self.damaged - earlier > at // DAMAGE:
                more = self.damaged - earlier - 1
                raise NotText(f"{path}: byte {places[0]} is not UTF-8, nor are {more} more places up to byte {at} (1 in "
                              f"{DAMAGE} may be): not text, or in another encoding: iconv converts",
                              "not UTF-8: not text, or in another encoding, from which iconv converts")

            *documents, rest = rest.split(self.separator) if self.separator else [rest]
            yield from ((text, True) for text in documents)
            while len(rest) > 2 * PIECE:  # enough stays to find a separator that the next chunk completes
                cut = cut_point(rest, PIECE)
                yield rest[:cut], False
                rest = rest[cut:]
        yield rest, True

    def plain(self, path):
        first = True
        for text, ends in self.raw_pieces(path):
            if self.separator and first:
                text = text.lstrip(b"\r\n")
            if self.separator and ends:
                text = text.rstrip(b"\r\n")
            if text and (text.strip() or not first):
                yield first, text
                first = False
            first = first or ends

    def json_lines(self, path):
        for number, line in enumerate(self.chunks(path, lambda file: file.readline(MAX_LINE)), 1):
            place = f"{path}: line {number}"
            if len(line) == MAX_LINE:
                raise Failure(f"{place}: longer than {MAX_LINE} bytes")
            if not line.strip():
                continue
            shown = ascii(line[:60].decode("utf-8", "replace").strip())
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise Failure(f"{place}: not JSON ({error}): {shown}") from error
            if not isinstance(record, dict):
                raise Failure(f"{place}: not a JSON object: {shown}")
            if self.field not in record:
                has = ", ".join(map(ascii, record)) or "none"
                raise Failure(f"{place}: no field {self.field!a}; it has {has}; choose with --field")
            text = record[self.field]
            if not isinstance(text, str):
                raise Failure(f"{place}: field {self.field!a} holds {ascii(json.dumps(text)[:60])}, not a string")
            text = text.encode("utf-8", "surrogatepass")  # half of a pair counts as damage
            self.check(text, lambda _: place)
            yield from in_pieces(text)

    def parquet(self, path):
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise Failure(f"{path}: .parquet needs the pyarrow package: pip install pyarrow") from error
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                schema = file.schema_arrow
                if self.field not in schema.names:
                    raise Failure(f"{path}: no column {self.field!a}; it has {', '.join(map(ascii, schema.names))}; "
                                  "choose with --field")
                kind = schema.field(self.field).type
                if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                    raise Failure(f"{path}: column {self.field!a} holds {kind}, not strings")
                number, place = 0, lambda _: f"{path}: record {number}"
                for group in range(file.num_row_groups):
                    for batch in file.iter_batches(256, [group], [self.field], use_threads=False):
                        for text in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                            number += 1
                            if text is None:
                                raise Failure(f"{place(0)}: column {self.field!a} holds null, not a string")
                            self.check(text, place)
                            yield from in_pieces(text)
                    self.done = self.before + os.path.getsize(path) * (group + 1) // file.num_row_groups
        except pyarrow.ArrowException as error:
            raise Failure(f"{path}: cannot read: {error}") from error
