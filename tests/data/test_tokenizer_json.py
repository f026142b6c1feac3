#!/usr/bin/env python3
"""Tests of the tokenizer.json that prepare_text.py writes with shards, and of the tokenizer.bin that tokenizer_json.py makes.

transformers' AutoTokenizer must give and decode the ids in the shards. Without transformers, only the byte tokenizer's
file and tokenizer.bin are tested."""
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import unittest
from unittest import mock

from test_prepare import EOT, SCRIPTS, Prepare, read_table
import text_tokenizers
import tokenizer_json

SLOW = True

try:
    import tiktoken
except ImportError:
    tiktoken = None
try:
    import tokenizers
    import transformers
except ImportError:
    transformers = None

TEXT = "Hello, wörld! Ünï 😀 x = [1,  2]\n\ttabs\n" * 20


LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}


def make_table(test, *arguments, code=0):
    """The tokenizer.bin that tokenizer_json.py makes, and its output."""
    done = subprocess.run([sys.executable, "-S", os.path.join(SCRIPTS, "tokenizer_json.py"), *arguments], capture_output=True,
                          encoding="utf-8", cwd=test.folder)
    test.assertEqual(done.returncode, code, done.stderr)
    return os.path.join(arguments[0], "tokenizer.bin"), done.stderr or done.stdout


class Table(Prepare):
    """tokenizer.bin from tokenizer.json, with the standard library alone."""

    def write_json(self, vocab, added=(), name="m/tokenizer.json", byte_fallback=None, **parts):
        model = {"type": "Unigram" if isinstance(vocab, list) else "BPE", "vocab": vocab, "byte_fallback": byte_fallback}
        added = [{"id": i, "content": text, "special": special} for i, text, special in added]
        path = self.write(name, json.dumps({**parts, "added_tokens": added, "model": model}).encode())
        folder = os.path.dirname(path)
        if os.path.exists(os.path.join(folder, "tokenizer.bin")):
            os.remove(os.path.join(folder, "tokenizer.bin"))
        return folder

    def check(self, expected, eot, *vocabulary, **parts):
        self.assertEqual(read_table(make_table(self, self.write_json(*vocabulary, **parts))[0]), (expected, eot))

    def test_byte_level(self):
        """The alphabet's ends; a token with another character is its name; ids may have holes; added tokens are plain."""
        self.check([b"a", b"</s>", b"\xa0\xad \x7f", "\u0144".encode(), b"", b"b", "\u0120".encode()], 1,
                   {"a": 0, "</s>": 1, "\u0142\u0143\u0120\u0121": 2, "\u0144": 3, "b": 5}, [(6, "\u0120", False)], pre_tokenizer=LEVEL)
        self.check([b" ", b"</s>"], 1, {"\u0120": 0, "</s>": 1}, normalizer={"type": "Sequence", "normalizers": [LEVEL]})

    def test_pieces(self):
        """SentencePiece: a mark is a space and <0xFF> a byte, also in added tokens that are tokens of the model."""
        self.check([b" a", b"\xff", b"</s>", b"<0xFG>"], 2, [["\u2581a", 0], ["<0xFF>", 0], ["</s>", 0], ["<0xFG>", 0]],
                   decoder={"type": "Metaspace"})
        self.check([b"</s>", b"\n", b" ", b"<0x20>"], 0, {"</s>": 0, "<0x0A>": 1, "\u2581": 2},
                   [(1, "<0x0A>", True), (2, "\u2581", False), (3, "<0x20>", False)], byte_fallback=True)
        self.check([b"</s>", "\u2581".encode()], 0, {"</s>": 0, "\u2581": 1})

    def test_long_tokens(self):
        """Version 3 where a token has more than 255 bytes, else version 2, which llm.c reads."""
        for size, version in ((255, 2), (256, 3), (70000, 3)):
            self.check([b"</s>", b"=" * size], 0, {"</s>": 0, "=" * size: 1}, pre_tokenizer=LEVEL)
            with open(os.path.join(self.folder, "m/tokenizer.bin"), "rb") as file:
                self.assertEqual(file.read(8)[4], version)

    def test_both_files_have_the_same_tokens(self):
        """0.1.0 wrote version 2, where a token of more than 255 bytes has none."""
        source = pathlib.Path(self.write_json({"</s>": 0, "=" * 300: 1}, pre_tokenizer=LEVEL), "tokenizer.json")
        table = source.with_suffix(".bin")
        for tokens, same in (([b"</s>", b"=" * 300], True), ([b"</s>", b""], True), ([b"</s>", b"="], False), ([b"</s>"], False),
                             ([b"</s>", b"=" * 299 + b"-"], False)):
            with open(table, "wb") as file:
                tokenizer_json.write_table(file, tokens, 0)
            with contextlib.nullcontext() if same else self.assertRaisesRegex(tokenizer_json.Failure, "belong to different tokenizers"):
                tokenizer_json.check_table(source, table)

    def test_end_of_text(self):
        """config.json, then what prepare_text.py takes: the model's other files, special tokens, any token; --eot is first."""
        names = ("</s>", "<eos>", "<|im_end|>", "end")
        folder = self.write_json({name: i for i, name in enumerate(names)}, [(1, "<eos>", True)])

        def eot(*options):
            path, printed = make_table(self, folder, *options)
            self.assertEqual(printed, f"wrote {path}: 4 tokens, the end of text is {printed.split(chr(39))[1]!a} (id {read_table(path)[1]}) "
                             f"by {printed.partition(') by ')[2]}")
            os.remove(path)
            return printed.split("'")[1]

        self.assertEqual(eot(), "<eos>")
        self.write("m/generation_config.json", b'{"eos_token_id": 0}')
        self.assertEqual(eot(), "</s>")
        self.write("m/tokenizer_config.json", b'{"eos_token": {"content": "end"}}')
        self.assertEqual(eot(), "end")
        for id in b"2", b"[2, 0]":
            self.write("m/config.json", b'{"eos_token_id": %s}' % id)
            self.assertEqual(eot(), "<|im_end|>")
        self.assertEqual(eot("--eot", "</s>"), "</s>")
        self.write("m/config.json", b'{"eos_token_id": null}')
        self.assertEqual(eot(), "end")

    def test_a_file_of_another_name(self):
        self.write_json({"</s>": 0, "x": 1}, name="m/my_tokenizer.json")
        self.write("m/my_tokenizer_config.json", b'{"eos_token": "x"}')
        make_table(self, os.path.join(self.folder, "m/my_tokenizer.json"))
        self.assertEqual(read_table(os.path.join(self.folder, "m/my_tokenizer.bin")), ([b"</s>", b"x"], 1))

    def test_refused(self):
        """One line with the reason, and no file. The largest id is taken."""
        self.assertEqual(len(tokenizer_json.dense({2**24 - 1: b"a"})), 2**24)
        good = {"</s>": 0, "a": 1}
        for says, *what in (("a token has the id 16777216; train_moe takes ids below 16777216", {"</s>": 0, "b": 2**24}),
                            ("a token has the id -1", {"</s>": 0, "b": -1}), ("a token has the id 0.5", {"</s>": 0, "b": 0.5}),
                            ("token 'b', id 0: the id is another token's", {"</s>": 0, "b": 0}),
                            ("token 'a', id 2: the id is another token's, or the token has another id", good, [(2, "a", False)]),
                            ("token 'c', id 1: the id is another token's", good, [(1, "c", False)]),
                            ("token 'a', id 2: ", [["</s>", 0], ["a", 0], ["a", 0]], [(2, "a", False)]), ("the vocabulary is empty", {}),
                            ("not as `tokenizers` writes it: ", 5), ("not as `tokenizers` writes it: ", {"</s>": 0, "\ud800": 1}),
                            ("no end-of-text token is named <|endoftext|> or ", {"a": 0})):
            folder = self.write_json(*what)
            _, printed = make_table(self, folder, code=1)
            self.assertIn(f"tokenizer_json.py: error: {folder}/tokenizer.json: {says}", printed)
            self.assertEqual((len(printed.splitlines()), os.listdir(folder)), (1, ["tokenizer.json"]))
        folder = self.write_json(good)
        self.write("m/config.json", b'{"eos_token_id": 2}')
        self.assertIn("eos_token_id of ", make_table(self, folder, code=1)[1])
        self.assertIn("--eot names 'b' as the end of text, and the tokenizer has no such token", make_table(self, folder, "--eot", "b", code=1)[1])
        self.write("m/config.json", b"[")
        self.assertIn("config.json: its eos_token_id cannot be read", make_table(self, folder, code=1)[1])
        self.write("m/config.json", b"{}")
        make_table(self, folder)
        self.assertIn("tokenizer.bin is there already; remove it to make it again", make_table(self, folder, "--eot", "a", code=1)[1])
        self.assertEqual(read_table(os.path.join(folder, "tokenizer.bin"))[1], 0)
        self.assertIn("/tokenizer.json: No such file or directory", make_table(self, self.folder, code=1)[1])


class Json(Prepare):
    def folder_of(self, name="text"):
        """A folder with the file names that transformers expects."""
        folder = os.path.join(self.folder, "model")
        shutil.rmtree(folder, ignore_errors=True)
        os.mkdir(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(os.path.join(self.out, f"{name}_{file}"), os.path.join(folder, file))
        return folder

    def test_bytes(self):
        """The vocabulary has GPT-2's alphabet: printable bytes as they are, the others from U+0100 on in order."""
        self.run_it(self.write("a.txt", b"text\n" * 100))
        with open(os.path.join(self.folder_of(), "tokenizer.json"), encoding="utf-8") as file:
            config = json.load(file)
        vocab = config["model"]["vocab"]
        self.assertEqual(sorted(vocab.values()), list(range(257)))
        for byte in (*range(33, 127), *range(161, 173), *range(174, 256)):
            self.assertEqual(vocab.pop(chr(byte)), byte)
        self.assertEqual(vocab.pop("<|endoftext|>"), EOT)
        self.assertEqual([vocab[chr(256 + i)] for i in range(68)], [*range(33), *range(127, 161), 173])
        added, = config["added_tokens"]
        self.assertEqual((added["content"], added["id"], added["special"]), ("<|endoftext|>", EOT, True))
        with open(os.path.join(self.folder_of(), "tokenizer_config.json"), encoding="utf-8") as file:
            self.assertEqual(json.load(file)["eos_token"], "<|endoftext|>")

    def round_trip(self, *options):
        """Checks that the ids of the shards are those of AutoTokenizer, and decode to the text."""
        texts = [TEXT, text_tokenizers.HARD_TEXT.replace("<|endoftext|>", ""), "x",
                 "unmerged", "\u0301 \n", " 12345678 \n\n  \n x\r\n" * 3 + "   "]
        path = self.write("a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
        printed = self.run_it(path, "--val-fraction", "0", "--overwrite", *options)
        self.assertNotIn("warning", printed)
        folder = self.folder_of()
        auto = transformers.AutoTokenizer.from_pretrained(folder)
        with open(os.path.join(self.out, "text_tokenizer.bin"), "rb") as file, open(make_table(self, folder)[0], "rb") as made:
            self.assertEqual(file.read(), made.read())
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
        """The patterns of gpt2, cl100k_base and o200k_base, with tokens that training on a text could give.

        One more token is no merge of a pair: tiktoken gives it for a word that equals the token."""
        ranks = {bytes([i]): i for i in range(256)}
        words = sorted({TEXT.encode()[i: i + n] for i in range(200) for n in (2, 3, 4, 5)}, key=lambda w: (len(w), w))
        for word in [*words, b"12", b"123", b"1234", b"12345", b" \n", b"\n\n", b"  ", b"unmerged"]:
            ranks.setdefault(word, len(ranks))
        cl100k = r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|""" \
                 r"""\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
        o200k = r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'ll)?|""" \
                r"""\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+|[\s\S]"""
        for pattern in (tokenizer_json.GPT2_PATTERN, cl100k, o200k):
            for hole in (0, 7):  # unused ids between the ranks and the special tokens
                special = {"<|endoftext|>": len(ranks) + hole, "<|fim|>": len(ranks) + 2 * hole + 1}
                encoding = tiktoken.Encoding("tiny", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
                with mock.patch.object(tiktoken, "get_encoding", lambda name: encoding):
                    self.round_trip("--tokenizer", "tiktoken:tiny")

    @unittest.skipUnless(transformers, "the transformers package is not installed")
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

    @unittest.skipUnless(transformers, "the transformers package is not installed")
    def test_auto_trained(self):
        auto = self.round_trip("--train-tokenizer", "400")
        self.assertEqual(len(auto), 400)


if __name__ == "__main__":
    unittest.main(buffer=True)
