#!/usr/bin/env python3
"""Tests of the tokenizer.json that prepare_text.py writes with shards.

transformers' AutoTokenizer must give and decode the ids in the shards. Without transformers, only the byte tokenizer's
file is tested."""
import json
import os
import shutil
import unittest
from unittest import mock

from test_prepare import EOT, Prepare, read_table
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
