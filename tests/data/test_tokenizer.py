#!/usr/bin/env python3
"""Prompts are encoded to the ids of the library tokenizers, on text of the repository and on hostile text.

The tokenizers are trained here. They cut words like GPT-2, cl100k, o200k, DeepSeek-V3 and DeepSeek-Coder. The program
tests/data/encode, in the folder of TRAIN_MOE, prints the ids that data/tokenizer.c gives for a text.
"""
import json
import lzma
import os
import random
import subprocess
import sys
import tempfile
import unittest

ONE_BUILD = True  # the encoder is host code
SLOW = True

try:
    import tokenizers
except ImportError:
    tokenizers = None

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
PROGRAM = os.environ.get("TRAIN_MOE", os.path.join(ROOT, "build/cpu/train_moe"))
ENCODE = os.path.join(os.path.dirname(PROGRAM), "tests/data/encode")

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CL100K = (CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CL100K_POSSESSIVE = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"
                     r"\s*[\r\n]|\s+(?!\S)|\s")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + CONTRACTIONS + "?|"
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + CONTRACTIONS + "?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK = ("[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
            " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+")
# Each kind has patterns in order, as (pattern, behavior, invert), and a flag: True adds GPT-2's pattern after them.
KINDS = {
    "gpt2": ([], True),
    "digits": ([r"\p{N}+"], True),
    "cl100k": ([CL100K], False),
    "cl100k possessive": ([(CL100K_POSSESSIVE, "removed", True)], False),
    "o200k": ([O200K], False),
    "deepseek v3": ([r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK], False),
    "deepseek coder": (["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"\s+$", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"], False),
    "bloom": ([" ?[^(\\s|[.,!?…。，、।۔،])]+"], False),
}
SAMPLES = ("abcXYZ'sStTlLdDvVrReEmM ſK", " \n\r\t\v\u00a0\u3000\u2028\x85", "0123456789٣²Ⅷ", ".,!?-_/()[]{}|&%$#@\"'`~^\\",
           "一丁龥가힣ひらカタ々〆", "éÀßǅʰªµÆ\u0301\u0308न\u093f", "😀👍🏽\u200d\ufe0f∑€©")
WORDS = ("the", " of", " Hello", "WORLD", "'re", "'LL", " \n \n", "<|endoftext|>", "<|endoftext", "<user>", "<user", "<users>")


def repository():
    """The text of the first training run: 460 kB of documents and code."""
    return lzma.open(os.path.join(ROOT, "data/repository.txt.xz"), "rt", encoding="utf-8", newline="").read()


def hostile(rng):
    """Random text: runs of one kind of character, arbitrary characters, words and names of added tokens."""
    parts = []
    for _ in range(rng.randint(1, 40)):
        kind = rng.randrange(5)
        if kind < 2:
            parts += rng.choices(rng.choice(SAMPLES), k=rng.randint(1, 6))
        elif kind == 2:
            code = rng.choice((rng.randrange(1, 0x3000), rng.randrange(1, 0xD800), rng.randrange(0xE000, 0x110000)))
            parts.append(chr(code))
        else:
            parts.append(rng.choice(WORDS) if kind == 3 else rng.choice(rng.choice(SAMPLES)) * rng.randint(1, 9))
    return "".join(parts)


@unittest.skipUnless(tokenizers, "the tokenizers package is not installed")
class SameIds(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.text = repository()
        cls.folder = tempfile.TemporaryDirectory(prefix="train_moe_tokenizer_")
        cls.addClassCleanup(cls.folder.cleanup)
        # Every pattern needs Oniguruma, which a build may lack.
        probe = cls()
        probe.train(*KINDS["gpt2"])
        if "this build lacks Oniguruma" in probe.encode(["a"])[0][0]:
            raise unittest.SkipTest("this build lacks Oniguruma")

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def train(self, cuts, bytes_cut, vocab=3000, **model):
        """Trains a tokenizer of a kind, with added tokens: a special one, and two where one is a prefix of the other."""
        steps = [c if isinstance(c, tuple) else (c, "isolated", False) for c in cuts]
        pre = tokenizers.pre_tokenizers
        t = tokenizers.Tokenizer(tokenizers.models.BPE(**model))
        t.pre_tokenizer = pre.Sequence([pre.Split(tokenizers.Regex(p), *how) for p, *how in steps] +
                                       [pre.ByteLevel(add_prefix_space=False, use_regex=bytes_cut)])
        t.decoder = tokenizers.decoders.ByteLevel()
        t.train_from_iterator([self.text[:300000]], tokenizers.trainers.BpeTrainer(
            vocab_size=vocab, special_tokens=["<|endoftext|>"], initial_alphabet=pre.ByteLevel.alphabet(),
            show_progress=False))
        t.add_tokens([tokenizers.AddedToken(name, normalized=name == "WORL") for name in ("<user>", "<user", "WORL")])
        t.encode_special_tokens = True
        t.save(self.path("t.json"))
        return t

    def encode(self, texts, name="t.json"):
        """The line of ids of each text, and the seconds for all of them."""
        with open(self.path("texts"), "wb") as file:
            file.write(b"".join(text.encode() + b"\0" for text in texts))
        done = subprocess.run([ENCODE, self.path(name), self.path("texts")], capture_output=True, encoding="utf-8")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        *lines, times = done.stdout.splitlines()
        self.assertEqual(len(lines), len(texts))
        return lines, float(times.split()[1])

    def check_same(self, t, texts):
        lines, seconds = self.encode(texts)
        for text, line, expected in zip(texts, lines, t.encode_batch(texts, add_special_tokens=False)):
            self.assertTrue(line.split() == [str(i) for i in expected.ids], f"{text[:300]!r}: {line[:300]}")
        return seconds

    def test_kinds(self):
        rng = random.Random(1)
        texts = [self.text, *(hostile(rng) for _ in range(2000))]
        for name, (cuts, bytes_cut) in KINDS.items():
            with self.subTest(name):
                self.check_same(self.train(cuts, bytes_cut), texts)

    def test_whole_words(self):
        rng = random.Random(2)
        config = json.loads(self.train([CL100K], False).to_str())
        config["model"].update(ignore_merges=True, merges=config["model"]["merges"][::2])  # merges cannot build all words
        t = tokenizers.Tokenizer.from_str(json.dumps(config))
        t.encode_special_tokens = True
        t.save(self.path("t.json"))
        self.check_same(t, [self.text, *(hostile(rng) for _ in range(1000))])

    def test_long_words(self):
        """Text of one long word or run of spaces is fast: a loop over all pairs per merge would take hours."""
        rng = random.Random(3)
        t = self.train([CL100K], False)
        texts = ["".join(rng.choices("etaoin", k=1 << 20)), "a" * (1 << 20), " " * (1 << 20) + "x", "\n" * (1 << 20)]
        self.assertLess(self.check_same(t, texts), 60)

    def test_beside_a_table(self):
        """A table of scripts/prepare_text.py with a tokenizer.json next to it gives the ids of the merges."""
        t = self.train([DEEPSEEK], False)
        os.replace(self.path("t.json"), self.path("x.json"))
        book, out = self.path("book.txt"), self.path("out")
        with open(book, "w", encoding="utf-8") as file:
            file.write(self.text[:1000])
        script = os.path.join(ROOT, "scripts/prepare_text.py")
        subprocess.run([sys.executable, script, book, "--out", out, "--name", "x", "--tokenizer",
                        "tokenizers:" + self.path("x.json")], check=True, capture_output=True)
        os.replace(os.path.join(out, "x_tokenizer.bin"), self.path("x.bin"))
        text = self.text[:100000]
        lines, _ = self.encode([text], "x.bin")
        self.assertEqual(lines[0].split(), [str(i) for i in t.encode(text, add_special_tokens=False).ids])
        os.remove(self.path("x.json"))
        self.assertNotEqual(self.encode([text], "x.bin")[0], lines)  # without merges: the longest match


if __name__ == "__main__":
    unittest.main()
