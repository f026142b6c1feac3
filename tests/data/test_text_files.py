#!/usr/bin/env python3
"""Tests of scripts/text_files.py through prepare_text.py: forms of files, text and other data, number of processes.

The shards must not depend on the number of processes. Formats of other packages are tested where these are installed."""
import errno
import gzip
import io
import json
import lzma
import os
import random
import re
import signal
import subprocess
import sys
import time
import tracemalloc
import unittest
from unittest import mock

from test_prepare import SCRIPTS, Prepare
import prepare_text
import text_files
import text_tokenizers

SLOW = True

try:
    import zstandard
except ImportError:
    zstandard = None
try:
    import datasets
except ImportError:
    datasets = None
try:
    import pyarrow
    import pyarrow.parquet
except ImportError:
    pyarrow = None

TEXTS = ["first\nwith lines\n", "\n zwei: ü, 字, 😀\r\n", '"quoted" \\u0041 \t', "x" * 5000, "NUL \0 in a string"]


def lines_of(texts, field="text"):
    records = [json.dumps({"id": i, field: text}, ensure_ascii=i % 2 == 0) + "\n" for i, text in enumerate(texts)]
    return "".join(records).encode()


class Pieces(Prepare):
    def test_pieces_do_not_show(self):
        """The documents do not depend on the chunks in which a file is read."""
        rng = random.Random(1)
        texts = ["".join(rng.choice("ab\n é€😀") for _ in range(rng.choice([1, 5, 30, 200]))).strip() for _ in range(60)]
        texts = [t for t in texts if t]
        whole = self.write("a.txt", "\n<|end|>\n".join(texts).encode())
        for piece in (10, 16, 37, 100, 1 << 20):
            with mock.patch.object(text_files, "PIECE", piece):
                self.run_it(whole, "--split-on", "<|end|>", "--val-fraction", "0", "--overwrite")
            self.assertEqual([d.decode() for d in self.documents("train")], texts, piece)

    def test_pieces_end_at_lines(self):
        path = self.write("a.txt", b"0123456\n" * 1000)
        with mock.patch.object(text_files, "PIECE", 100):
            self.assertTrue(all(t.endswith(b"\n") for _, t in text_files.Text([path], text_files.Report(False))))

    def test_long_records(self):
        """A record of many chunks is one document, and chunks end between characters."""
        texts = ["é€😀x" * 500, "0123456\n" * 1000, "short"]
        path = self.write("a.jsonl", lines_of(texts))
        for piece in (64, 100, 101):
            with mock.patch.object(text_files, "PIECE", piece):
                got = list(text_files.Text([path], text_files.Report(False)))
            self.assertEqual([i for i, (first, _) in enumerate(got) if first][0], 0)
            self.assertEqual(sum(first for first, _ in got), 3)
            self.assertEqual("".join(text.decode() for _, text in got), "".join(texts))
            self.assertLessEqual(max(len(text) for _, text in got), 2 * piece)


class Formats(Prepare):
    def read(self, path, *options):
        self.run_it(path, "--val-fraction", "0", "--overwrite", *options)
        return [document.decode() for document in self.documents("train")]


    def test_json_lines(self):
        data = lines_of(TEXTS)
        self.assertEqual(self.read(self.write("a.jsonl", data)), TEXTS)
        self.assertEqual(self.read(self.write("a.jsonl.gz", gzip.compress(data))), TEXTS)
        self.assertEqual(self.read(self.write("a.jsonl.xz", lzma.compress(data))), TEXTS)
        # Blank lines and blank texts are no documents.
        blank = b"\n" + data.replace(b"\n", b"\r\n\n").rstrip() + b'\n{"text": " \\n"}'
        self.assertEqual(self.read(self.write("a.jsonl", blank)), TEXTS)
        self.assertEqual(self.read(self.write("b.jsonl", lines_of(TEXTS, "content")), "--field", "content"), TEXTS)
        self.assertEqual(self.read(self.folder, "--glob", "a.jsonl"), TEXTS * 3)  # compressed or not
        self.assertEqual(self.read(self.write("d.ndjson", lines_of(TEXTS, "content")), "--field", "content"), TEXTS)
        plain = self.write("e.txt", lines_of(TEXTS))
        self.fails(plain, "--field", "content", "--overwrite", says="--field is for records, and no input has them")
        nested = b'{"data": {"text": {"en": "deep"}}}\n{"data.text.en": "flat", "data": 1}\n'
        self.assertEqual(self.read(self.write("n.jsonl", nested), "--field", "data.text.en"), ["deep", "flat"])
        # --split-on does not cut records.
        self.assertEqual(self.read(self.write("c.jsonl", lines_of(["a|b"])), "--split-on", "|"), ["a|b"])

    def test_json(self):
        """A .json has records in lines, or is left out."""
        data = lines_of(TEXTS)
        for name, packed in (("a.json", data), ("b.json.gz", gzip.compress(data)), ("c.JSON.xz", lzma.compress(data))):
            self.assertEqual(self.read(self.write(f"d/{name}", packed)), TEXTS)
        d, none = os.path.join(self.folder, "d"), "no record has a text; --field names its field"
        array = "a JSON array; records are JSON objects, one a line: jq -c '.[]' makes them"
        for name, whole, says in (("array.json", b'[\n{"text": "a"},\n{"text": "b"}\n]\n', array), ("line.json", b'[{"text": "a"}]', none),
                                  ("object.json", b'{\n "text": "a"\n}\n', none), ("settings.json", b'{"name": "no record"}', none)):
            path = self.write(f"d/{name}", whole)
            self.fails(path, "--overwrite", says=f"error: {path}: {says}")
        printed = self.run_it(d, "--glob", "*.json", "--val-fraction", "0", "--overwrite")
        self.assertEqual([d.decode() for d in self.documents("train")], TEXTS * 3)
        self.assertIn(f"1 left out ({array}), such as {d}/array.json\n", printed)
        self.assertIn(f"3 left out ({none}), such as {d}/line.json\n", printed)
        self.assertIn(f"5 records left out, such as {d}/line.json: line 1: not a JSON object", printed)

    def test_bad_records_are_left_out(self):
        good = lines_of(["good"])
        for line, says in ((b"{bad", "line 2: not JSON (Expecting property name enclosed in double quotes: line 1 "
                                     "column 2 (char 1))"),
                           (b'{"text": "cut', "line 2: not JSON (Invalid control character at"),
                           (b'{"text": "\xff"}', "line 2: not JSON ('utf-8' codec can't decode byte 0xff"),
                           (b"[" * 100000, "line 2: not JSON (maximum recursion depth"),
                           (b'["text"]', "line 2: not a JSON object"),
                           (b'"text"', "line 2: not a JSON object"),
                           (b"{}", "line 2: no field 'text'; it has none; choose with --field"),
                           (b'{"id": 1, "t\xc3\xa9xt": ""}', "line 2: no field 'text'; it has 'id', 't\\xe9xt'; "),
                           (b'{"text": 12}', "line 2: field 'text' holds 12, not a string"),
                           (b'{"text": null}', "line 2: field 'text' holds None, not a string"),
                           (b'{"text": ["a"]}', "line 2: field 'text' holds ['a'], not a string")):
            path = self.write("bad.jsonl", good + line + b"\n" + good + line)
            printed = self.run_it(path, "--val-fraction", "0", "--overwrite")
            self.assertEqual(self.documents("train"), [b"good", b"good"])
            self.assertEqual(printed.count(f"prepare_text.py: 2 records left out, such as {path}: {says}"), 1)
            self.fails(path, "--strict", "--overwrite", says=f"error: {path}: {says}")
            alone = self.write("alone.jsonl", line + b"\n" + line)  # as with a wrong --field
            self.fails(alone, "--overwrite", says=f"error: {alone}: no record has a text; --field names its field")
            self.fails(alone, "--overwrite", says=f"2 records left out, such as {alone}: {says.replace('line 2', 'line 1')}")
        with mock.patch.object(text_files, "MAX_LINE", 30):
            path = self.write("bad.jsonl", good + lines_of(["x" * 30, "y" * 49]) + good)
            self.assertIn(f"2 records left out, such as {path}: line 2: longer than 30 bytes",
                          self.run_it(path, "--val-fraction", "0", "--overwrite"))
            self.assertEqual(self.documents("train"), [b"good", b"good"])
        # They are counted once, though text is read twice, and in both splits.
        path = self.write("bad.jsonl", lines_of(["good %d" % i for i in range(50)]) + b"{bad\n")
        copy = self.write("copy.jsonl", lines_of(["good %d" % i for i in range(50)]) + b"{bad\n")
        self.assertIn("prepare_text.py: 2 records left out, such as ", self.run_it(path, copy, "--overwrite"))
        self.assertIn("prepare_text.py: 2 records left out, such as ", self.run_it(path, "--val", copy, "--overwrite"))

    @unittest.skipUnless(zstandard, "the zstandard package is not installed")
    def test_zstd(self):
        pack = zstandard.ZstdCompressor().compress
        noise = "".join(random.Random(3).choices("abcdefgh\n", k=1 << 20))  # more than one read
        whole = pack(noise.encode())
        self.assertEqual(self.read(self.write("a.txt.zst", whole)), [noise])
        self.assertEqual(self.read(self.write("a.jsonl.zst", pack(lines_of(TEXTS)))), TEXTS)
        frames = pack(b"one ") + pack(b"") + pack(b"two ") + whole  # any number of frames
        self.assertEqual(self.read(self.write("a.txt.zst", frames)), ["one two " + noise])
        for data in (whole[:-1], whole[:len(whole) // 2], whole + whole[:3], frames[:-4], whole + b"more", b"not zstd"):
            path = self.write("bad.txt.zst", data)
            self.fails(path, "--overwrite", says=f"error: {path}: {text_files.DAMAGED}")
        parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=30, enable_ldm=True)
        stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()  # no size in the header: a whole window
        packed = stream.compress(b"long window") + stream.flush()
        self.assertEqual(self.read(self.write("a.txt.zst", packed)), ["long window"])

    @unittest.skipUnless(zstandard, "the zstandard package is not installed")
    def test_zstd_that_packs_well(self):
        """Little of the text of a frame is in memory at a time."""
        frame, size = zstandard.ZstdCompressor().compress(bytes(400 << 20)), 0
        tracemalloc.start()
        with io.BufferedReader(text_files.Chunks(text_files.unpacked(io.BytesIO(frame), text_files.zstd)), text_files.PIECE) as file:
            while text := file.read(text_files.PIECE):
                size += len(text)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        self.assertEqual(size, 400 << 20)
        # 1 KiB of the file has 256 blocks at most, of 128 KiB. A call of the package joins parts of them once: twice 32 MiB.
        self.assertLess(most, 80 << 20)

    @unittest.skipUnless(pyarrow, "the pyarrow package is not installed")
    def test_parquet(self):
        path = os.path.join(self.folder, "a.parquet")
        for kind in (pyarrow.string(), pyarrow.large_string()):
            texts = [f"document {i} ü" for i in range(1000)] + TEXTS + [" \n"]
            table = pyarrow.table({"id": range(len(texts)), "text": pyarrow.array(texts, kind)})
            pyarrow.parquet.write_table(table, path, row_group_size=300, compression="zstd")
            self.assertEqual(self.read(path), texts[:-1])
            self.fails(path, "--field", "body", "--overwrite",
                       says=f"error: {path}: no column 'body' of strings; it has 'text'; choose with --field")
            self.fails(path, "--field", "id", "--overwrite", says=f"error: {path}: no column 'id' of strings")
        for kind in (pyarrow.string(), pyarrow.binary()):
            null = [pyarrow.array(["a", "b", None, "c"], kind)]
            pyarrow.parquet.write_table(pyarrow.table(null, ["text"]), path)
            says = f"{path}: row 3: field 'text' holds None, not a string"
            self.assertIn(f"1 records left out, such as {says}\n", self.run_it(path, "--val-fraction", "0", "--overwrite"))
            self.assertEqual(self.documents("train"), [b"a", b"b", b"c"])
            self.fails(path, "--strict", "--overwrite", says=f"error: {says}")
        with open(path, "rb") as file:
            data = file.read()
        for bad in (b"", b"no parquet", data[:-9], data[:40] + b"x" * 40 + data[80:]):
            self.fails(self.write("a.parquet", bad), "--overwrite", says=f"error: {path}: {text_files.DAMAGED}")

    @unittest.skipUnless(pyarrow, "the pyarrow package is not installed")
    def test_columns_of_parquet(self):
        """Strings, bytes, dictionaries of them, and fields of fields."""
        path, texts = os.path.join(self.folder, "a.parquet"), ["one", "ü", "one", "four"]
        data = [text.encode() for text in texts]
        inside = [{"text": text, "more": {"en": text}} for text in texts]
        columns = {"s": texts, "b": data, "l": pyarrow.array(data, pyarrow.large_binary()), "d": pyarrow.array(texts).dictionary_encode(),
                   "e": pyarrow.array(data).dictionary_encode(), "data": inside, "n": [None, *inside[1:]], "n.flat": texts,
                   "i": range(4), "image": [b"\xff\xd8"] * 4, "list": [["text"]] * 4}
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        for field in ("s", "b", "l", "d", "e", "data.text", "data.more.en", "n.flat"):
            self.assertEqual(self.read(path, "--field", field), texts, field)
        self.assertEqual(self.read(path, "--field", "n.text"), texts[1:])  # the first is null
        for field in ("i", "data", "list", "data.none", "s.text"):
            self.fails(path, "--field", field, "--overwrite", says=f"error: {path}: no column {field!r} of strings; it has 's', 'b', 'l'")
        self.fails(path, "--field", "image", "--overwrite", says=f"4 records left out, such as {path}: row 1: 'utf-8' codec can't decode byte 0xff")
        # In a folder such a file is left out.
        self.write("good.jsonl", lines_of(["good"]))
        self.assertEqual(self.read(self.folder, "--glob", "*.parquet", "*.jsonl"), ["good"])
        printed = self.run_it(self.folder, "--val-fraction", "0", "--overwrite")
        self.assertRegex(printed, rf"1 left out \(no column 'text' of strings; it has 's', .*; choose with --field\), such as {path}\n")

    def test_csv(self):
        """A row of a .csv is a document, by the names in its first row."""
        path = self.write("a.csv", '\ufeffid,text\r\n1,"two\nlines, ""ü"""\r\n\r\n2,\r\n3,NA\r\n4,12\r\n'.encode())
        self.assertEqual(self.read(path), ['two\nlines, "ü"', "NA", "12"])
        self.assertEqual(self.read(self.write("b.csv.gz", gzip.compress(b"body\na\nb\n")), "--field", "body"), ["a", "b"])
        path = self.write("c.csv", b"id,text\n1,a\n2,a, b\n3\n4,\xe4\n5,c\n")
        printed, says = self.run_it(path, "--val-fraction", "0", "--overwrite"), f"{path}: row 2: not a JSON object, or not as many fields as columns\n"
        self.assertIn(f"3 records left out, such as {says}", printed)
        self.assertEqual(self.documents("train"), [b"a", b"c"])
        self.fails(path, "--strict", "--overwrite", says=f"error: {says}")
        for data, says in ((b"", "no column 'text' of strings; it has none; choose"), (b"id\na\n", "no column 'text' of strings; it has 'id'; choose"),
                           (b'text\na\n"cut', text_files.DAMAGED), (b'text\n"a"b\n', text_files.DAMAGED)):
            self.fails(self.write("bad.csv", data), "--overwrite", says=f"bad.csv: {says}")

    @unittest.skipUnless(datasets, "the datasets package is not installed")
    def test_a_set_of_the_hub(self):
        """OWNER/SET that is no path, with a folder in place of the network: a set of two configurations."""
        texts, load, calls = [f"document {i}" for i in range(3000)], datasets.load_dataset, []
        self.write("set/README.md", b"""---
configs:
- {config_name: default, data_files: [{split: train, path: a.parquet}]}
- {config_name: 10BT, data_files: [{split: test, path: b.parquet}]}
---
""")
        for name, rows in (("a", texts), ("b", [*texts, None])):
            columns = {"id": range(len(rows)), "text": rows, "data": [{"text": text} for text in rows]}
            pyarrow.parquet.write_table(pyarrow.table(columns), os.path.join(self.folder, f"set/{name}.parquet"))

        def load_from_folder(*names, **options):
            calls.append((*names, options["split"], options["streaming"]))
            if names[0] == "owner/none":
                raise FileNotFoundError("Dataset 'owner/none' doesn't exist on the Hub or cannot be accessed.")
            return load(os.path.join(self.folder, "set"), *names[1:], **options)

        with mock.patch.object(datasets, "load_dataset", load_from_folder):
            for field in ("text", "data.text"):
                printed = self.run_it("owner/a.set", "--config", "10BT", "--split", "test", "--field", field, "--val-fraction", "0.1", "--overwrite")
                train, val = ([d.decode() for d in self.documents(split)] for split in ("train", "val"))
                self.assertEqual(sorted(train + val), sorted(texts))
                self.assertGreater(len(val), 200)
                self.assertIn(f"1 records left out, such as owner/a.set: row 3001: field '{field}' holds None", printed)
            self.assertEqual(calls, [("owner/a.set", "10BT", "test", True)] * 4)  # for the share of validation, and for the text
            self.run_it("owner/a.set", self.write("b.txt", b"beside"), "--val-fraction", "0", "--overwrite")
            self.assertEqual([d.decode() for d in self.documents("train")], texts + ["beside"])
            self.assertEqual(calls[4:], [("owner/a.set", None, "train", True)])
            for name, options, says in (("owner/none", (), "Dataset 'owner/none' doesn't exist"), ("owner/a.set", ("--split", "test"), "Bad split: test"),
                                        ("owner/a.set", ("--field", "body"), "Column name ['body'] not in the dataset. Columns in the dataset: ['id', ")):
                self.fails(name, *options, "--overwrite", says=f"error: {name}: no file, and as a data set of the Hub: {says}")
            with mock.patch.object(prepare_text, "make_tokenizer", lambda *_: SlowTokenizer()), \
                    mock.patch.object(prepare_text, "encode", side_effect=prepare_text.encode) as encode:
                self.run_it("owner/a.set", "--jobs", "3", "--overwrite")
            self.assertEqual(encode.call_args.args[2], 3)  # its size is not known
        self.fails(self.write("a.txt", b"text"), "--config", "10BT", "--overwrite", says="--config and --split are for a data set of the Hub, OWNER/SET")
        self.fails(self.folder, "--val", "owner/a.set", "--overwrite", says="error: owner/a.set: No such file or directory")

    def test_missing_packages(self):
        with mock.patch.dict(sys.modules, {"zstandard": None, "pyarrow": None, "datasets": None}):
            for name, says in (("a.txt.zst", "error: a .zst file needs the zstandard package: pip install zstandard"),
                               ("a.parquet", "error: a .parquet file needs the pyarrow package: pip install pyarrow")):
                self.fails(self.write(name, b"packed"), says=says)
            self.fails("owner/set", says="error: owner/set: no file; a data set of the Hub needs the datasets package: pip install datasets")

    def test_damaged_files_are_left_out(self):
        """A torn file, or one that is not what its name says, is left out as a whole and named, wherever it comes from."""
        texts = ["%d " % i + os.urandom(200).hex() for i in range(300)]
        whole, records = lzma.compress(os.urandom(50000).hex().encode()), gzip.compress(lines_of(texts))
        bad = {"a.txt.xz": whole[:30000], "b.txt.gz": b"not gzip", "c.txt.gz": b"", "c.txt.xz": b"", "d.jsonl.gz": records[:-9],
               "e.jsonl.xz": records, "e.md.xz": whole + b"junk", "e.txt.xz": whole + b"\0" * 4 + whole[1:],
               "f.md.gz": gzip.compress(b"text\n" * 10000)[:-5] + b"\0crc!"}
        if zstandard:
            bad |= {"g.jsonl.zst": zstandard.ZstdCompressor().compress(lines_of(texts))[:-9], "g.txt.zst": b""}
        bad |= {"g0.csv": b'text\na\n"cut'}
        if pyarrow:
            table = io.BytesIO()
            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), table, row_group_size=100)
            data = table.getvalue()
            bad |= {"h.parquet": data[:-9], "i.parquet": records, "j.parquet": data[:-20000] + b"x" * 9000 + data[-11000:]}
        self.write("d/good.txt", b"text\n")
        paths, d = [self.write(f"d/{name}", data) for name, data in bad.items()], os.path.join(self.folder, "d")
        said = f"prepare_text.py: {len(bad)} left out (not readable to the end: damaged, or not what the name says): "
        with mock.patch.object(text_files, "PIECE", 1000):
            for inputs in ([d], [os.path.join(d, "good.txt"), *paths]):
                printed = self.run_it(*inputs, "--val-fraction", "0", "--overwrite")
                self.assertIn(said + ", ".join(paths) + "\n", printed)
                self.assertEqual(self.documents("train"), [b"text\n"])
        for path in paths:
            self.fails(path, os.path.join(d, "good.txt"), "--strict", "--overwrite", says=f"error: {path}: {text_files.DAMAGED}")
            self.fails(path, "--overwrite", says=f"error: {path}: {text_files.DAMAGED}")  # nothing is left
            self.fails(os.path.join(d, "good.txt"), "--val", path, "--overwrite", says=f"error: {path}: {text_files.DAMAGED}")

    def test_streams_of_xz(self):
        """A file of several streams, with NULs between them and behind, is read to its end."""
        one, two = lzma.compress(b"first\n"), lzma.compress(b"second\n")
        for size in (7, 1000, 1 << 20):
            with mock.patch.object(text_files, "PIECE", size):
                for data in (one + two, one + b"\0" * 4 + two + b"\0" * 8):
                    self.run_it(self.write("a.txt.xz", data), "--val-fraction", "0", "--overwrite", "--strict")
                    self.assertEqual(self.documents("train"), [b"first\nsecond\n"])

    def test_a_disk_that_fails_is_no_damage(self):
        path, good = self.write("a.txt.gz", gzip.compress(b"text\n" * 1000)), self.write("good.txt", b"text\n" * 100)
        with mock.patch.object(text_files, "unpacked", side_effect=OSError(errno.EIO, os.strerror(errno.EIO))):
            self.fails(good, path, "--val-fraction", "0", says=f"error: {path}: cannot read: [Errno 5] Input/output error")

    def test_damage_that_comes_later(self):
        """A file is not left out when some of its text is in use."""
        path = self.write("a.jsonl.gz", gzip.compress(lines_of(["%d" % i for i in range(3000)]))[:-9])
        with mock.patch.object(text_files.Text, "read_once"), mock.patch.object(text_files, "PIECE", 1000):
            self.fails(self.write("b.txt", b"text"), path, "--val-fraction", "0", says=f"error: {path}: cannot read: it ends within a stream")

    def test_damaged_gzip(self):
        """Damage in any byte leaves the file out, or the text that the library decodes."""
        whole, decoded = gzip.compress(b"some text, more text, other text\n" * 20), 0
        for at in range(len(whole)):
            path = self.write("a.txt.gz", whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1:])
            text = text_files.Text([path], text_files.Report(False))
            given = list(text)
            self.assertEqual(text.report.left_out, {} if given else {path: text_files.DAMAGED})
            decoded += bool(given)
        self.assertLess(decoded, 9)  # time, system and flags of the header


class NotText(Prepare):
    def test_nul(self):
        for at in (0, 999, 5000, 12345):
            data = bytearray("ü€ text\n".encode() * 2000)
            data[at] = 0
            with mock.patch.object(text_files, "PIECE", 4096):
                path = self.write("a.txt", data)
                self.fails(path, says=f"error: {path}: NUL bytes: not text")
                path = self.write("a.txt.gz", gzip.compress(data))
                self.fails(path, "--split-on", "text", says=f"error: {path}: NUL bytes: not text")
        path = self.write("a.txt", "UTF-16 has NULs".encode("utf-16-le"))
        self.fails(path, says=f"error: {path}: NUL bytes: not text, or packed under another name, or in UTF-16, from which iconv converts")

    def test_utf_16_and_32(self):
        """Text and records in them are left out as a whole, with a mark at the beginning and without."""
        records = "".join('{"text": "%d: 中国 and 日本"}\n' % i for i in range(100))
        marked, unmarked = ("utf-16", "utf-32"), ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")
        files = {f"{code}{end}": records.encode(code) for code in marked + unmarked for end in (".jsonl", ".ndjson", ".json", ".txt")}
        files |= {f"{code}-mark{end}": ("\ufeff" + records).encode(code) for code in unmarked for end in (".jsonl", ".txt")}
        files |= {f"text-{code}.txt": "plain text, 中国\n".encode(code) for code in marked}
        files |= {"packed.jsonl.gz": gzip.compress(records.encode("utf-16"))}
        paths = [self.write(f"d/{name}", data) for name, data in files.items()]
        good = self.write("good.txt", b"text\n")
        for inputs in ([good, *paths], [os.path.join(self.folder, "d"), good, "--glob", "*.*"]):
            printed = self.run_it(*inputs, "--val-fraction", "0", "--overwrite")
            self.assertEqual(self.documents("train"), [b"text\n"])
            self.assertEqual(sum(int(n) for n in re.findall(r": (\d+) left out \((?!a file counts once)", printed)), len(paths))
        for path in paths:
            self.fails(path, "--overwrite", says=f"error: {path}: ")

    def test_records_are_utf_8(self):
        """A line of a record is UTF-8, whatever its first bytes are; a mark of UTF-8 is no part of it."""
        good = lines_of(["中国"])
        for bad in ('{"text": "中国"}'.encode("utf-16-le"), '\ufeff{"text": "中国"}'.encode("utf-16-be"), bytes(40), b"\0" * 3 + b'{"text": "a"}'):
            for data in (good + bad.replace(b"\n", b"") + b"\n" + good, good + good + bad, b"\n" + bad + b"\n" + good + good):
                path = self.write("a.jsonl", data)
                self.assertIn("prepare_text.py: 1 records left out", self.run_it(path, "--val-fraction", "0", "--overwrite"))
                self.assertEqual([d.decode() for d in self.documents("train")], ["中国"] * 2)
        path = self.write("a.jsonl", b"\xef\xbb\xbf" + good + b"\xef\xbb\xbf" + good)
        self.assertNotIn("left out", self.run_it(path, "--val-fraction", "0", "--overwrite"))
        self.assertEqual([d.decode() for d in self.documents("train")], ["中国"] * 2)

    def test_other_encodings(self):
        latin, says = "Text mit Umlauten: äöü.\n".encode("latin-1"), "more than a byte in 1000 is not UTF-8: not text, or in another encoding"
        path = self.write("a.txt", latin * 100)
        self.fails(path, says=f"error: {path}: {says}")
        with mock.patch.object(text_files, "PIECE", 4096):  # far into a file with a good start
            printed = self.run_it(self.write("a.txt", b"\xff" + "ä.".encode() * 9000 + latin * 1000), expect=1)
        self.assertIn(f"error: {path}: {says}", printed)
        self.assertNotIn("places that are not UTF-8", printed)  # of text that is left out
        self.fails(self.write("a.txt", random.Random(4).randbytes(10000).replace(b"\0", b"x")), says=f"error: {path}: {says}")

    def test_damage(self):
        """A few damaged places are reported, and byte tokens keep them, for any ends of chunks."""
        data = bytearray("ü€ text\n".encode() * 4000)
        for at in (3, 20000, 37777):
            data[at] = 0xFF
        data += "€".encode()[:2]  # an incomplete character at the end
        line = "prepare_text.py: {} places that are not UTF-8 (bytes keep them, other tokenizers read U+FFFD), such as {}\n"
        for piece in (4096, 4097, 4098, 4099, 1 << 20):
            with mock.patch.object(text_files, "PIECE", piece):
                path = self.write("a.txt", data)
                printed = self.run_it(path, "--val-fraction", "0", "--overwrite")
            damaged = bytes(data).decode("utf-8", "replace").count("\ufffd")
            self.assertIn(line.format(damaged, path), printed)
            self.assertEqual(self.documents("train"), [bytes(data)])
        path = self.write("a.jsonl", lines_of(["half of a pair: \ud800", "good"]))
        self.assertIn(line.format(3, path), self.run_it(path, "--val-fraction", "0", "--overwrite"))

    def test_replacement_character_is_no_damage(self):
        text = "\ufffd is a character\n".encode() * 100
        self.assertNotIn("not UTF-8", self.run_it(self.write("b.txt", text)))
        self.assertIn("prepare_text.py: 1 places that are not UTF-8", self.run_it(self.write("b.txt", text + b"\xff\n"), "--overwrite"))


class Changes(Prepare):
    """A file that is read twice and changes meanwhile gives an error."""

    def changed(self, path, change, *arguments):
        read, calls = text_files.Text.documents, []

        def documents(text, path):
            calls.append(path)
            if len(calls) == 2:
                change()
            yield from read(text, path)

        with mock.patch.object(text_files.Text, "documents", documents):
            self.fails(path, *arguments, says=f"error: {path}: it changes while it is read; start again when nothing writes to it")

    def test_between_two_readings(self):
        for name, data in (("a.txt", b"text\n" * 1000), ("a.jsonl", lines_of(["text %d" % i for i in range(300)]))):
            for size in (0, 1000, 1 << 20):
                path = self.write(name, data)
                self.changed(path, lambda path=path, size=size: os.truncate(path, size))
            path = self.write(name, data)
            self.changed(path, lambda path=path: os.utime(path, ns=(1, 1)))

    def test_a_file_that_grows(self):
        """Each chunk that is read makes the file longer, up to a limit that a reading without end would reach."""
        def documents(text, path):
            for item in read(text, path):
                if os.path.getsize(path) < 1 << 20:
                    with open(path, "ab") as file:
                        file.write(b"more text\n" * 100)
                yield item

        read = text_files.Text.documents
        with mock.patch.object(text_files, "PIECE", 500), mock.patch.object(text_files.Text, "documents", documents):
            path = self.write("a.txt", b"text\n" * 1000)
            self.fails(path, "--val-fraction", "0", says=f"error: {path}: it changes while it is read")
        self.assertLess(os.path.getsize(path), 1 << 20)


class Left(Prepare):
    """Files and links that are left out."""

    def folder_of_all(self):
        """A folder with two files of text and others, and the lines that are printed for the others."""
        d, damaged = os.path.join(self.folder, "d"), b"a byte in a thousand may be \xff\n" + b"text\n" * 200
        for name, data in (("a.txt", damaged), ("z.txt.gz", gzip.compress(b"last\n")), ("b.txt", b"text " * 3000 + b"\0"),
                           ("manual.txt.gz", gzip.compress(b"%PDF-1.5\n" + bytes(range(256)) * 9)),
                           ("latin.txt", "Text mit Umlauten: äöü.\n".encode("latin-1") * 100)):
            self.write(f"d/{name}", data)
        os.symlink("nothing", os.path.join(d, "dangling.txt"))
        os.symlink(self.folder, os.path.join(d, "up"))
        nul = r"NUL bytes: not text, or packed under another name, or in UTF-16, from which iconv converts; tr -d '\000' takes them out of text"
        said = [f"prepare_text.py: {n} {kind}, such as {d}/{name}\n" for n, kind, name in (
            (1, "left out (a link that leads nowhere)", "dangling.txt"), (1, "left out (a link to a folder)", "up"),
            (1, "places that are not UTF-8 (bytes keep them, other tokenizers read U+FFFD)", "a.txt"), (2, f"left out ({nul})", "b.txt"),
            (1, "left out (more than a byte in 1000 is not UTF-8: not text, or in another encoding, from which iconv converts)", "latin.txt"))]
        return d, damaged, said

    def test_a_line_for_each_reason(self):
        d, damaged, said = self.folder_of_all()
        for jobs, piece in (("1", 4 << 20), ("3", 4 << 20), ("1", 4096)):
            with mock.patch.object(text_files, "PIECE", piece):
                printed = self.run_it(d, "--val-fraction", "0", "--overwrite", "--jobs", jobs)
            self.assertTrue(printed.startswith("".join(said)), printed)
            self.assertEqual(self.documents("train"), [damaged, b"last\n"])
        # A file is checked only once, even if the text is read twice, as for the share of validation here.
        with mock.patch.object(text_files.Text, "whole_characters", autospec=True, side_effect=text_files.Text.whole_characters) as read:
            self.assertTrue(self.run_it(d, "--overwrite").startswith("".join(said)))
        self.assertEqual(len([call for call in read.call_args_list if call.args[1].endswith("b.txt")]), 1)

    def test_strict(self):
        d, _, said = self.folder_of_all()
        for name, says in (("dangling.txt", "a link that leads nowhere"), ("up", "a link to a folder"), ("b.txt", "NUL bytes: not text"),
                           ("latin.txt", "more than a byte in 1000 is not UTF-8"), ("manual.txt.gz", "NUL bytes: not text")):
            self.fails(d, "--strict", says=f"error: {d}/{name}: {says}")
            os.remove(os.path.join(d, name))
        self.run_it(d, "--strict")

    def test_nothing_is_left(self):
        """The first file that was left out is the error."""
        d, *_ = self.folder_of_all()
        for name in ("a.txt", "z.txt.gz"):
            os.remove(os.path.join(d, name))
        self.fails(d, "--overwrite", says=f"error: {d}/b.txt: NUL bytes: not text")

    def test_control_characters_in_names_are_not_printed(self):
        self.write("d/a.txt", b"text\n")
        self.write("d/\x1b]0;owned\x07\x9b.txt", b"\0")
        self.assertIn(r"such as %s/d/\x1b]0;owned\x07\x9b.txt" % self.folder,
                      self.run_it(os.path.join(self.folder, "d"), "--val-fraction", "0"))


class SlowTokenizer(text_tokenizers.LibraryTokenizer):
    """Characters as ids. Texts that begin with the first letters take longer, so results arrive out of order."""
    eot, eot_name = 0, "end"

    def __init__(self):
        super().__init__("slow", [b"x"] * 300)
        self.json = b"{}"

    def ids(self, texts):
        time.sleep(0.03 if texts and texts[0][:1] < "m" else 0)
        return [list(map(ord, text)) for text in texts]


class Jobs(Prepare):
    def run_slow(self, *arguments, tokenizer=SlowTokenizer, expect=0):
        with mock.patch.object(prepare_text, "make_tokenizer", lambda *_: tokenizer()), \
                mock.patch.object(prepare_text, "BATCH", 2000), mock.patch.object(text_files, "PIECE", 1000):
            return self.run_it(*arguments, "--overwrite", expect=expect)

    def corpus(self):
        rng = random.Random(5)
        texts = [chr(rng.randrange(97, 123)) + "y" * rng.randrange(1, 900) + "\n" for _ in range(200)]
        return self.write("a.jsonl", lines_of(texts + ["long" * 3000]))

    def test_same_shards(self):
        path, expected = self.corpus(), None
        for jobs in ("1", "2", "3", "7"):
            self.run_slow(path, "--jobs", jobs, "--shard-tokens", "9999", "--val-fraction", "0.1")
            found = {}
            for name in sorted(os.listdir(self.out)):
                with open(os.path.join(self.out, name), "rb") as file:
                    found[name] = file.read()
            expected = expected or found
            self.assertEqual(sorted(found), sorted(expected))
            for name in found:
                self.assertTrue(found[name] == expected[name], f"{name} differs with {jobs} jobs")
        self.assertGreater(len(expected), 10)

    def test_several_processes(self):
        """--jobs 3 encodes in three processes, all different from the main process."""
        seen = os.path.join(self.folder, "seen")
        os.mkdir(seen)

        class Tokenizer(SlowTokenizer):
            def ids(self, texts):
                open(os.path.join(seen, str(os.getpid())), "w", encoding="utf-8").close()
                time.sleep(0.02)
                return super().ids(texts)

        self.run_slow(self.corpus(), "--jobs", "3", tokenizer=Tokenizer)
        self.assertEqual(len(os.listdir(seen)), 3)
        self.assertNotIn(str(os.getpid()), os.listdir(seen))

    def test_failures(self):
        class Fails(SlowTokenizer):
            def ids(self, texts):
                raise BaseException("lost")  # like a panic of a library written in Rust

        class Killed(SlowTokenizer):
            def ids(self, texts):
                os.kill(os.getpid(), signal.SIGKILL)

        for tokenizer, says in ((Fails, "--tokenizer slow: cannot encode: lost"),
                                (Killed, "a process that encodes was killed")):
            printed = self.run_slow(self.corpus(), "--jobs", "2", tokenizer=tokenizer, expect=1)
            self.assertIn(f"prepare_text.py: error: {says}", printed)
            self.assertEqual(os.listdir(self.out), [])

    def test_none_are_left(self):
        """Worker processes end with the main process, even if it is killed."""
        script = f"""
import os, sys, time
sys.path[:0] = [{SCRIPTS!r}, {os.path.dirname(os.path.abspath(__file__))!r}]
sys.dont_write_bytecode = True
import prepare_text, test_text_files
class Tokenizer(test_text_files.SlowTokenizer):
    def ids(self, texts):
        os.write(1, b"%d\\n" % os.getpid())
        time.sleep(600)
prepare_text.make_tokenizer, prepare_text.BATCH = lambda *_: Tokenizer(), 2000
prepare_text.main([{self.corpus()!r}, "--jobs", "2", "--out", {self.out!r}])
"""
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, encoding="utf-8") as main:
            try:
                workers = [int(main.stdout.readline()) for _ in range(2)]
            finally:
                main.kill()
            self.assertEqual(len({main.pid, *workers}), 3)
            self.assertEqual(main.stdout.read(), "")  # ends when all writers have ended

    def test_progress(self):
        with mock.patch.object(prepare_text, "PROGRESS_S", 0):
            for jobs in ("1", "3"):
                lines = [line for line in self.run_slow(self.corpus(), "--jobs", jobs).splitlines() if "MB/s" in line]
                self.assertGreater(len(lines), 20)
                for line in lines:
                    self.assertRegex(line, r"^prepare_text.py: 0 MB of text, [\d.]+ MB/s$")
            blank = self.write("blank.jsonl", lines_of([" "]))
            self.assertIn("there is no text for train", self.run_slow(blank, "--val-fraction", "0", expect=1))
        self.assertNotIn("MB/s", self.run_slow(self.corpus()))  # short runs print no progress


if __name__ == "__main__":
    unittest.main(buffer=True)
