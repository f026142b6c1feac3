"""The tokenizers of prepare_text.py: bytes, tiktoken's, those of a tokenizer.json, and the training of one.

Each has vocab, eot and eot_name, in table the bytes of each token, and in json a tokenizer.json with the same ids. Its
encode(texts) returns the tokens of each text as bytes. tiktoken is several times faster than `tokenizers`. So it also
encodes for a tokenizer.json, if a test shows the same ids.
"""
import array
import concurrent.futures
import contextlib
import hashlib
import json
import re
import sys

from script import Failure
from tokenizer_json import EOT, byte_level_alphabet, byte_level_json, dense, kinds_of, tiktoken_parts, tokens_and_eot

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
    """Token ids as bytes."""
    return array.array("H" if width_of(vocab) == 2 else "I", ids).tobytes()


class ByteTokenizer:
    vocab, eot, eot_name = 257, 256, EOT
    table = [*(bytes([i]) for i in range(256)), EOT.encode()]
    json = byte_level_json({bytes([i]): i for i in range(256)}, {EOT: eot}, None)

    def encode(self, texts):
        for text in texts:
            packed = bytearray(2 * len(text))
            packed[::2] = text
            yield bytes(packed)


class LibraryTokenizer:
    """The base of tokenizers of libraries; ids(texts) returns a list of token ids for each text."""

    def __init__(self, name, table):
        self.name, self.table, self.vocab = name, table, len(table)

    def encode(self, texts):
        texts = [text.decode("utf-8", "replace") for text in texts]
        try:
            return [pack(ids, self.vocab) for ids in self.ids(texts)]
        except BaseException as error:  # a panic of a library written in Rust is not an Exception
            raise Failure(f"--tokenizer {self.name}: cannot encode: {error}") from error


def library(name, what):
    """The package `name`, which `what` needs."""
    try:
        return __import__(name)
    except ImportError as error:
        raise Failure(f"{what} needs the {name} package: pip install {name}") from error


def encode_slowly(tokenizer, texts):
    return [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]


def open_json(data):
    """A tokenizer.json for documents: they are taken whole, and the name of a special token in them is text."""
    tokenizer = library("tokenizers", "it").Tokenizer.from_buffer(data)
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
    except BaseException:  # a panic
        return False


class TiktokenTokenizer(LibraryTokenizer):
    eot_name = EOT

    def __init__(self, name, sample):
        tiktoken = library("tiktoken", "it")
        try:
            self.encoding = tiktoken.get_encoding(name)
        except Exception as error:  # an unknown name, or no network to fetch it from
            raise Failure(error) from error
        ranks, special = self.encoding._mergeable_ranks, self.encoding._special_tokens
        if EOT not in special:
            raise Failure(f"it has no token {EOT}")
        self.eot = special[EOT]
        tokens = {**{i: token for token, i in ranks.items()}, **{i: name.encode() for name, i in special.items()}}
        super().__init__(f"tiktoken:{name}", dense(tokens))
        self.json = byte_level_json(ranks, special, self.encoding._pat_str)
        with contextlib.suppress(Failure):  # without tokenizers there is nothing to compare with
            if not same_ids(self.encoding, open_json(self.json), sample):
                print(f"warning: tiktoken:{name}: its tokenizer.json does not give the same ids for all texts", file=sys.stderr)

    def ids(self, texts):
        return [self.encoding.encode_ordinary(text) for text in texts]


class HuggingFaceTokenizer(LibraryTokenizer):
    def __init__(self, name, data, eot_name, sample):
        try:
            self.tokenizer = open_json(data)
        except Failure:
            raise
        except Exception as error:  # the library raises plain Exception
            raise Failure(f"not a tokenizer.json: {error}") from error
        config = json.loads(self.tokenizer.to_str())
        tokens, self.eot_name, self.eot, named_by = tokens_and_eot(name, config, eot_name)
        self.json = self.as_documents(name, data)
        check_bytes(config)
        super().__init__(name, tokens)
        if not eot_name:
            print(f"note: {name}: the end of text is {self.eot_name!a} (id {self.eot}) by {named_by}; --eot names another",
                  file=sys.stderr)
        self.encoding = self.fast_encoding(config, sample)

    def as_documents(self, name, data):
        """The tokenizer.json for other programs. It has the ids of the shards and no randomness. It adds no tokens around a
        text (Llama 3's adds one that no document has)."""
        config = json.loads(data)
        for token in config["added_tokens"]:
            if (i := self.tokenizer.token_to_id(token["content"])) != token["id"]:
                raise Failure(f"the id of {token['content']!a} is {token['id']}, but `tokenizers` counts it as {i}: there is a hole in "
                              "the ids before it")
        around = self.tokenizer.encode("").ids != self.tokenizer.encode("", add_special_tokens=False).ids
        dropout = config["model"].get("dropout")
        if not around and not dropout:
            return data
        print(f"note: {name} {'puts tokens around a text' if around else 'drops merges'}; the shards and the "
              "tokenizer.json that is written do not", file=sys.stderr)
        if around:
            config["post_processor"] = None
        if dropout:
            config["model"]["dropout"] = None
        return json.dumps(config, ensure_ascii=False, indent=1).encode()

    def fast_encoding(self, config, sample):
        """tiktoken's engine with this vocabulary; None, and why, where that is not the same."""
        why = "tiktoken would give other ids"
        try:
            if parts := tiktoken_parts(config):
                encoding = library("tiktoken", "the fast way").Encoding(self.name, **parts, special_tokens={})
                if same_ids(encoding, self.tokenizer, sample):
                    return encoding
        except BaseException as error:  # no tiktoken, or a pattern that it cannot run
            why = error
        print(f"note: {self.name} is encoded by `tokenizers`, which is several times slower than tiktoken: {why}", file=sys.stderr)
        return None

    def ids(self, texts):
        if self.encoding:
            try:
                return [self.encoding.encode_ordinary(text) for text in texts]
            except BaseException:  # a panic, as of a run of a million blanks: `tokenizers` gives the same ids
                pass
        return encode_slowly(self.tokenizer, texts)


def check_bytes(config):
    """BPE without an unknown token drops bytes without a token: it needs one for each byte that UTF-8 uses."""
    model, names = config["model"], {}
    if model["type"] != "BPE" or model.get("unk_token"):
        return
    if "ByteLevel" in kinds_of(config):
        names = byte_level_alphabet()
    elif model.get("byte_fallback"):
        names = {f"<0x{byte:02X}>": byte for byte in range(256)}
    lost = sorted({*range(0xC0), *range(0xC2, 0xF5)} - {byte for name, byte in names.items() if name in model["vocab"]})
    if lost:
        raise Failure(f"it would drop text: it has neither an unknown token nor tokens for {len(lost)} bytes, such as 0x{lost[0]:02X}")


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
    if kind not in ("tokenizers", "tiktoken") or not rest:
        raise Failure(f"--tokenizer {spec}: must be bytes, tokenizers:FILE or tiktoken:NAME")
    try:
        if kind == "tiktoken":
            return TiktokenTokenizer(rest, sample)
        with open(rest, "rb") as file:
            return HuggingFaceTokenizer(rest, file.read(), eot_name, sample)
    except (Failure, OSError) as error:
        raise Failure(f"--tokenizer {spec}: {error}") from error
