"""Files of text as documents, for prepare_text.py.

A plain file is one document, or several with a separator between them. In other files each record is one: a line of
.jsonl, .ndjson and .json (a JSON object), a row of .csv, .parquet and of a data set of the Hugging Face Hub. All files but
.parquet may be compressed. Documents are yielded a few MiB at a time, so they need not fit into memory.

A plain file is text if it has no NUL byte and at most one byte in a thousand of the part read is not UTF-8. Such bytes are
counted, and so are halves of surrogate pairs in JSON. A record without a text in UTF-8 is left out. A file is left out as a
whole if it is not text, if no record has a text, or if it cannot be read to its end. So all files but unpacked JSON lines
are read once before.
"""
import codecs
import csv
import fnmatch
import io
import json
import lzma
import math
import os
import re
import stat
import zlib

from script import Failure
from text_tokenizers import library

PIECE = 4 << 20  # bytes of text handled at a time
MAX_LINE = 1 << 30
DAMAGE = 1000  # bytes of a plain file per byte that is not UTF-8, at least
DAMAGED = "not readable to the end: damaged, or not what the name says"
BAD_RECORDS, NOT_UTF8 = "records left out", "places that are not UTF-8 (bytes keep them, other tokenizers read U+FFFD)"


class NotText(Failure):
    """A file is left out, for a reason that many files can share."""


class HubSet(str):
    """The name of a data set of the Hub, in place of a path."""


class Report:
    """Counts of what is left out or damaged. With `strict` what is left out is an error."""

    def __init__(self, strict):
        self.strict, self.left_out = strict, {}  # why, by path
        self.counts = {}  # by kind and path: (number, the first)

    def count(self, path, kind, number=1, first=""):
        earlier, first = self.counts.setdefault(kind, {}).get(path, (0, first))
        self.counts[kind][path] = earlier + number, first

    def leave_out(self, path, reason, record=""):
        """Leaves out a file, or a record of it."""
        if self.strict:
            raise Failure(f"{path}: {record}{reason}")
        if record:
            self.count(path, BAD_RECORDS, first=f": {record}{reason}")
        else:
            self.left_out[path] = reason
            self.count(path, f"left out ({reason})")

    def begin(self, path):
        """Forgets what an earlier reading of a file counted."""
        for kind in (BAD_RECORDS, NOT_UTF8):
            self.counts.get(kind, {}).pop(path, None)

    def lines(self):
        """A line for each kind. Damaged files are all named, as each may be mended."""
        for kind, paths in self.counts.items():
            names = [shown(path + first) for path, (_, first) in paths.items()]
            if names:
                yield (f"{sum(number for number, _ in paths.values())} {kind}" +
                       (": " + ", ".join(names) if DAMAGED in kind else f", such as {names[0]}"))


def shown(path):
    """A path without control characters."""
    return re.sub(r"[\0-\x1f\x7f-\x9f]", lambda match: ascii(match[0])[1:-1], path)


def unpacked_name(path):
    """The name of a file without its suffix of compression."""
    name, suffix = os.path.splitext(path)
    return name if suffix.lower() in DECOMPRESSORS else path


# ---- Which files


def files_in(top, patterns, report):
    """The files of a folder and of its folders that match the patterns, in upper or lower case, without hidden ones."""
    found, waiting = [], [top]
    while waiting:
        folder, folders = waiting.pop(), []
        for name in sorted(name for name in os.listdir(folder) if not name.startswith(".")):
            path = os.path.join(folder, name)
            if os.path.isdir(path) and os.path.islink(path):
                report.leave_out(path, "a link to a folder")
            elif os.path.isdir(path):
                folders.append(path)
            elif not any(fnmatch.fnmatch(n.lower(), p.lower()) for n in (name, unpacked_name(name)) for p in patterns):
                report.count(path, "left out (no --glob matches their names)")
            elif os.path.isfile(path):
                found.append(path)
            else:  # a pipe would wait for a writer
                report.leave_out(path, "not a file" if os.path.exists(path) else "a link that leads nowhere")
        waiting += reversed(folders)
    if not found:
        raise Failure(f"{top}: no file in this folder matches {' '.join(patterns)}; choose others with --glob")
    return found


def find_files(inputs, patterns, report, hub):
    """The files of the inputs in a fixed order, each under its first name: {device and inode: path}. With `hub` an input
    OWNER/SET that is no path is a data set of the Hub."""
    files = {}
    for given in inputs:
        if hub and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", given) and not os.path.lexists(given):
            files[given] = HubSet(given)
            continue
        mode = stat.S_IFIFO if given == "-" else os.stat(given).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise Failure(f"{given}: neither a file nor a folder; a pipe cannot be read twice: write its text to a file first")
        for path in files_in(given, patterns, report) if stat.S_ISDIR(mode) else [given]:
            info = os.stat(path)
            if files.setdefault((info.st_dev, info.st_ino), path) is not path:
                report.count(path, "left out (a file counts once, under its first name)")
    return files


# ---- Compressed files


def zstd():
    zstandard = library("zstandard", "a .zst file")
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()  # zstd --long=31 writes such windows


DECOMPRESSORS = {".gz": lambda: zlib.decompressobj(31), ".xz": lzma.LZMADecompressor, ".zst": zstd}


def unpacked(packed, decompressor):
    """Yields the text of any number of streams. The libraries' own readers take a cut for the end (.zst), or end at NULs
    between streams (.xz)."""
    stream = decompressor()
    step = 1 << 10 if decompressor is zstd else 1 << 13  # at most 32 MiB of text: a block of .zst, 128 KiB, takes four bytes
    while data := packed.read(step):
        while data := data.lstrip(b"\0") if stream.eof else data:
            try:
                stream = decompressor() if stream.eof else stream
                text = stream.decompress(data)
            except Exception as error:  # each library has its own
                raise OSError(error) from error
            yield text
            data = stream.unused_data
    if not stream.eof:
        raise OSError("it ends within a stream")


class Chunks(io.RawIOBase):
    """A file of chunks of bytes."""

    def __init__(self, chunks):
        self.chunks, self.rest = filter(None, chunks), b""

    def readable(self):
        return True

    def readinto(self, buffer):
        text = self.rest or memoryview(next(self.chunks, b""))
        count = min(len(buffer), len(text))
        buffer[:count], self.rest = text[:count], text[count:]
        return count


# ---- The documents of files


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


def damage_of(text, final=True):
    """The number of places that are not UTF-8, and the end of the last whole character."""
    replaced, end = codecs.utf_8_decode(text, "replace", final)
    return "\ufffd" in replaced and replaced.count("\ufffd") - text[:end].count("\ufffd".encode()), end


def read_line(file):
    """The next line, or MAX_LINE bytes of a longer one."""
    line = part = file.readline(MAX_LINE)
    while len(part) == MAX_LINE and not part.endswith(b"\n"):  # the rest of the line
        part = file.readline(MAX_LINE)
    return line


def object_of(line):
    if len(line) == MAX_LINE:
        raise ValueError(f"longer than {MAX_LINE} bytes")
    try:
        return json.loads(line.decode("utf-8-sig", "surrogatepass"))  # of bytes json.loads would guess the encoding
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error


def text_of(record, field):
    """The text of a record, a line of JSON or a dictionary, in UTF-8. A field a.b is that of the name, or b of the field a."""
    value = record = object_of(record) if isinstance(record, bytes) else record
    if not isinstance(record, dict):
        raise ValueError("not a JSON object, or not as many fields as columns")
    for name in [field] if field in record else field.split("."):
        if not isinstance(value, dict) or name not in value:
            raise ValueError(f"no field {field!a}; it has {', '.join(map(ascii, record)) or 'none'}; choose with --field")
        value = value[name]
    if isinstance(value, bytes):
        value = value.decode()
    if not isinstance(value, str):
        raise ValueError(f"field {field!a} holds {ascii(value)[:60]}, not a string")
    return value.encode("utf-8", "surrogatepass")  # half of a pair counts as damage


def state_of(path):
    """Size and time of a file, which must stay as it is while it is read. The size of a data set of the Hub is not known."""
    if isinstance(path, HubSet):
        return math.inf, 0
    info = os.stat(path)
    return info.st_size, info.st_mtime_ns


class Text:
    """The documents of some files. Each iteration starts from the beginning and yields (first, text): chunks in order,
    first 1 where a document begins."""

    def __init__(self, files, report, separator=None, field="text", config=None, split="train"):
        self.files, self.report, self.separator, self.field, self.config, self.split = files, report, separator, field, config, split
        self.states = {path: state_of(path) for path in files}
        self.size = sum(size for size, _ in self.states.values())
        self.checked = set()

    def __iter__(self):
        for path in self.files:
            if path not in self.report.left_out:
                yield from self.documents(path)

    def documents(self, path):
        """The documents of a file, or none and a line in the report."""
        used, kind = False, kind_of(path)
        try:
            self.check_state(path)
            if path not in self.checked:
                self.read_once(path, kind)
                self.checked.add(path)
            self.report.begin(path)
            for document in self.records(path, kind) if kind in READERS else self.plain(path):
                used = True
                yield document
            self.check_state(path)
        except (NotText, OSError, csv.Error) as error:
            if used or getattr(error, "errno", None):  # or the disk failed
                raise Failure(f"{path}: cannot read: {error}") from error
            self.report.leave_out(path, str(error) if isinstance(error, NotText) else DAMAGED)

    def read_once(self, path, kind):
        """Finds out that a file is no text, or damaged, before its text is used."""
        if kind in JSON_LINES or kind == HUB:
            reading = self.chunks(path) if unpacked_name(path) != path else ()
        else:
            reading = READERS[kind](self, path) if kind in READERS else self.whole_characters(path)
        for _ in reading:
            pass

    def check_state(self, path):
        if state_of(path) != self.states[path]:
            raise Failure(f"{path}: it changes while it is read; start again when nothing writes to it")

    def chunks(self, path, read=lambda file: file.read(PIECE)):
        """Yields read(file) of the unpacked file until the end, and an empty result last."""
        decompressor = DECOMPRESSORS.get(os.path.splitext(path)[1].lower())
        with open(path, "rb") as packed:
            file = io.BufferedReader(Chunks(unpacked(packed, decompressor)), PIECE) if decompressor else packed
            chunk = True
            while chunk:
                chunk = read(file)
                if packed.tell() > self.states[path][0]:  # one that grows for ever has no end
                    self.check_state(path)
                yield chunk

    def count_damage(self, path, number):
        if number and path in self.checked:
            self.report.count(path, NOT_UTF8, number)

    # ---- Plain files

    def whole_characters(self, path):
        """Yields chunks of a plain file that end between characters, and an empty one last."""
        size, damage, rest = 0, 0, b""
        for chunk in self.chunks(path):
            text = rest + chunk
            if b"\0" in text:
                raise NotText("NUL bytes: not text, or packed under another name, or in UTF-16, from which iconv converts; "
                              "tr -d '\\000' takes them out of text")
            number, end = damage_of(text, final=not chunk)
            size, damage, rest = size + end, damage + number, text[end:]
            if damage > size // DAMAGE:
                raise NotText(f"more than a byte in {DAMAGE} is not UTF-8: not text, or in another encoding, from which iconv "
                              "converts")
            self.count_damage(path, number)
            if end:
                yield text[:end]
        yield b""

    def plain(self, path):
        first, rest = True, b""
        for chunk in self.whole_characters(path):
            *documents, rest = (rest + chunk).split(self.separator) if self.separator else [rest + chunk]
            pieces = [(text, True) for text in documents]
            while len(rest) > 2 * PIECE:  # enough stays to find a separator that the next chunk completes
                cut = cut_point(rest, PIECE)
                pieces.append((rest[:cut], False))
                rest = rest[cut:]
            for text, ends in pieces + [(rest, True)] * (not chunk):
                if self.separator and first:
                    text = text.lstrip(b"\r\n")
                if self.separator and ends:
                    text = text.rstrip(b"\r\n")
                if text and (text.strip() or not first):
                    yield first, text
                    first = False
                first = first or ends

    # ---- Records. The readers yield (place, record).

    def records(self, path, kind):
        good = bad = False
        for place, record in READERS[kind](self, path):
            try:
                text = text_of(record, self.field)
            except ValueError as error:
                self.report.leave_out(path, error, f"{place}: ")
                bad = True
                continue
            good = True
            self.count_damage(path, damage_of(text)[0])
            yield from in_pieces(text)
        if bad and not good:
            raise NotText("no record has a text; --field names its field")

    def json_lines(self, path):
        for number, line in enumerate(self.chunks(path, read_line), 1):
            if number == 1 and line.strip() == b"[":
                raise NotText("a JSON array; records are JSON objects, one a line: jq -c '.[]' makes them")
            if line.strip():
                yield f"line {number}", line

    def csv_rows(self, path):
        csv.field_size_limit(MAX_LINE)
        lines = (line.decode("utf-8-sig", "surrogateescape") for line in self.chunks(path, read_line))
        rows = csv.reader(lines, strict=True)
        columns = next(rows, [])
        at = self.column_of(columns)
        for number, row in enumerate(filter(None, rows), 1):
            whole = len(row) == len(columns)
            yield f"row {number}", {self.field: row[at].encode("utf-8", "surrogateescape")} if whole else row

    def parquet_rows(self, path):
        library("pyarrow", "a .parquet file")
        import pyarrow.parquet
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                self.column_of([column.path for column in file.schema if column.physical_type == "BYTE_ARRAY"])
                number = 0
                batches = (batch for group in range(file.num_row_groups)  # all groups in one call take twice the memory
                           for batch in file.iter_batches(256, [group], [self.field], use_threads=False))
                for batch in batches:
                    column = batch.column(0)
                    while pyarrow.types.is_struct(column.type):  # of field.field
                        column = column.flatten()[0]
                    for number, cell in enumerate(column.cast(pyarrow.large_binary()).to_pylist(), number + 1):
                        yield f"row {number}", {self.field: cell}
        except pyarrow.ArrowException as error:
            raise OSError(error) from error

    def column_of(self, columns):
        if self.field not in columns:
            raise NotText(f"no column {self.field!a} of strings; it has {', '.join(map(ascii, columns)) or 'none'}; choose with --field")
        return columns.index(self.field)

    def hub_rows(self, path):
        os.environ.setdefault("USE_TORCH", "0")  # datasets imports torch where it is installed: 500 MB
        datasets = library("datasets", f"{path}: no file; a data set of the Hub")
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are told here
        try:
            rows = datasets.load_dataset(path, self.config, split=self.split, streaming=True)
            number = 0
            for table in rows.select_columns(self.field.split(".")[0]).with_format("arrow").iter(256):
                for number, row in enumerate(table.to_pylist(), number + 1):
                    yield f"row {number}", row
        except Exception as error:  # of many libraries
            raise Failure(f"{path}: no file, and as a data set of the Hub: {' '.join(str(error).split())}") from error


HUB, JSON_LINES = "the Hub", (".jsonl", ".ndjson", ".json")
READERS = {**dict.fromkeys(JSON_LINES, Text.json_lines), ".csv": Text.csv_rows, ".parquet": Text.parquet_rows, HUB: Text.hub_rows}


def kind_of(path):
    return HUB if isinstance(path, HubSet) else os.path.splitext(unpacked_name(path))[1].lower()
