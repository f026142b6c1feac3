#!/usr/bin/env python3
"""Tests of scripts/text_tokenizers.py through prepare_text.py: the tokens of text.

Tests of other packages run where these are installed, and the packages are the oracle."""
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from unittest import mock

from test_prepare import SCRIPTS, Prepare, read_table
import prepare_text
import text_tokenizers
import tokenizer_json

SLOW = True

try:
    import tokenizers
except ImportError:
    tokenizers = None
try:
    import tiktoken
except ImportError:
    tiktoken = None

os.environ["RUST_BACKTRACE"] = "0"  # panics are part of these tests

class Library(Prepare):
    """Possible errors of library tokenizers, tested with a tokenizer that makes them."""

    def fails_with(self, ids, says, vocab=300):
        class Tokenizer(text_tokenizers.LibraryTokenizer):
            eot, eot_name = 0, "end"

            def ids(self, texts):
                return [ids() for _ in texts]

        path = self.write("a.txt", b"text\n" * 100)
        with mock.patch.object(prepare_text, "make_tokenizer", lambda *_: Tokenizer("odd.json", [b"x"] * vocab)):
            self.fails(path, says=f"--tokenizer odd.json: {says}")

    def test_ids(self):
        for vocab in (300, 70000):  # both widths
            self.fails_with(lambda: [2**40], "cannot encode: ", vocab)

    def test_failure(self):
        class Panic(BaseException):
            """The exception of libraries written in Rust."""

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
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>", "<|pad_é|>"],
                                                 initial_alphabet=t.pre_tokenizer.alphabet(), show_progress=False)
        t.train_from_iterator([TEXT], trainer)
        t.enable_truncation(5)  # must not cut documents
        path = os.path.join(self.folder, "tokenizer.json")
        t.save(path)
        return path

    def test_texts_get_the_tokens_of_documents(self):
        """The written tokenizer.json gives the ids of the shards, without the given one's post-processor and dropout."""
        path = self.byte_level()
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        pad = config["added_tokens"][1]["content"]
        around = tokenizers.processors.TemplateProcessing(f"{pad} $A", None, [(pad, 1)])
        outputs = []
        for post, dropout in ((None, None), (json.loads(around.__getstate__()), None), (None, 0.5)):
            config["post_processor"], config["model"]["dropout"] = post, dropout
            odd = self.write("odd.json", json.dumps(config).encode())
            said = self.run_it(self.write("a.txt", TEXT.encode()), "--val-fraction", "0", "--tokenizer", f"tokenizers:{odd}",
                               "--overwrite")
            self.assertEqual("tokenizer.json that is written do not" in said, bool(post or dropout))
            written = tokenizers.Tokenizer.from_file(os.path.join(self.out, "text_tokenizer.json"))
            written.encode_special_tokens = True
            written.no_truncation()
            self.assertEqual(written.encode(TEXT).ids, self.tokens("train")[1:])
            outputs.append(self.tokens("train"))
        self.assertTrue(outputs[0] == outputs[1] == outputs[2])

    def test_sentencepiece_like(self):
        """Byte tokens are bytes, as added tokens too."""
        for added in ([], ["<0x0A>"]):
            self.check_pieces(added)

    def check_pieces(self, added):
        vocab = {"</s>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4} | {f"<0x{i:02X}>": 5 + i for i in range(256)}
        t = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("▁", "a")], byte_fallback=True))
        t.normalizer = tokenizers.normalizers.Replace(" ", "▁")
        d = tokenizers.decoders
        t.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse()])
        t.add_special_tokens(added)
        path = os.path.join(self.folder, "sp.json")
        t.save(path)
        text = "ab a é\n"
        self.run_it(self.write("a.txt", text.encode()), "--val-fraction", "0", "--overwrite", "--tokenizer", f"tokenizers:{path}")
        table, eot = read_table(os.path.join(self.out, "text_tokenizer.bin"))
        tokens = self.tokens("train")
        self.assertEqual(tokens[0], eot)
        self.assertEqual(b"".join(table[t] for t in tokens[1:]).decode(), text)
        self.assertIn(4, tokens)

    def test_the_end_of_text(self):
        """As Gemma's: <s> and </s> are tags of HTML, <eos> is special. Files beside the tokenizer.json come first."""
        special, tags = ["<pad>", "<eos>", "<end_of_turn>", "<unk>"], ["<s>", "</s>"]
        vocab = {name: i for i, name in enumerate([*special, *tags, *map(chr, range(32, 127)), "<|im_end|>"])}
        t = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>"))
        t.add_special_tokens(special)
        t.add_tokens(tags)
        odd = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>"))
        odd.add_tokens(tags)
        a = self.write("a.txt", b"a text with <s>struck</s> words")
        config, generation = "tokenizer_config.json", "generation_config.json"

        def eot_of(tokenizer, files, *options, name="tokenizer.json"):
            """The end of text that documents begin with and that config.json has, and the output."""
            folder = tempfile.mkdtemp(dir=self.folder)
            path = os.path.join(folder, name)
            tokenizer.save(path)
            for file, data in files.items():
                self.write(os.path.join(folder, file), data if isinstance(data, bytes) else json.dumps(data).encode())
            said = self.run_it(a, "--val-fraction", "0", "--overwrite", "--tokenizer", f"tokenizers:{path}", *options)
            with open(os.path.join(self.out, "text_tokenizer_config.json"), encoding="utf-8") as file:
                eot = json.load(file)["eos_token"]
            self.assertEqual(read_table(os.path.join(self.out, "text_tokenizer.bin"))[1], vocab[eot])
            self.assertEqual(self.tokens("train")[0], vocab[eot])
            return eot, said.replace(f"{folder}/", "")

        for tokenizer, files, eot, by in (
                (t, {}, "<eos>", "its usual name (special)"),
                (odd, {}, "</s>", "its usual name (not special)"),
                (t, {config: {"eos_token": "<end_of_turn>"}}, "<end_of_turn>", f"eos_token of {config}"),
                (t, {config: {"eos_token": {"content": "<end_of_turn>"}}, generation: {"eos_token_id": 1}}, "<end_of_turn>", f"eos_token of {config}"),
                (t, {config: {"eos_token": "</s>"}}, "</s>", f"eos_token of {config}"),
                (t, {config: {"model_max_length": 1024}, generation: {"eos_token_id": 2}}, "<end_of_turn>", f"eos_token_id of {generation}"),
                (t, {config: {"eos_token": None}, generation: {"eos_token_id": [2, 1]}}, "<end_of_turn>", f"eos_token_id of {generation}"),
                (t, {generation: {"max_length": 9}}, "<eos>", "its usual name (special)")):
            got, said = eot_of(tokenizer, files)
            self.assertEqual(got, eot, files)
            self.assertEqual(said.count(f"note: tokenizer.json: the end of text is {eot!a} (id {vocab[eot]}) by {by}; --eot names another\n"), 1, said)
        # Names as prepare_text.py writes them; a file of another name has none beside it; --eot needs none.
        files = {"x_tokenizer_config.json": {"eos_token": "<pad>"}, config: {"eos_token": "<end_of_turn>"}}
        self.assertEqual(eot_of(t, files, name="x_tokenizer.json")[0], "<pad>")
        self.assertEqual(eot_of(t, files, name="x.json")[0], "<eos>")
        got, said = eot_of(t, {config: b"no JSON"}, "--eot", "<pad>")
        self.assertEqual((got, "the end of text" in said), ("<pad>", False))
        for file, data, says in ((config, {"eos_token": "<none>"}, f"eos_token of {self.folder}/{config} names '<none>' as the end of text"),
                                 (generation, {"eos_token_id": 200}, f"eos_token_id of {self.folder}/{generation} names 200 as the end of text"),
                                 (generation, {"eos_token_id": []}, f"{self.folder}/{generation}: its eos_token_id cannot be read (list index"),
                                 (config, {"eos_token": {"a": 1}}, f"{self.folder}/{config}: its eos_token cannot be read ('content')"),
                                 (config, ["<eos>"], f"{self.folder}/{config}: its eos_token cannot be read ("),
                                 (config, b"<eos>", f"{self.folder}/{config}: its eos_token cannot be read (Expecting value"),
                                 (config, b"\xff", f"{self.folder}/{config}: its eos_token cannot be read ('utf-8' codec")):
            t.save(os.path.join(self.folder, "tokenizer.json"))
            path = self.write(file, data if isinstance(data, bytes) else json.dumps(data).encode())
            self.fails(a, "--overwrite", "--tokenizer", f"tokenizers:{self.folder}/tokenizer.json", says=says)
            os.remove(path)

    def test_the_end_of_text_in_other_locales(self):
        """--eot is UTF-8 in every locale, and so is tokenizer_config.json."""
        t = tokenizers.Tokenizer(tokenizers.models.BPE({"<｜ende｜>": 0, "x": 1, "<|endoftext|>": 2}, [], unk_token="x"))
        path, a = os.path.join(self.folder, "tokenizer.json"), self.write("a.txt", b"text")
        t.save(path)
        ascii_locale = dict(os.environ, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
        for eot, options in (("<｜ende｜>", ["--eot", "<｜ende｜>"]), ("<|endoftext|>", []), ("<｜ende｜>", [])):
            if not options:
                self.write("tokenizer_config.json", json.dumps({"eos_token": eot}, ensure_ascii=False).encode())
            done = subprocess.run([sys.executable, os.path.join(SCRIPTS, "prepare_text.py"), a, "--val-fraction", "0", "--overwrite", "--out", self.out,
                                   "--tokenizer", f"tokenizers:{path}", *(word.encode() for word in options)], env=ascii_locale, capture_output=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            table, i = read_table(os.path.join(self.out, "text_tokenizer.bin"))
            self.assertEqual(table[i].decode(), eot)

    def test_errors(self):
        a = self.write("a.txt", b"text")
        self.fails(a, "--tokenizer", "tokenizers:none.json", says="--tokenizer tokenizers:none.json: [Errno 2] No such file or directory: 'none.json'")
        self.fails(a, "--tokenizer", f"tokenizers:{a}", says="not a tokenizer.json")
        for name in ("<none>", "\udcff"):
            self.fails(a, "--tokenizer", f"tokenizers:{self.byte_level()}", "--eot", name,
                       says=f"--eot names {name!a} as the end of text, and the tokenizer has no such token; name another with --eot")

    def test_odd_vocabularies(self):
        """Files that the library reads, but that cannot be used for shards."""
        bytes_tokens = {character: i for i, character in enumerate(tokenizer_json.byte_level_alphabet())}
        but_one = {character: i for character, i in bytes_tokens.items() if character != "t"}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        added = {"id": 2**31, "content": "</s>", "special": True, "single_word": False, "lstrip": False,
                 "rstrip": False, "normalized": False}

        def bpe(vocab, **more):
            return {"type": "BPE", "vocab": vocab, "merges": [], **more}

        cases = [
            (dict(model=bpe({})), "the vocabulary is empty"),
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
            (dict(model=bpe({"a": 0}, unk_token="a"), added_tokens=[added]), "counts it as 1: there is a hole in the ids"),
        ]
        a = self.write("a.txt", b"text\n" * 100)
        parts = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
        for config, says in cases:
            config = {"version": "1.0", "added_tokens": [], **parts, **config}
            path = self.write("odd.json", json.dumps(config).encode())
            with self.subTest(model=str(config["model"])[:100]):
                arguments = [a, "--tokenizer", f"tokenizers:{path}", "--overwrite"]
                if says:
                    self.fails(*arguments, says=f"error: --tokenizer {path}: {says}" if says == "cannot encode" else f"--tokenizer tokenizers:{path}: ")
                    self.fails(*arguments, says=says)
                else:
                    self.run_it(*arguments)


@unittest.skipUnless(tokenizers and tiktoken, "the tokenizers or tiktoken package is not installed")
class Engine(Prepare):
    """tiktoken's engine for a tokenizer.json, and the cases in which it must not be used."""

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
        """The ids of a text in the shards, and the output. Checks that `tokenizers` encodes it only if `slow`."""
        path = os.path.join(self.folder, "tokenizer.json")
        tokenizer.save(path)
        encode = text_tokenizers.encode_slowly
        with mock.patch.object(text_tokenizers, "encode_slowly", side_effect=encode) as calls:
            printed = self.run_it(self.write("a.txt", text.encode()), "--val-fraction", "0", "--overwrite",
                                  "--tokenizer", f"tokenizers:{path}")
        # `tokenizers` encodes once to compare, and the text once more if it is the one that is used.
        texts = [call.args[1] for call in calls.call_args_list]
        self.assertEqual([text] in texts, slow)
        self.assertEqual(" is encoded by `tokenizers`" in printed, slow)
        return self.tokens("train")[1:], printed

    def test_same_ids(self):
        split = tokenizers.pre_tokenizers.Split
        pattern = tokenizers.Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
                                   r"\s+(?!\S)|\s+")
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
            ranks = tokenizer_json.tiktoken_parts(config)["mergeable_ranks"]
            alphabet = tokenizer_json.byte_level_alphabet()
            expected = [tuple(bytes(alphabet[c] for c in part) for part in pair) for pair in config["model"]["merges"]]
            self.assertEqual(tokenizer_json.merges_of(ranks), expected)
            self.assertGreater(len(expected), 40)

    def test_unfit(self):
        """Tokenizers that tiktoken cannot replace encode with `tokenizers`, and give its ids."""
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
        def splitting(*steps):
            return self.train(270, pre=steps)

        isolated = [split(tokenizers.Regex(p), "isolated") for p in (r"\s+$|\S+|\s", r"\p{L}+")]
        for name, t in dict(
                normalized=normalized, prefixed=prefixed, swapped_merges=changed(swap_merges), swapped_ids=changed(swap_ids),
                not_special=changed(no_special), no_merge=changed(lone_token), digits=splitting(pre.Digits(True)),
                two_steps=splitting(split("a", "isolated"), pre.Digits(True)), removed=splitting(split(tokenizers.Regex("a"), "removed")),
                string=splitting(split("a", "isolated")),
                # $ is the end of a line in one library, and the end of the text in the other.
                line_end=splitting(isolated[0]),
                # Text between matches of a pattern is a word in one library, and is dropped by the other.
                between=splitting(isolated[1])).items():
            ids, printed = self.ids(t, slow=True)
            self.assertIn("several times slower than tiktoken: tiktoken would give other ids\n", printed)
            t.encode_special_tokens = True
            self.assertEqual(ids, t.encode(TEXT).ids, name)

    def test_sample_of_the_text(self):
        """Ids are compared on a sample of the text too; here it has a character that HARD_TEXT lacks."""
        t = self.train(pre=[tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[^\x{20000}-\x{2FFFF}]+"), "isolated")])
        with mock.patch.object(text_tokenizers, "HARD_TEXT", "easy"):
            text = "rare: \U00020001"
            ids, printed = self.ids(t, text, slow=True)
        self.assertEqual(ids, t.encode(text).ids)

    def test_without_tiktoken(self):
        expected, _ = self.ids(self.train())
        with mock.patch.dict(sys.modules, {"tiktoken": None}):
            ids, printed = self.ids(self.train(), slow=True)
        self.assertIn("several times slower than tiktoken: the fast way needs the tiktoken package: pip install tiktoken\n", printed)
        self.assertEqual(ids, expected)

    def test_panic(self):
        """A run of blanks that overflows the stack of tiktoken's regular expressions is still encoded."""
        t = self.train()
        ranks = {bytes([i]): i for i in range(256)}
        encoding = tiktoken.Encoding("t", pat_str=tokenizer_json.GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
        text = TEXT + " " * 1100000 + "end"
        with self.assertRaises(BaseException):
            encoding.encode_ordinary(text)
        path = os.path.join(self.folder, "tokenizer.json")
        t.save(path)
        tokenizer = text_tokenizers.make_tokenizer(f"tokenizers:{path}", None, lambda: [])
        self.assertIsNotNone(tokenizer.encoding)
        t.encode_special_tokens = True
        expected = text_tokenizers.pack(t.encode(text).ids, tokenizer.vocab)
        self.assertEqual(list(tokenizer.encode([text.encode()])), [expected])


@unittest.skipUnless(tiktoken, "the tiktoken package is not installed")
class Tiktoken(Prepare):
    def test_encoding(self):
        ranks = {bytes([i]): i for i in range(256)} | {b"ab": 256, b"abc": 257}
        encoding = tiktoken.Encoding("tiny", pat_str=r"\s+|\S+", mergeable_ranks=ranks,
                                     special_tokens={"<|endoftext|>": 300})
        with mock.patch.object(tiktoken, "get_encoding", lambda name: {"tiny": encoding}[name]):
            path = self.write("a.txt", b"abcab <|endoftext|>\xff" + b" " * 1000)
            self.run_it(path, "--val-fraction", "0", "--tokenizer", "tiktoken:tiny")
            self.fails(self.write("a.txt", b"abc"), "--tokenizer", "tiktoken:none", "--overwrite", says="tiktoken:none")
        table, eot = read_table(os.path.join(self.out, "text_tokenizer.bin"))
        self.assertEqual((len(table), eot), (301, 300))
        self.assertEqual((table[257], table[299], table[300]), (b"abc", b"", b"<|endoftext|>"))
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


@unittest.skipUnless(tokenizers, "the tokenizers package is not installed")
class Train(Prepare):
    def corpus(self, words=400):
        """Documents that each repeat one word of their own, often enough to make it a token."""
        rng = random.Random(6)
        documents = ["".join(rng.choices("abcdefghijkl", k=8)) for _ in range(words)]
        lines = "".join(json.dumps({"text": (word + " ") * 20}) + "\n" for word in documents)
        return self.write("a.jsonl", lines.encode()), documents

    def vocabulary(self):
        with open(os.path.join(self.out, "text_tokenizer.json"), encoding="utf-8") as file:
            return json.load(file)["model"]["vocab"]

    def test_size(self):
        path, _ = self.corpus()
        self.write("out/text_tokenizer_config.json", b'{"eos_token": "a"}')  # of an earlier set
        self.run_it(path, "--train-tokenizer", "700")
        table, eot = read_table(os.path.join(self.out, "text_tokenizer.bin"))
        self.assertEqual((len(table), table[eot]), (700, b"<|endoftext|>"))
        first = self.vocabulary()
        self.run_it(path, "--train-tokenizer", "700", "--overwrite", "--jobs", "1")
        self.assertEqual(self.vocabulary(), first)
        printed = self.run_it(self.write("b.txt", b"abab" * 100), "--train-tokenizer", "700", "--overwrite")
        self.assertRegex(printed, r"warning: the text gives a tokenizer of 2\d\d tokens, not 700")

    def test_training_text_alone(self):
        """The tokenizer is trained on no validation text."""
        path, words = self.corpus()
        val = self.write("v.txt", b"zzzzzzzz " * 1000)
        self.run_it(path, "--train-tokenizer", "5000", "--val", val)
        vocabulary = self.vocabulary()
        self.assertGreater(sum("\u0120" + word in vocabulary for word in words), 390)
        self.assertNotIn("zz", vocabulary)

    def test_sample_is_even(self):
        """If the tokenizer trains on a sample of the text, it learns words from all of it, not only from its start."""
        path, words = self.corpus()
        size = os.path.getsize(path)
        with mock.patch.object(text_tokenizers, "TRAINED_ON", size // 3):
            self.run_it(path, "--train-tokenizer", "5000", "--val-fraction", "0")
        vocabulary = self.vocabulary()
        learned = ["\u0120" + word in vocabulary for word in words]
        # A sixth to a third of the words, each equally likely: 33 of 200 at least, and 12 is 4 deviations (5.3) below.
        for part in (learned[:200], learned[200:]):
            self.assertTrue(12 <= sum(part) <= 100, sum(part))

    def test_long_words_are_cut(self):
        """The time to train on a word of a million letters would be hours."""
        letters = "".join(random.Random(8).choices("abcdefghijklmnopqrstuvwxyz", k=1 << 20))
        self.run_it(self.write("a.txt", letters.encode()), "--train-tokenizer", "1000")
        self.assertEqual(len(self.vocabulary()), 1000)
        word = text_tokenizers.WORD
        for text in ("x" * 5000, "a " + "é" * 3000 + "1" * 3000 + " \n" * 2000 + "-_" * 1500, letters[:4000] + " " + letters[:word - 1]):
            parts = text_tokenizers.cut_long_words(text)
            self.assertEqual("".join(parts), text)
            for part in parts:
                runs = re.findall(r"[^\W\d_]+|\d+|(?:[^\w\s]|_)+|\s+", part)
                self.assertLess(max(map(len, runs)), 2 * word)
        ordinary = ("word " * 50 + "x" * (word - 1) + "\n" * (word - 1) + "https://example.org/a1b2" * 30) * 20
        self.assertEqual(text_tokenizers.cut_long_words(ordinary), [ordinary])

    def test_a_signal_ends_training(self):
        """It does not wait for the library, which here would take hours."""
        path = self.write("a.txt", random.Random(9).randbytes(1 << 20).hex().translate({48 + i: 103 + i for i in range(10)}).encode())
        code = (f"import sys; sys.path.insert(0, {SCRIPTS!r}); sys.dont_write_bytecode = True; import prepare_text, text_tokenizers\n"
                "text_tokenizers.cut_long_words = lambda text: [text]\nsys.argv[0] = 'prepare_text.py'\n"
                f"prepare_text.main([{path!r}, '--out', {self.out!r}, '--train-tokenizer', '30000'])")
        with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, encoding="utf-8") as trains:
            try:
                self.assertIn("training a tokenizer", trains.stderr.readline())
                time.sleep(1)
                trains.terminate()
                self.assertEqual(trains.wait(20), -signal.SIGTERM)
            finally:
                trains.kill()
            self.assertEqual(trains.stderr.read(), "prepare_text.py: ended by SIGTERM\n")
        self.assertEqual(os.listdir(self.out), [])


if __name__ == "__main__":
    unittest.main(buffer=True)
