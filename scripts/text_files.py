"""Files of text as documents, for prepare_text.py.

A plain file is one document, or several with a separator between them. In .jsonl (or .ndjson), .json and .parquet
each record is one. All but .parquet may be compressed: .gz, .xz, .zst. Documents are yielded a few MiB at a time, so
they need not fit into memory. Exceptions are a line of .jsonl, of MAX_LINE at most, and 256 records of .parquet.
A .json has records as a .jsonl does; one whose first two lines are no objects is refused, or taken as text on request.

UTF-16 and UTF-32 are not text, in records either. A plain file is text if it has no NUL byte and at most one byte in a
thousand of the part read is not UTF-8. Such bytes are counted, and so are halves of surrogate pairs in a .jsonl. A
record without a text in UTF-8 is left out. A file is left out as a whole if it is not text, if no record has a text, or
if it cannot be unpacked to its end. So all files but unpacked records are read once before.
"""
import codecs
import errno
import fnmatch
import gzip
import io
import itertools
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
WIDE = re.compile(rb"\xff\xfe|(\0\0)?\xfe\xff|\0{0,3}\{\0")  # how UTF-16 and UTF-32 begin: a mark, or the { of a record
DAMAGED = "not readable to the end: damaged, or not what the name says"


class NotText(Failure):
    """A file is left out: `reason`, which many files can share."""

    def __init__(self, message, reason):
        super().__init__(message)
        self.reason = reason


class BadRecord(Failure):
    """A record has no text."""


class LeftOut:
    """Files that are left out, and why. With `strict` the first is an error, and so is the first bad record."""

    def __init__(self, strict):
        self.strict, self.reasons = strict, {}  # by path

    def add(self, path, reason, message=None):
        if self.strict:
            raise Failure(message or f"{path}: {reason}")
        self.reasons[path] = reason

    def summary(self):
        """A line for each reason. Damaged files are all named, as each may be mended."""
        for reason in dict.fromkeys(self.reasons.values()):
            paths = [shown(path) for path, why in self.reasons.items() if why == reason]
            yield f"{len(paths)} left out ({reason})" + (": " + ", ".join(paths) if reason == DAMAGED else f", such as {paths[0]}")


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
    """The files of the inputs by device and inode, in a fixed order, each under its first name. Folders are searched for
    the patterns, in upper or lower case, without hidden files."""
    files = []
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
    names, again = {}, []
    for path in files:
        info = os.stat(path)
        key = info.st_dev, info.st_ino
        if key in names:
            again.append(path)
        else:
            names[key] = path
    if again:
        print(f"prepare_text.py: {len(again)} left out (a file counts once, under its first name), such as {shown(again[0])}",
              file=sys.stderr)
    return names


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


class XzFile(io.RawIOBase):
    """Unpacks .xz of any number of streams. The library's own reader ends at damage behind the first one."""

    def __init__(self, packed):
        self.packed, self.stream = packed, lzma.LZMADecompressor()

    def readable(self):
        return True

    def readinto(self, buffer):
        text = b""
        while not text:
            if self.stream.eof:
                data = self.stream.unused_data.lstrip(b"\0")  # NULs may follow a stream
                while not data:
                    piece = self.packed.read(PIECE)
                    if not piece:
                        return 0
                    data = piece.lstrip(b"\0")
                self.stream = lzma.LZMADecompressor()
            else:
                data = self.packed.read(PIECE) if self.stream.needs_input else b""
                if self.stream.needs_input and not data:
                    raise EOFError("it ends within a stream")
            text = self.stream.decompress(data, len(buffer))
        buffer[:len(text)] = text
        return len(text)


OPENERS = {".gz": gzip.open, ".xz": XzFile, ".zst": ZstdFile}


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


def state_of(path):
    info = os.stat(path)
    return info.st_size, info.st_mtime_ns


def read_line(file):
    """The next line, or MAX_LINE bytes of a longer one."""
    line = part = file.readline(MAX_LINE)
    while len(part) == MAX_LINE and not part.endswith(b"\n"):  # the rest of the line
        part = file.readline(MAX_LINE)
    return line


def object_of(line):
    """The JSON object on a line."""
    if len(line) == MAX_LINE:
        raise BadRecord(f"longer than {MAX_LINE} bytes")
    shown = ascii(line[:60].decode("utf-8", "replace").strip())
    try:
        record = json.loads(line.decode("utf-8-sig", "surrogatepass"))  # of bytes json.loads would guess the encoding
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"not JSON ({error}): {shown}") from error
    if not isinstance(record, dict):
        raise BadRecord(f"not a JSON object: {shown}")
    return record


class Text:
    """The documents of some files. Each iteration starts from the beginning and yields (first, text): chunks in order,
    first 1 where a document begins. `done` of `size` bytes of the files are read so far, and `given` bytes of text were
    yielded. `damaged` counts bytes that are not UTF-8, and `bad` records that are left out. `crlf` are the files with CR LF
    line ends, and `like_records` is a plain file with JSON records. Files that are not text are added to left_out;
    `no_text` has the errors by path. A file must not change between iterations."""

    def __init__(self, files, left_out=None, separator=None, field="text", json_as_text=False):
        self.files, self.separator, self.field, self.json_as_text = files, separator, field, json_as_text
        self.states = {path: state_of(path) for path in files}
        self.size = sum(self.states[path][0] for path in files)
        self.checked, self.no_text = set(), {}
        self.left_out = left_out or LeftOut(False)
        self.begin()

    def begin(self):
        self.done = self.before = 0  # before: bytes of earlier files
        self.given = 0
        self.damaged, self.first_damage = 0, None
        self.bad, self.first_bad = 0, None
        self.crlf, self.like_records = [], None

    def reader(self, path):
        kind = os.path.splitext(unpacked_name(path))[1].lower()
        if kind == ".json" and self.json_as_text:
            return self.plain
        return {".jsonl": self.json_lines, ".ndjson": self.json_lines, ".json": self.json_file,
                ".parquet": self.parquet}.get(kind, self.plain)

    def has_records(self):
        return any(self.reader(path) != self.plain for path in self.files)

    def __iter__(self):
        self.begin()
        for path in self.files:
            if path not in self.no_text:
                yield from self.documents(path)
            self.before = self.done = self.before + self.states[path][0]

    def documents(self, path):
        read, given, damage = self.reader(path), self.given, (self.damaged, self.first_damage)
        try:
            self.check_state(path)
            if path not in self.checked:
                self.read_once(path, read)
                self.checked.add(path)
                self.damaged, self.first_damage = damage
            for first, text in read(path):
                if self.crlf[-1:] != [path] and b"\r\n" in text:
                    self.crlf.append(path)
                if first and read == self.plain and not self.json_as_text and self.begins_as_record(text):
                    self.like_records = self.like_records or path
                self.given += len(text)
                yield first, text
            self.check_state(path)
        except (NotText, OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            why = error if isinstance(error, NotText) else NotText(f"{path}: cannot read: {error}", DAMAGED)
            if self.given > given or getattr(error, "errno", None):  # its text is in use, or the disk failed
                raise why from error
            self.left_out.add(path, why.reason, str(why))
            self.no_text[path] = str(why)
            self.damaged, self.first_damage = damage

    def read_once(self, path, read):
        """Finds out that a file is no text, or damaged, before its text is yielded. Unpacked records need it not."""
        if read == self.plain:
            pieces = self.raw_pieces(path)
        elif read == self.parquet:
            pieces = self.cells(path)
        elif unpacked_name(path) != path:
            pieces = self.chunks(path, lambda file: file.read(PIECE))
        else:
            return
        for _ in pieces:
            pass

    def check_state(self, path):
        """A file that is read twice must stay as it is."""
        if state_of(path) != self.states[path]:
            raise Failure(f"{path}: it changes while it is read; start again when nothing writes to it")

    def chunks(self, path, read):
        """Yields read(file) of the decompressed file until the end, and an empty result last."""
        opener = OPENERS.get(os.path.splitext(path)[1].lower())
        if opener and not os.path.getsize(path):
            raise EOFError("it is empty, which no packed file is")
        with open(path, "rb") as packed, io.BufferedReader(opener(packed), PIECE) if opener else packed as file:
            if WIDE.match(start := file.peek(5)):
                code = json.detect_encoding(start).upper()
                raise NotText(f"{path}: not UTF-8 but {code}: iconv -f {code} -t UTF-8 converts it",
                              "not UTF-8 but UTF-16 or UTF-32, from which iconv converts")
            chunk = True
            while chunk:
                chunk = read(file)
                if packed.tell() > self.states[path][0]:  # one that grows for ever has no end
                    self.check_state(path)
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
                raise NotText(f"{path}: byte {at + nul} is NUL: not text; tr -d '\\000' takes NUL bytes out of text; if it is packed, or "
                              ".parquet, its name must say so", "not text: it holds NUL bytes, which tr -d '\\000' takes out of text")
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

    def records(self, records, text_of):
        """The documents of records, given as (place, record)."""
        good, bad, first_bad = 0, 0, None
        for place, record in records:
            try:
                text = text_of(record)
            except BadRecord as error:
                if self.left_out.strict:
                    raise Failure(f"{place}: {error}") from error
                bad, first_bad = bad + 1, first_bad or f"{place}: {error}"
                continue
            good += 1
            self.check(text, lambda _: place)
            yield from in_pieces(text)
        if bad and not good:
            raise NotText(first_bad, "no record has a text; --field names its field")
        self.bad, self.first_bad = self.bad + bad, self.first_bad or first_bad

    def lines(self, path):
        for number, line in enumerate(self.chunks(path, read_line), 1):
            if line.strip():
                yield f"{path}: line {number}", line

    def json_lines(self, path):
        return self.records(self.lines(path), self.text_of_line)

    def json_file(self, path):
        """A .json has records as a .jsonl does, or it is one value of many lines."""
        lines = self.lines(path)
        first, bad = list(itertools.islice(lines, 2)), None  # one of them may be a bad record
        for _, line in first:
            try:
                object_of(line)
                break
            except BadRecord as error:
                bad = bad or error
        else:
            if bad:
                raise NotText(f"{path}: its first line is {bad}; records are JSON objects, one a line: jq -c '.[]' makes them of an "
                              "array; --json-as-text takes the file as text",
                              "JSON that is not one object a line; --json-as-text takes it as text") from bad
        yield from self.records(itertools.chain(first, lines), self.text_of_line)

    def begins_as_record(self, text):
        try:
            return text.startswith(b"{") and self.text_of_line(text.split(b"\n", 1)[0]) is not None
        except BadRecord:
            return False

    def text_of_line(self, line):
        value = record = object_of(line)
        for name in [self.field] if self.field in record else self.field.split("."):
            if not isinstance(value, dict) or name not in value:
                has = ", ".join(map(ascii, record)) or "none"
                raise BadRecord(f"no field {self.field!a}; it has {has}; choose with --field")
            value = value[name]
        if not isinstance(value, str):
            raise BadRecord(f"field {self.field!a} holds {ascii(json.dumps(value)[:60])}, not a string")
        return value.encode("utf-8", "surrogatepass")  # half of a pair counts as damage

    def parquet(self, path):
        return self.records(self.cells(path), self.text_of_cell)

    def cells(self, path):
        try:
            import pyarrow
            import pyarrow.compute
            import pyarrow.parquet
        except ImportError as error:
            raise Failure(f"{path}: .parquet needs the pyarrow package: pip install pyarrow") from error
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                schema = file.schema_arrow
                names = [self.field] if self.field in schema.names else self.field.split(".")
                kind = pyarrow.struct(list(schema))
                for name in names:
                    if not pyarrow.types.is_struct(kind) or kind.get_field_index(name) < 0:
                        raise NotText(f"{path}: no column {self.field!a}; it has {', '.join(map(ascii, schema.names))}; "
                                      "choose with --field", f"no column {self.field!a}; choose with --field")
                    kind = kind.field(name).type
                values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
                if not re.fullmatch("(large_)?(string|binary)(_view)?", str(values)):
                    raise NotText(f"{path}: column {self.field!a} holds {kind}, not strings",
                                  f"column {self.field!a} does not hold strings; choose with --field")
                number = 0
                for group in range(file.num_row_groups):
                    for batch in file.iter_batches(256, [group], [self.field], use_threads=False):
                        column = batch.column(names[0])
                        if names[1:]:
                            column = pyarrow.compute.struct_field(column, names[1:])
                        for number, cell in enumerate(column.cast(pyarrow.large_binary()).to_pylist(), number + 1):
                            yield f"{path}: record {number}", cell
                    self.done = self.before + self.states[path][0] * (group + 1) // file.num_row_groups
        except pyarrow.ArrowException as error:
            raise OSError(error) from error

    def text_of_cell(self, cell):
        if cell is None:
            raise BadRecord(f"column {self.field!a} holds null, not a string")
        try:
            cell.decode()
        except UnicodeDecodeError as error:
            raise BadRecord(f"column {self.field!a} holds bytes that are not UTF-8 ({error})") from error
        return cell
