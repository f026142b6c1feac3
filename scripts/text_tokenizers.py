"""The tokenizers of prepare_text.py: bytes, tiktoken's, those of a tokenizer.json, and the training of one.

Each has vocab, eot and eot_name. Its encode(texts) returns little-endian tokens for each text, and table() the bytes
of each token. Its json() returns a tokenizer.json with the same ids. tiktoken is several times faster than
`tokenizers`. So it also encodes for a tokenizer.json, if a test shows the same ids.
"""
import array
import concurrent.futures
import contextlib
import hashlib
import json
import os
import re
import sys

from script import Failure
from tokenizer_json import EOT, MAX_VOCAB, byte_level_alphabet, byte_level_json, find_eot, kinds_of, tiktoken_parts, token_bytes

TRAINED_ON = 128 << 20  # bytes of text at most
WORD = 256  # characters of letters, digits, other signs or blanks in a row, from which a word of the training is cut
ONE_WORD = re.compile("|".join(f"{kind}{{{WORD}}}" for kind in (r"[^\W\d_]", r"\d", r"(?:[^\w\s]|_)", r"\s")))
# Characters of every kind, next to their like and to others; what merging and splitting do at the ends of runs.
HARD_TEXT = ("".join(f"{c} {c}{c}1a{c}" for i in (*range(1, 0x3000), *range(0x1F300, 0x1F700)) for c in chr(i)) +
             "I'm we'LL they'd 'sa 12345 1,234.5 a1b2  x   \n\n\t y\r\n\r\n  \n z!!! ...\n\nCamelCase naïve "
             + "中文字符 ｆｕｌｌ\u0301" + " " * 300 + "=" * 300 + "a" * 300 + "\n" * 300 + "7" * 300 + f" {EOT}\n  ")


def width_of(vocab):
    return 2 if vocab <= 65536 else 4


def pack(ids, vocab):
    """Token ids as little-endian bytes."""
    if max(ids, default=0) >= vocab:
        raise Failure(f"id {max(ids)} is outside of the vocabulary of {vocab} tokens")
    packed = array.array("H" if width_of(vocab) == 2 else "I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class ByteTokenizer:
    vocab, eot, eot_name = 257, 256, EOT

    def encode(self, texts):
        for text in texts:
            packed = bytearray(2 * len(text))
            packed[::2] = text
            yield bytes(packed)

    def table(self):
        return [bytes([i]) for i in range(256)] + [EOT.encode()]

    def json(self):
        return byte_level_json({bytes([i]): i for i in range(256)}, {EOT: self.eot}, None)


class LibraryTokenizer:
    """The base of tokenizers of libraries; ids(texts) returns a list of token ids for each text."""

    def __init__(self, name, vocab):
        if vocab == 0:
            raise Failure(f"--tokenizer: {name}: the vocabulary is empty")
        if vocab > MAX_VOCAB:
            raise Failure(f"--tokenizer: {name}: a token has the id {vocab - 1}; train_moe takes ids below {MAX_VOCAB}")
        self.name, self.vocab = name, vocab

    def encode(self, texts):
        texts = [text.decode("utf-8", "replace") for text in texts]
        try:
            return [pack(ids, self.vocab) for ids in self.ids(texts)]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic of a library written in Rust is not an Exception
            raise Failure(f"--tokenizer: {self.name}: cannot encode: {error}") from error


def library(name, option=None):
    """The package tiktoken or tokenizers, which an option needs."""
    try:
        return __import__(name)
    except ImportError as error:
        raise Failure(f"{option or f'--tokenizer {name}:...'} needs the {name} package: pip install {name}") from error


def encode_slowly(tokenizer, texts):
    return [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]


def open_json(data):
    """A tokenizer.json for documents: they are taken whole, and the name of a special token in them is text."""
    tokenizer = library("tokenizers").Tokenizer.from_buffer(data)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None  # a text's tokens are always the same
    tokenizer.encode_special_tokens = True
    return tokenizer


def same_ids(encoding, tokenizer, sample):
    """Whether tiktoken and `tokenizers` give the same ids for HARD_TEXT and the texts that sample() gives."""
    texts = [HARD_TEXT, *sample()]
    try:
        return [encoding.encode_ordinary(text) for text in texts] == encode_slowly(tokenizer, texts)
    except KeyboardInterrupt:
        raise
    except BaseException:  # a panic
        return False


class TiktokenTokenizer(LibraryTokenizer):
    eot_name = EOT

    def __init__(self, name, sample):
        tiktoken = library("tiktoken")
        try:
            self.encoding = tiktoken.get_encoding(name)
        except Exception as error:  # an unknown name, or no network to fetch it from
            raise Failure(f"--tokenizer: tiktoken:{name}: {error}") from error
        super().__init__(f"tiktoken:{name}", self.encoding.n_vocab)
        if EOT not in self.encoding.special_tokens_set:
            raise Failure(f"--tokenizer: tiktoken:{name}: it has no token {EOT}")
        self.eot = self.encoding.eot_token
        e = self.encoding
        self.data = byte_level_json(e._mergeable_ranks, e._special_tokens, e._pat_str)
        with contextlib.suppress(Failure):  # without tokenizers there is nothing to compare with
            if not same_ids(self.encoding, open_json(self.data), sample):
                print(f"warning: tiktoken:{name}: its tokenizer.json does not give the same ids for "
                      "all texts", file=sys.stderr)

    def ids(self, texts):
        return [self.encoding.encode_ordinary(text) for text in texts]

    def table(self):
        def token(i):
            try:
                return self.encoding.decode_single_token_bytes(i)
            except KeyError:  # ids may have holes
                return b""

        return [token(i) for i in range(self.vocab)]

    def json(self):
        return self.data


class HuggingFaceTokenizer(LibraryTokenizer):
    def __init__(self, name, data, eot_name, sample):
        try:
            self.tokenizer = open_json(data)
        except Failure:
            raise
        except Exception as error:  # the library raises plain Exception
            raise Failure(f"--tokenizer: {name}: not a tokenizer.json: {error}") from error
        vocab = self.tokenizer.get_vocab()
        super().__init__(name, max(vocab.values(), default=-1) + 1)
        special = {token.content for token in self.tokenizer.get_added_tokens_decoder().values() if token.special}
        config = json.loads(self.tokenizer.to_str())
        try:
            self.eot_name, named_by = (eot_name, "--eot") if eot_name else find_eot(name, vocab, special)
            self.tokens = token_bytes(config)
        except Failure as failure:
            raise Failure(f"--tokenizer: {name}: {failure}") from failure
        if self.eot_name not in vocab:
            raise Failure(f"--tokenizer: {name}: {named_by} names {self.eot_name!a} as the end of text, and the tokenizer has no "
                          "such token; name another with --eot")
        self.eot = vocab[self.eot_name]
        if not eot_name:
            print(f"note: {name}: the end of text is {self.eot_name!a} (id {self.eot}) by {named_by}; --eot names another",
                  file=sys.stderr)
        self.data = self.as_documents(data)
        self.check_bytes(config, vocab)
        self.encoding = self.fast_encoding(config, sample)

    def as_documents(self, data):
        """The tokenizer.json for other programs. It has the ids of the shards and no randomness. It adds no tokens around a
        text (Llama 3's adds one that no document has)."""
        config = json.loads(data)
        for token in config["added_tokens"]:
            if (i := self.tokenizer.token_to_id(token["content"])) != token["id"]:
                raise Failure(f"--tokenizer: {self.name}: the id of {token['content']!a} is {token['id']}, but `tokenizers` "
                              f"counts it as {i}: there is a hole in the ids before it")
        around = self.tokenizer.encode("").ids != self.tokenizer.encode("", add_special_tokens=False).ids
        dropout = config["model"].get("dropout")
        if not around and not dropout:
            return data
        print(f"note: {self.name} {'puts tokens around a text' if around else 'drops merges'}; documents are without, and so "
              "is the tokenizer.json that is written", file=sys.stderr)
        if around:
            config["post_processor"] = None
        if dropout:
            config["model"]["dropout"] = None
        return json.dumps(config, ensure_ascii=False, indent=1).encode()

    def check_bytes(self, config, vocab):
        """BPE without an unknown token drops bytes without a token: it needs one for each byte that UTF-8 uses."""
        model = config["model"]
        if model["type"] != "BPE" or model.get("unk_token"):
            return
        tokens = [f"<0x{byte:02X}>" if model.get("byte_fallback") else None for byte in range(256)]
        if "ByteLevel" in kinds_of(config):
            for character, byte in byte_level_alphabet().items():
                tokens[byte] = character
        lost = [byte for byte in (*range(0xC0), *range(0xC2, 0xF5)) if tokens[byte] not in vocab]
        if lost:
            raise Failure(f"--tokenizer: {self.name}: it would drop text: it has neither an unknown token nor tokens "
                          f"for {len(lost)} bytes, such as 0x{lost[0]:02X}")

    def fast_encoding(self, config, sample):
        """tiktoken's engine with this vocabulary; None, and why, where that is not the same."""
        try:
            pattern, ranks = tiktoken_parts(config)
            encoding = library("tiktoken").Encoding(self.name, pat_str=pattern, mergeable_ranks=ranks,
                                                    special_tokens={})
            if same_ids(encoding, self.tokenizer, sample):
                return encoding
            reason = "tiktoken gives other ids for a sample"
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # Unfit, no tiktoken, or a pattern that it cannot run
            reason = error
        print(f"note: {self.name} is encoded by `tokenizers`, which is several times slower than tiktoken: "
              f"{reason}", file=sys.stderr)
        return None

    def ids(self, texts):
        if self.encoding:
            try:
                return [self.encoding.encode_ordinary(text) for text in texts]
            except KeyboardInterrupt:
                raise
            except BaseException:  # a panic, as of a run of a million blanks: `tokenizers` gives the same ids
                pass
        return encode_slowly(self.tokenizer, texts)

    def table(self):
        return self.tokens

    def json(self):
        return self.data


def text_sample(texts, size):
    """Up to `size` bytes of the texts, those with the lowest hashes: spread evenly, and the same in whatever order."""
    kept, total, limit = [], 0, 2**64
    for text in texts:
        key = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
        if key < limit:
            kept.append((key, text))
            total += len(text)
        while total > size:
            limit //= 2
            kept = [item for item in kept if item[0] < limit]
            total = sum(len(text) for _, text in kept)
    return [text.decode("utf-8", "replace") for _, text in kept]


def cut_long_words(text):
    """A text in parts, so that its words have less than 2 WORD characters: a word's time grows with its length for each
    merge. Text without such words stays whole."""
    cuts = [0, *(at for at in range(WORD, len(text), WORD) if ONE_WORD.match(text, at)), len(text)]
    return [text[begin:end] for begin, end in zip(cuts, cuts[1:])]


def train_tokenizer(vocab, texts):
    """A byte-level BPE of `vocab` tokens, as a tokenizer.json."""
    tokenizers = library("tokenizers", "--train-tokenizer")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = level, tokenizers.decoders.ByteLevel()
    sample = text_sample(texts, TRAINED_ON)
    print(f"prepare_text.py: training a tokenizer on {sum(map(len, sample)) / 1e6:.1f} million characters of the text",
          file=sys.stderr)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab, special_tokens=[EOT], initial_alphabet=level.alphabet(),
                                             show_progress=False)
    sample = [part for text in sample for part in cut_long_words(text)]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # a signal ends a wait, but not a call of the library
        pool.submit(tokenizer.train_from_iterator, sample, trainer).result()
    if tokenizer.get_vocab_size() < vocab:
        print(f"prepare_text.py: warning: the text gives a tokenizer of {tokenizer.get_vocab_size()} tokens, not "
              f"{vocab}", file=sys.stderr)
    return tokenizer.to_str(pretty=True).encode()


def make_tokenizer(spec, eot_name, sample):
    """The tokenizer that --tokenizer names; sample() gives texts (str) to try it on."""
    kind, _, rest = spec.partition(":")
    if eot_name and kind != "tokenizers":
        raise Failure("--eot goes with --tokenizer tokenizers:FILE; other tokenizers have their own end of text")
    if spec == "bytes":
        return ByteTokenizer()
    if kind == "tiktoken" and rest:
        return TiktokenTokenizer(rest, sample)
    if kind == "tokenizers" and rest:
        library("tokenizers")
        if not os.path.isfile(rest):
            raise Failure(f"--tokenizer: {rest}: no such file; give the path of a tokenizer.json")
        with open(rest, "rb") as file:
            return HuggingFaceTokenizer(rest, file.read(), eot_name, sample)
    raise Failure(f"--tokenizer {spec}: must be bytes, tokenizers:FILE or tiktoken:NAME")
