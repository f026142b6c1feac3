"""scripts/prepare_eval.py: python3 tests/data/test_prepare_eval.py (standard library; other tokenizers where installed).

The files are read here in the way of llm.c's EvalLoader, with independent code.
"""
import contextlib
import io
import json
import os
import pathlib
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
import zlib

SCRIPT = pathlib.Path(__file__).resolve().parent.parent.parent / "scripts" / "prepare_eval.py"
sys.path.insert(0, str(SCRIPT.parent))
sys.dont_write_bytecode = True
import prepare_eval  # noqa: E402
import prepare_text  # noqa: E402
from test_prepare import read_table  # noqa: E402

SLOW = True

try:
    import tokenizers
except ImportError:
    tokenizers = None

CASH = {"ind": 1, "activity_label": "Removing ice from car", "ctx_a": "Then, the man writes over the snow.",
        "ctx_b": "then the Man", "ctx": "Then, the man writes over the snow. then the Man", "split": "val", "label": 3,
        "endings": [", the man adds wax.", ", a person board a ski lift.", ", two men help.", ", the man continues."]}
HOW = {"ctx": "[header] How to bake [title] Heat the oven. [step] Set it to 180  degrees.", "label": "0",
       "endings": ["[substeps] Wait.", "Go  [title] Eat.", "Sing.", " Run. "]}
ARC = {"id": "M_1", "question": {"stem": "Which gas do plants take?", "choices": [
    {"text": "oxygen", "label": "A"}, {"text": "carbon dioxide", "label": "B"}, {"text": "neon", "label": "C"}]},
    "answerKey": "B"}
HUB_ARC = {"question": "Which is hot?", "answerKey": "2",
           "choices": {"text": ["ice", "fire", "snow", "air", "fog"], "label": list("12345")}}
PIQA = {"goal": "Open a jar", "sol1": "Twist the lid.", "sol2": "Twist the jar's floor.", "label": 1}
PLAIN = {"context": "2 + 2 =\t", "endings": ["4", " 5", "\n6"], "label": 2}


def read(path):
    """(bytes per word, [(label, context, [ending, ...])]); checks every field."""
    data = pathlib.Path(path).read_bytes()
    magic, version, count, longest = struct.unpack_from("<4i", data)
    assert version == 1 and data[20:1024] == bytes(1004)
    width = {20240522: 2, 20240802: 4}[magic]
    at, sizes, examples = 1024, [], []

    def take(n=1):
        nonlocal at
        words = struct.unpack_from(f"<{n}{'H' if width == 2 else 'I'}", data, at)
        at += n * width
        return words if n > 1 else words[0] if n else ()

    def text():
        n = take()
        return [take() for _ in range(n)]

    for i in range(count):
        begin = at
        start, size, index, label, endings = take(5)
        assert (start, index) == (2 ** (8 * width) - 1, i), (start, index)
        examples.append((label, text(), [text() for _ in range(endings)]))
        assert at - begin == size
        sizes.append(size)
    assert at == len(data) and longest == max(sizes)
    return width, examples


class Case(unittest.TestCase):
    def setUp(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="test_prepare_eval_"))
        self.addCleanup(shutil.rmtree, self.dir)
        self.out = self.dir / "eval.bin"

    def write(self, *rows, name="in.jsonl"):
        path = self.dir / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
        return path

    def run_it(self, *arguments, expect=0):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = prepare_eval.main([*map(str, arguments), "--out", str(self.out)])
        self.assertEqual(code, expect, printed.getvalue())
        return printed.getvalue()

    def fails(self, *arguments, says):
        printed = self.run_it(*arguments, expect=1)
        self.assertTrue(printed.splitlines()[-1].startswith("prepare_eval.py: error: "), printed)
        self.assertIn(says, printed)
        self.assertEqual((printed.count("error: "), self.out.exists()), (1, False))
        self.assertEqual(list(self.dir.glob("*.tmp")), [])


class Bytes(Case):
    def texts(self, *arguments):
        """The texts that the byte tokenizer got: [(label, context, endings)]."""
        self.run_it(*arguments)
        width, examples = read(self.out)
        self.assertEqual(width, 2)
        return [(label, bytes(context).decode(), [bytes(ending).decode() for ending in endings])
                for label, context, endings in examples]

    def test_kinds(self):
        got = self.texts(self.write(CASH, HOW, "", ARC, HUB_ARC, PIQA, PLAIN))
        self.assertEqual(got[0], (3, "Removing ice from car: Then, the man writes over the snow. Then the man",
                                  [" " + ending for ending in CASH["endings"]]))
        self.assertEqual(got[1], (0, " How to bake. Heat the oven. Set it to 180 degrees.",
                                  ["  Wait.", " Go . Eat.", " Sing.", " Run."]))
        self.assertEqual(got[2], (1, "Question: Which gas do plants take?\nAnswer:",
                                  [" oxygen", " carbon dioxide", " neon"]))
        self.assertEqual(got[3], (1, "Question: Which is hot?\nAnswer:", [" ice", " fire", " snow", " air", " fog"]))
        self.assertEqual(got[4], (1, "Question: Open a jar\nAnswer:", [" Twist the lid.", " Twist the jar's floor."]))
        self.assertEqual(got[5], (2, "2 + 2 =\t", [" 4", "  5", " \n6"]))

    def test_labels_of_a_file(self):
        rows = [{k: v for k, v in PIQA.items() if k != "label"}] * 3
        path, labels = self.write(*rows), self.write("1", "0", "1", name="labels.lst")
        self.assertEqual([label for label, _, _ in self.texts(path, "--labels", labels)], [1, 0, 1])
        self.out.unlink()
        self.fails(path, says="in.jsonl: example 1: the field 'label' is missing")
        self.fails(path, "--labels", self.write("1", name="one"), says="one: 1 labels for 3 examples")
        self.fails(path, "--labels", self.write("1", "0", "2", name="two"), says="example 3: label 2 of 2 endings")
        self.fails(self.write(HUB_ARC), "--labels", self.write("1", name="one"), says="lines of this kind have an answerKey")

    def test_what_is_there_already(self):
        """An existing file is replaced, but not an input, nor an existing file of the temporary name."""
        path, labels = self.write(PIQA), self.write("1", name="one")
        for out in (path, labels):
            self.out = out
            before = out.read_bytes()
            self.assertIn(f"--out {out} is an input", self.run_it(path, "--labels", labels, expect=1))
            self.assertEqual(out.read_bytes(), before)
        self.out = self.dir / "out.bin"
        beside = self.dir / "out.bin.tmp"
        beside.write_text("precious", "utf-8")
        self.assertIn(f"error: {beside} is there already; remove it, if a killed run left it\n", self.run_it(path, expect=1))
        self.assertEqual(beside.read_text("utf-8"), "precious")
        beside.unlink()
        for _ in range(2):
            self.run_it(path)

    def test_bad_examples_are_named(self):
        cases = [("{", "not JSON"), ("[1]", "not a JSON object"), ("[" * 100000, "not JSON"),
                 ({"a": 1}, "no known kind"), ({**CASH, "endings": None}, "not as this kind of example has it"),
                 ({**PLAIN, "endings": "abcd"}, "no list of texts"),
                 ({**PLAIN, "endings": ["a", 1]}, "no list of texts"),
                 ({**HOW, "endings": ["a", 1]}, "not as this kind of example has it"), ({**HOW, "label": ""}, "not as this kind of example has it"),
                 ({**HOW, "label": 4}, "label 4 of 4"), ({**HOW, "label": -1}, "label -1 of 4"),
                 ({**HOW, "label": True}, "label None"), ({**HOW, "label": 1.0}, "label None"),
                 ({**HOW, "ctx": "[step]"}, "the context is no text"),
                 ({**ARC, "answerKey": "D"}, "not as this kind of example has it"), ({**HUB_ARC, "choices": ["a"]}, "not as this kind of example has it"),
                 ({**PLAIN, "endings": ["4"]}, "of 1 endings"),
                 ({**PLAIN, "endings": ["4"] * 257}, "of 257 endings"),
                 ({**PLAIN, "context": 5}, "the context is no text"),
                 ({**PIQA, "goal": None}, "null is no text"), ({**HUB_ARC, "question": 5}, "5 is no text"),
                 ({**ARC, "question": {**ARC["question"], "stem": None}}, "null is no text"),
                 ({**CASH, "activity_label": None}, "null is no text"), ({**CASH, "ctx_a": ["a"]}, "is no text"),
                 ({"goal": "a", "sol1": "b", "label": 0}, "the field 'sol2' is missing")]
        for row, says in cases:
            path = self.write(PLAIN, row)
            self.fails(path, says=f"{path}: example 2: ")
            self.fails(path, says=says)
        self.fails(self.write(), says="no examples")
        self.fails("none.jsonl", says="none.jsonl: No such file")
        path = self.write(PLAIN)
        path.write_bytes(b'{"context": "\xff"}\n')
        self.fails(path, says="in.jsonl: not UTF-8 at byte 13")
        self.fails(self.write(PLAIN), "--tokenizer", "words", says="--tokenizer words")
        for abbreviated in (["--token", "bytes"], ["--label", "none"]):
            with self.assertRaises(SystemExit) as caught:
                self.run_it(path, *abbreviated)
            self.assertEqual(caught.exception.code, 2)

    def test_what_uint16_cannot_hold_is_uint32(self):
        """The largest example for uint16 and a larger one; the largest number of examples and one more."""
        for context, width in ((32755, 2), (32756, 4)):  # with 6 words before and 6 after: 65534 and 65536 bytes
            printed = self.run_it(self.write({"context": "x" * context, "endings": ["a", "b"], "label": 1}))
            self.assertIn(f"as uint{8 * width}", printed)
            self.assertEqual(read(self.out), (width, [(1, [120] * context, [[32, 97], [32, 98]])]))
        rows = [{"context": "a", "endings": ["b", "c"], "label": i % 2} for i in range(65536)]
        for count, width in ((65535, 2), (65536, 4)):
            self.run_it(self.write(*rows[:count]))
            got, examples = read(self.out)
            self.assertEqual((got, len(examples)), (width, count))
            self.assertEqual([label for label, _, _ in examples], [i % 2 for i in range(count)])

    def test_a_full_disk_leaves_nothing(self):
        path = self.write(*[PLAIN] * 1000)

        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

        done = subprocess.run([sys.executable, SCRIPT, path, "--out", self.out], preexec_fn=limit, capture_output=True,
                              encoding="utf-8")
        self.assertEqual((done.returncode, done.stderr), (1, f"prepare_eval.py: error: {self.out}: File too large\n"))
        self.assertEqual(os.listdir(self.dir), ["in.jsonl"])


@unittest.skipUnless(tokenizers, "the tokenizers package is not installed")
class Libraries(Case):
    """Comparison with the library itself."""

    def save(self, tokenizer):
        path = self.dir / "tokenizer.json"
        tokenizer.save(str(path))
        return f"tokenizers:{path}"

    def test_byte_level(self):
        """The tokens of an ending are those of the ending alone, as in llm.c's script."""
        t = tokenizers.Tokenizer(tokenizers.models.BPE())
        t.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False,
                                                 initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
        t.train_from_iterator([json.dumps([CASH, HOW, ARC, PIQA])], trainer)
        # More examples than a batch, each with other texts.
        rows = [{"context": f"{i}: the man writes", "endings": [f"over {i}", "snow é", "[x]"], "label": i % 3}
                for i in range(600)]
        self.run_it(self.write(*rows), "--tokenizer", self.save(t))
        width, examples = read(self.out)
        self.assertEqual((width, len(examples)), (2, 600))
        for row, (label, context, endings) in zip(rows, examples):
            self.assertEqual(label, row["label"])
            self.assertEqual(context, t.encode(row["context"]).ids)
            self.assertEqual(endings, [t.encode(" " + ending).ids for ending in row["endings"]])

    def test_an_ending_goes_on_where_the_context_ends(self):
        """A tokenizer that begins every text with a space adds none to an ending.

        Only the space after the context is there. A tokenizer that would merge the context and the ending encodes the
        ending alone."""
        vocab = {"</s>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, "▁b": 5, "<unk>": 6, "b▁a": 7}
        merges = [("▁", "a"), ("▁", "b")]
        t = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, unk_token="<unk>"))
        t.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("▁"),
                                                        tokenizers.normalizers.Replace(" ", "▁")])
        row = {"context": "a", "endings": ["b", "aa"], "label": 0}
        self.run_it(self.write(row), "--tokenizer", self.save(t))
        self.assertEqual(read(self.out)[1], [(0, [4], [[5], [4, 2]])])
        t = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("▁", "a"), ("b", "▁a")], unk_token="<unk>"))
        t.normalizer = tokenizers.normalizers.Replace(" ", "▁")
        self.run_it(self.write({"context": "ab", "endings": ["a", "b"], "label": 1}), "--tokenizer", self.save(t))
        self.assertEqual(read(self.out)[1], [(1, [2, 3], [[4], [1, 3]])])  # "ab a" is a, b▁a

    def test_large_vocabulary(self):
        for size, width in ((65536, 2), (65537, 4)):
            vocab = {"</s>": 0} | {f"w{i}": i for i in range(1, size)}
            t = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="</s>"))
            t.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
            last = size - 1
            row = {"context": f"w{last} w7", "endings": ["w1", f"w2 w{last}"], "label": 1}
            self.run_it(self.write(row), "--tokenizer", self.save(t))
            self.assertEqual(read(self.out), (width, [(1, [last, 7], [[1], [2, last]])]))

    def test_the_tokenizer_of_the_shards(self):
        """The CRC-32 in the header is that of the table which prepare_text.py writes, without the name of end of text and without tokens of more than 255
        bytes."""
        tokens = ["<unk>", "a", "</s>", "b" * 300, "ü" * 100, "b", "<eos>"]
        t = tokenizers.Tokenizer(tokenizers.models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
        t.add_special_tokens(["<eos>"])
        text, spec = self.write("a b", name="a.txt"), self.save(t)
        for options, eot in (((), "<eos>"), (("--eot", "a"), "a")):
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                done = prepare_text.main([str(text), "--out", str(self.dir), "--val-fraction", "0", "--overwrite", "--tokenizer", spec, *options])
            self.assertEqual(done, 0)
            table, end = read_table(self.dir / "text_tokenizer.bin")
            self.assertEqual((table, table[end]), ([token.encode() for token in tokens], eot.encode()))
            self.run_it(self.write({"context": "a", "endings": ["a", "b"], "label": 0}), "--tokenizer", spec, *options)
            crc, = struct.unpack_from("<I", self.out.read_bytes(), 16)
            short = [b"" if i == end or len(token) > 255 else token for i, token in enumerate(table)]
            self.assertEqual(crc, zlib.crc32(b"".join(bytes([len(token)]) + token for token in short)))

    def test_a_text_without_tokens(self):
        t = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "a": 1}, unk_token="</s>"))
        t.pre_tokenizer = tokenizers.pre_tokenizers.Split("x", "removed")
        t.normalizer = tokenizers.normalizers.Strip()
        for row in ({"context": "x", "endings": ["a", "a"], "label": 0},
                    {"context": "a", "endings": ["a", "x"], "label": 0},
                    {"context": "a", "endings": ["a", ""], "label": 0}):
            self.fails(self.write(PLAIN, row), "--tokenizer", self.save(t), says="makes no tokens")


if __name__ == "__main__":
    unittest.main()
