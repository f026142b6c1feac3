#!/usr/bin/env python3
"""Tests of the tokenizers of scripts/prepare_text.py and of the tokenizer.json written beside shards. Needs only the standard
library; those of other packages run where they are installed, and those packages say what is right."""
import json
import os
import random
import shutil
import sys
import unittest
from unittest import mock

from test_prepare import EOT, Prepare, read_table
import prepare_text
import text_tokenizers
import tokenizer_json

try:
    import tokenizers
except ImportError:
    tokenizers = None
try:
    import tiktoken
except ImportError:
    tiktoken = None
try:
    import transformers
except ImportError:
    transformers = None

os.environ["RUST_BACKTRACE"] = "0"  # panics are part of these tests

class Library(Prepare):
    """What tokenizers of libraries may do wrong, by one that does it."""

    def fails_with(self, ids, says, vocab=300):
        class Tokenizer(text_tokenizers.LibraryTokenizer):
            eot, eot_name = 0, "end"

            def ids(self, texts):
                return [ids() for _ in texts]

        path = self.write("a.txt", b"text\n" * 100)
        with mock.patch.object(prepare_text, "make_tokenizer", lambda *_: Tokenizer("odd.json", vocab)):
            self.fails(path, says=f"--tokenizer: odd.json: {says}")

    def test_ids(self):
        for vocab in (300, 70000):  # both widths
            self.fails_with(lambda: [1, vocab, 2], f"cannot encode: id {vocab} is outside of the vocabulary", vocab)
            self.fails_with(lambda: [2**40], f"cannot encode: id {2**40} is outside", vocab)

    def test_vocabulary(self):
        self.fails_with(list, "the vocabulary is empty", 0)
        self.fails_with(list, "a token has the id 16777216", 2**24 + 1)
        text_tokenizers.LibraryTokenizer("large.json", 2**24)

    def test_failure(self):
        class Panic(BaseException):
            """What libraries written in Rust raise."""

        for kind in (Panic, RuntimeError):
            def fail(kind=kind):
                raise kind("lost")

            self.fails_with(fail, "cannot encode: lost")

    def test_end_of_text_token_is_not_for_bytes(self):
        self.fails(self.write("a.txt", b"text"), "--eot", "</s>", says="--eot goes with --tokenizer tokenizers:FILE")


TEXT = "Hello, wörld! Ünï 😀 <|endoftext|> x = [1,  2]\n\ttabs\n" * 20


@unittest.skipUnless(tokenizers, "the tokenizers package is not installed")
class HuggingFace(Prepare):
    def byte_level(self):
        t = tokenizers.Tokenizer(tokenizers.models.BPE())
        t.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        t.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>", "<|pad_é|>"], show_progress=False,
                                                 initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
        t.train_from_iterator([TEXT], trainer)
        t.enable_truncation(5)  # must not cut documents
        path = os.path.join(self.folder, "tokenizer.json")
        t.save(path)
        return path

    def test_byte_level(self):
        path = self.byte_level()
        a, b = self.write("a.txt", TEXT.encode()), self.write("b.txt", "second ✓".encode())
        printed = self.run_it(a, b, "--val-fraction", "0", "--tokenizer", f"tokenizers:{path}")
        table, eot = read_table(os.path.join(self.out, "text_tokenizer.bin"))
        self.assertEqual(table[eot], b"<|endoftext|>")
        self.assertIn("<|pad_é|>".encode(), table)
        tokens = self.tokens("train")
        starts = [i for i, t in enumerate(tokens) if t == eot]
        self.assertEqual(len(starts), 2)  # the text's own <|endoftext|> is text
        self.assertEqual(starts[0], 0)
        decoded = b"".join(table[t] for t in tokens[1: starts[1]])
        self.assertEqual(decoded.decode(), TEXT)
        self.assertEqual(b"".join(table[t] for t in tokens[starts[1] + 1:]).decode(), "second ✓")
        self.assertLess(len(tokens), len(TEXT))  # it merges
        self.assertIn(f"--vocab {len(table)}", printed)

    def test_sentencepiece_like(self):
        vocab = {"</s>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4} | {f"<0x{i:02X}>": 5 + i for i in range(256)}
        t = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("▁", "a")], byte_fallback=True))
        t.normalizer = tokenizers.normalizers.Replace(" ", "▁")
        d = tokenizers.decoders
        t.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse()])
        path = os.path.join(self.folder, "sp.json")
        t.save(path)
        text = "ab a é\n"
        self.run_it(self.write("a.txt", text.encode()), "--val-fraction", "0", "--tokenizer", f"tokenizers:{path}")
        table, eot = read_table(os.path.join(self.out, "text_tokenizer.bin"))
        tokens = self.tokens("train")
        self.assertEqual(tokens[0], eot)
        self.assertEqual(b"".join(table[t] for t in tokens[1:]).decode(), text)
        self.assertIn(4, tokens)

    def test_errors(self):
        a = self.write("a.txt", b"text")
        self.fails(a, "--tokenizer", "tokenizers:none.json", says="none.json: no such file")
        self.fails(a, "--tokenizer", f"tokenizers:{a}", says="not a tokenizer.json")
        for name in ("<none>", "\udcff"):
            self.fails(a, "--tokenizer", f"tokenizers:{self.byte_level()}", "--eot", name, says="name it with --eot")

    def test_odd_vocabularies(self):
        """Files that the library reads, but that no shards can be made with."""
        bytes_tokens = {character: i for i, character in enumerate(tokenizer_json.byte_level_alphabet())}
        but_one = {character: i for character, i in bytes_tokens.items() if character != "t"}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        added = {"id": 2**31, "content": "</s>", "special": True, "single_word": False, "lstrip": False,
                 "rstrip": False, "normalized": False}

        def bpe(vocab, **more):
            return {"type": "BPE", "vocab": vocab, "merges": [], **more}

        cases = [
            (dict(model=bpe({})), "the vocabulary is empty"),
            (dict(model={"type": "Unigram", "unk_id": None, "vocab": []}), "the vocabulary is empty"),
            (dict(model=bpe({"</s>": 0, "a": 10**9})), "a token has the id 1000000000"),
            (dict(model=bpe({"</s>": 0, "a": 2**31})), "a token has the id 2147483648"),
            (dict(model=bpe({"</s>": 0, "a": 2**24})), "a token has the id 16777216"),
            (dict(model=bpe({"</s>": 0, "a": 2**32})), "not a tokenizer.json"),
            (dict(model=bpe({"a": 0})), "no end-of-text token is named"),
            (dict(model=bpe({"</s>": 0, "a": 1})), "neither an unknown token nor tokens for 243 bytes"),
            (dict(model=bpe({"</s>": 0, "<0x0A>": 1}, byte_fallback=True)), "242 bytes, such as 0x00"),
            (dict(model=bpe({"</s>": 256, **bytes_tokens})), "243 bytes"),
            (dict(model=bpe({"</s>": 256, **bytes_tokens, "x": 257, "y": 258}), pre_tokenizer=level), None),
            (dict(model=bpe({"</s>": 256, **but_one}), pre_tokenizer=level), "1 bytes, such as 0x74"),
            (dict(model=bpe({"a": 0, "</s>": 1}, unk_token="[UNK]")), "cannot encode"),
            (dict(model=bpe({"a": 0, "</s>": 1}, unk_token="a")), None),
            (dict(model={"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": "[UNK]"}), "cannot encode"),
            (dict(model=bpe({"a": 0}, unk_token="a"), added_tokens=[added]), None),  # the library renumbers these
        ]
        a = self.write("a.txt", b"text\n" * 100)
        parts = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
        for config, says in cases:
            config = {"version": "1.0", "added_tokens": [], **parts, **config}
            path = self.write("odd.json", json.dumps(config).encode())
            with self.subTest(model=str(config["model"])[:100]):
                arguments = [a, "--tokenizer", f"tokenizers:{path}", "--overwrite"]
                if says:
                    self.fails(*arguments, says=f"--tokenizer: {path}: ")
                    self.fails(*arguments, says=says)
                else:
                    self.run_it(*arguments)


@unittest.skipUnless(tokenizers and tiktoken, "the tokenizers or tiktoken package is not installed")
class Engine(Prepare):
    """tiktoken's engine for a tokenizer.json, and where it must not be."""

    def train(self, size=400, special=("<|endoftext|>",), pre=None, **options):
        t = tokenizers.Tokenizer(tokenizers.models.BPE(**options))
        level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre is None)
        t.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*pre, level]) if pre else level
        t.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, special_tokens=list(special), show_progress=False,
                                                 initial_alphabet=level.alphabet())
        t.train_from_iterator([TEXT * 5, text_tokenizers.HARD_TEXT[-2000:]], trainer)
        return t

    def ids(self, tokenizer, text=TEXT, slow=False):
        """What the shards hold of a text, and what was printed. `tokenizers` may encode it only where that is expected."""
        path = os.path.join(self.folder, "tokenizer.json")
        tokenizer.save(path)
        encode = text_tokenizers.encode_slowly
        with mock.patch.object(text_tokenizers, "encode_slowly", side_effect=encode) as calls:
            printed = self.run_it(self.write("a.txt", text.encode()), "--val-fraction", "0", "--overwrite",
                                  "--tokenizer", f"tokenizers:{path}")
        # Once to compare; TEXT goes through once more where it stays with `tokenizers`.
        texts = [call.args[1] for call in calls.call_args_list]
        self.assertEqual([text] in texts, slow)
        self.assertEqual(" is encoded by `tokenizers`" in printed, slow)
        return self.tokens("train")[1:], printed

    def test_same_ids(self):
        split = tokenizers.pre_tokenizers.Split
        pattern = tokenizers.Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
        for t in (self.train(), self.train(300), self.train(special=("<s>", "<|endoftext|>", "<pad>")),
                  self.train(pre=[split(pattern, "isolated")]),
                  self.train(pre=[split(pattern, "isolated")], ignore_merges=True)):
            ids, _ = self.ids(t)
            t.encode_special_tokens = True
            self.assertEqual(ids, t.encode(TEXT).ids)
            self.assertLess(len(ids), len(TEXT))

    def test_trained_merges_follow_from_ranks(self):
        for size in (300, 500, 700):
            config = json.loads(self.train(size).to_str())
            _, ranks = tokenizer_json.tiktoken_parts(config)
            alphabet = tokenizer_json.byte_level_alphabet()
            expected = [tuple(bytes(alphabet[c] for c in part) for part in pair) for pair in config["model"]["merges"]]
            self.assertEqual(tokenizer_json.merges_of(ranks), expected)
            self.assertGreater(len(expected), 40)

    def test_unfit(self):
        """What tiktoken cannot stand for is encoded by `tokenizers`, with the ids that it gives."""
        pre, split = tokenizers.pre_tokenizers, tokenizers.pre_tokenizers.Split

        def changed(change):
            config = json.loads(self.train().to_str())
            change(config)
            return tokenizers.Tokenizer.from_str(json.dumps(config))

        def swap_merges(config):
            merges = config["model"]["merges"]
            merges[0], merges[1] = merges[1], merges[0]

        def swap_ids(config):
            vocab = config["model"]["vocab"]
            first, last = ("".join(config["model"]["merges"][i]) for i in (0, -1))
            vocab[first], vocab[last] = vocab[last], vocab[first]

        def no_special(config):
            config["added_tokens"][0]["special"] = False

        def lone_token(config):
            config["model"]["vocab"]["Hello,\u0120w"] = len(config["model"]["vocab"])

        normalized = self.train()
        normalized.normalizer = tokenizers.normalizers.NFKC()
        prefixed = self.train()
        prefixed.pre_tokenizer = pre.ByteLevel(add_prefix_space=True)
        for t, reason in ((normalized, "it normalizes text (NFKC)"), (prefixed, "puts a space before text"),
                          (changed(swap_merges), "merges are not those that follow"), (changed(swap_ids), "merges are not"),
                          (changed(no_special), "added tokens that are not special"), (changed(lone_token), "not 256 bytes and one"),
                          (self.train(pre=[pre.Digits(True)]), "it splits text by Digits"),
                          (self.train(pre=[split("a", "isolated"), pre.Digits(True)]), "it splits text in 2 steps"),
                          (self.train(pre=[split(tokenizers.Regex("a"), "removed")]), "it splits text by Split otherwise"),
                          # $ is the end of a line in one library, and of the text in the other.
                          (self.train(270, pre=[split(tokenizers.Regex(r"\s+$|\S+|\s"), "isolated")]), "other ids for a sample"),
                          # What a pattern leaves over is a piece in one library, and dropped by the other.
                          (self.train(270, pre=[split(tokenizers.Regex(r"\p{L}+"), "isolated")]), "other ids for a sample")):
            ids, printed = self.ids(t, slow=True)
            self.assertIn(reason, printed)
            t.encode_special_tokens = True
            self.assertEqual(ids, t.encode(TEXT).ids, reason)

    def test_sample_of_the_text(self):
        """Ids are compared for the text itself too: here of a character that HARD_TEXT lacks."""
        t = self.train(pre=[tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[^\x{20000}-\x{2FFFF}]+"), "isolated")])
        with mock.patch.object(text_tokenizers, "HARD_TEXT", "easy"):
            text = "rare: \U00020001"
            ids, printed = self.ids(t, text, slow=True)
        self.assertEqual(ids, t.encode(text).ids)

    def test_without_tiktoken(self):
        expected, _ = self.ids(self.train())
        with mock.patch.dict(sys.modules, {"tiktoken": None}):
            ids, printed = self.ids(self.train(), slow=True)
        self.assertIn("pip install tiktoken", printed)
        self.assertEqual(ids, expected)

    def test_panic(self):
        """A run of blanks that overflows the stack of tiktoken's regular expressions is encoded all the same."""
        t = self.train()
        encoding = tiktoken.Encoding("t", pat_str=tokenizer_json.GPT2_PATTERN, mergeable_ranks={bytes([i]): i for i in range(256)},
                                     special_tokens={})
        text = TEXT + " " * 1100000 + "end"
        with self.assertRaises(BaseException):
            encoding.encode_ordinary(text)
        path = os.path.join(self.folder, "tokenizer.json")
        t.save(path)
        tokenizer = text_tokenizers.make_tokenizer(f"tokenizers:{path}", None, lambda: [])
        self.assertIsNotNone(tokenizer.encoding)
        t.encode_special_tokens = True
        self.assertEqual(list(tokenizer.encode([text.encode()])), [text_tokenizers.pack(t.encode(text).ids, tokenizer.vocab)])


@unittest.skipUnless(tiktoken, "the tiktoken package is not installed")
class Tiktoken(Prepare):
    def test_encoding(self):
        ranks = {bytes([i]): i for i in range(256)} | {b"ab": 256, b"abc": 257}
        encoding = tiktoken.Encoding("tiny", pat_str=r"\s+|\S+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 300})
        with mock.patch.object(tiktoken, "get_encoding", lambda name: {"tiny": encoding}[name]):
            self.run_it(self.write("a.txt", b"abcab <|endoftext|>\xff" + b" " * 1000), "--val-fraction", "0", "--tokenizer", "tiktoken:tiny")
            self.fails(self.write("a.txt", b"abc"), "--tokenizer", "tiktoken:none", "--overwrite", says="tiktoken:none")
        table, eot = read_table(os.path.join(self.out, "text_tokenizer.bin"))
        self.assertEqual((len(table), eot, table[257], table[299], table[300]), (301, 300, b"abc", b"", b"<|endoftext|>"))
        tokens = self.tokens("train")
        self.assertEqual(tokens[:4], [300, 257, 256, 32])
        self.assertEqual(tokens.count(300), 1)
        self.assertEqual(b"".join(table[t] for t in tokens[1:]).decode(), "abcab <|endoftext|>\ufffd" + " " * 1000)

    def test_odd_encodings(self):
        every = {bytes([i]): i for i in range(256)}
        cases = [(every, {"<|x|>": 256}, "tiktoken:odd: it has no token <|endoftext|>"),
                 (every, {"<|endoftext|>": 2**31}, "tiktoken:odd: a token has the id 2147483648"),
                 ({b"a": 0}, {"<|endoftext|>": 1}, "tiktoken:odd: cannot encode: ")]
        for ranks, special, says in cases:
            encoding = tiktoken.Encoding("odd", pat_str=r"\s+|\S+", mergeable_ranks=ranks, special_tokens=special)
            with mock.patch.object(tiktoken, "get_encoding", lambda name, encoding=encoding: encoding):
                self.fails(self.write("a.txt", b"text\n" * 100), "--tokenizer", "tiktoken:odd", says=says)


class Json(Prepare):
    def folder_of(self, name="text"):
        """A folder as transformers wants it."""
        folder = os.path.join(self.folder, "model")
        shutil.rmtree(folder, ignore_errors=True)
        os.mkdir(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(os.path.join(self.out, f"{name}_{file}"), os.path.join(folder, file))
        return folder

    def test_bytes(self):
        """The vocabulary by GPT-2's alphabet: printable bytes as they are, the others from U+0100 on in order."""
        self.run_it(self.write("a.txt", b"text\n" * 100))
        with open(os.path.join(self.folder_of(), "tokenizer.json"), encoding="utf-8") as file:
            config = json.load(file)
        vocab = config["model"]["vocab"]
        self.assertEqual(sorted(vocab.values()), list(range(257)))
        for byte in (*range(33, 127), *range(161, 173), *range(174, 256)):
            self.assertEqual(vocab.pop(chr(byte)), byte)
        self.assertEqual(vocab.pop("<|endoftext|>"), EOT)
        self.assertEqual([vocab[chr(256 + i)] for i in range(68)], [*range(33), *range(127, 161), 173])
        self.assertEqual([(t["content"], t["id"], t["special"]) for t in config["added_tokens"]], [("<|endoftext|>", EOT, True)])
        with open(os.path.join(self.folder_of(), "tokenizer_config.json"), encoding="utf-8") as file:
            self.assertEqual(json.load(file)["eos_token"], "<|endoftext|>")

    def round_trip(self, *options):
        """The ids of the shards are those of AutoTokenizer, and decode to the text."""
        texts = [TEXT.replace("<|endoftext|>", ""), text_tokenizers.HARD_TEXT.replace("<|endoftext|>", ""), "x", "\u0301 \n",
                 " 12345678 \n\n  \n x\r\n" * 3 + "   "]
        path = self.write("a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
        printed = self.run_it(path, "--val-fraction", "0", "--overwrite", *options)
        self.assertNotIn("warning", printed)
        auto = transformers.AutoTokenizer.from_pretrained(self.folder_of())
        eot, tokens = read_table(os.path.join(self.out, "text_tokenizer.bin"))[1], self.tokens("train")
        self.assertEqual((auto.eos_token_id, auto.bos_token_id), (eot, eot))
        starts = [i for i, token in enumerate(tokens) if token == eot] + [len(tokens)]
        self.assertEqual(len(starts), len(texts) + 1)
        for text, start, end in zip(texts, starts, starts[1:]):
            ids = tokens[start + 1: end]
            self.assertTrue(auto.encode(text, add_special_tokens=False) == ids, (options, text[:20]))
            self.assertTrue(auto.decode(ids) == text, (options, text[:20]))
            self.assertEqual(auto.encode(auto.eos_token + "x", add_special_tokens=False)[0], eot)
        return auto

    @unittest.skipUnless(transformers, "the transformers package is not installed")
    def test_auto_bytes(self):
        auto = self.round_trip()
        self.assertEqual(auto.encode("aü\n", add_special_tokens=False), list("aü\n".encode()))

    @unittest.skipUnless(transformers and tiktoken, "the transformers or tiktoken package is not installed")
    def test_auto_tiktoken(self):
        """The patterns of gpt2, cl100k_base and o200k_base, with the tokens that a training on a text gives."""
        ranks = {bytes([i]): i for i in range(256)}
        words = sorted({TEXT.encode()[i: i + n] for i in range(200) for n in (2, 3, 4, 5)}, key=lambda w: (len(w), w))
        for word in [*words, b"12", b"123", b"1234", b"12345", b" \n", b"\n\n", b"  "]:
            ranks.setdefault(word, len(ranks))
        cl100k = r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|""" \
                 r"""\s*[\r\n]|\s+(?!\S)|\s"""
        o200k = r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'ll)?|\p{N}{1,3}""" \
                r"""| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+|[\s\S]"""
        for pattern in (tokenizer_json.GPT2_PATTERN, cl100k, o200k):
            for hole in (0, 7):  # between the ranks and the special tokens
                special = {"<|endoftext|>": len(ranks) + hole, "<|fim|>": len(ranks) + 2 * hole + 1}
                encoding = tiktoken.Encoding("tiny", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
                with mock.patch.object(tiktoken, "get_encoding", lambda name: encoding):
                    self.round_trip("--tokenizer", "tiktoken:tiny")

    @unittest.skipUnless(transformers and tokenizers, "the transformers or tokenizers package is not installed")
    def test_auto_tokenizers(self):
        for name in ("<|endoftext|>", "<end>"):
            t = tokenizers.Tokenizer(tokenizers.models.BPE())
            t.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
            t.decoder = tokenizers.decoders.ByteLevel()
            t.train_from_iterator([TEXT], tokenizers.trainers.BpeTrainer(
                vocab_size=300, special_tokens=["<first>", name], show_progress=False,
                initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
            t.enable_truncation(5)
            t.enable_padding()
            path = os.path.join(self.folder, "tokenizer.json")
            t.save(path)
            self.round_trip("--tokenizer", f"tokenizers:{path}", *(["--eot", name] if name == "<end>" else []))
            with open(path, "rb") as file, open(os.path.join(self.out, "text_tokenizer.json"), "rb") as copy:
                self.assertEqual(file.read(), copy.read())

    @unittest.skipUnless(transformers and tokenizers, "the transformers or tokenizers package is not installed")
    def test_auto_trained(self):
        auto = self.round_trip("--train-tokenizer", "400")
        self.assertEqual(len(auto), 400)


@unittest.skipUnless(tokenizers, "the tokenizers package is not installed")
class Train(Prepare):
    def corpus(self, words=400):
        """Documents that each hold a word of their own often enough to make it tokens."""
        rng = random.Random(6)
        documents = ["".join(rng.choices("abcdefghijkl", k=8)) for _ in range(words)]
        return self.write("a.jsonl", "".join(json.dumps({"text": (word + " ") * 20}) + "\n" for word in documents).encode()), documents

    def vocabulary(self):
        with open(os.path.join(self.out, "text_tokenizer.json"), encoding="utf-8") as file:
            return json.load(file)["model"]["vocab"]

    def test_size(self):
        path, _ = self.corpus()
        printed = self.run_it(path, "--train-tokenizer", "700")
        self.assertIn("--vocab 700", printed)
        table, eot = read_table(os.path.join(self.out, "text_tokenizer.bin"))
        self.assertEqual((len(table), table[eot]), (700, b"<|endoftext|>"))
        first = self.vocabulary()
        self.run_it(path, "--train-tokenizer", "700", "--overwrite", "--jobs", "1")
        self.assertEqual(self.vocabulary(), first)
        printed = self.run_it(self.write("b.txt", b"abab" * 100), "--train-tokenizer", "700", "--overwrite")
        self.assertRegex(printed, r"warning: the text gives a tokenizer of 2\d\d tokens, not 700")

    def test_training_text_alone(self):
        """Nothing of validation is trained on."""
        path, words = self.corpus()
        val = self.write("v.txt", b"zzzzzzzz " * 1000)
        self.run_it(path, "--train-tokenizer", "5000", "--val", val)
        vocabulary = self.vocabulary()
        self.assertGreater(sum("\u0120" + word in vocabulary for word in words), 390)
        self.assertNotIn("zz", vocabulary)

    def test_sample_is_even(self):
        """Where the text is more than is trained on, words from all of it are learned, not from its beginning."""
        path, words = self.corpus()
        size = os.path.getsize(path)
        with mock.patch.object(text_tokenizers, "TRAINED_ON", size // 3):
            self.run_it(path, "--train-tokenizer", "5000", "--val-fraction", "0")
        vocabulary = self.vocabulary()
        learned = ["\u0120" + word in vocabulary for word in words]
        # A sixth to a third of the words, each drawn alike: 200 words hold 33 at least, 4 deviations (5.3) below are 12.
        for part in (learned[:200], learned[200:]):
            self.assertTrue(12 <= sum(part) <= 100, sum(part))


if __name__ == "__main__":
    unittest.main(buffer=True)
