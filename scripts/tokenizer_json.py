#!/usr/bin/env python3
"""Makes the tokenizer.bin that train_moe reads from Hugging Face's tokenizer.json.

  tokenizer_json.py runs/x/step_00002000      its tokenizer.bin, from its tokenizer.json
  tokenizer_json.py corpus/my_tokenizer.json  corpus/my_tokenizer.bin

The end of text is the eos_token_id of config.json in the same folder, else that of prepare_text.py. A tokenizer.bin that
is there is kept. Standard library only.

Other scripts import this one. It writes a tokenizer.json of a byte-level BPE from bytes or tiktoken's ranks, and reads it
back as ranks. Both libraries merge the first pair of parts in an order. `tokenizers` has a list of pairs. tiktoken merges any two
parts that form a token, the lowest id first. They agree if each token is formed by one pair, of parts with lower ids,
in the order of ids. So a list of merges follows from the ranks, but not every list can be written as ranks.
"""
import script
from script import Failure

import argparse
import io
import json
import os
import pathlib
import re
import struct
import sys

EOT = "<|endoftext|>"
EOT_NAMES = (EOT, "<｜end▁of▁sentence｜>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|im_end|>")
MAX_VOCAB = 1 << 24  # train_moe reads no larger tokenizer
TABLE_MAGIC, HEADER = 20240328, 1024  # bytes of the header, of shards too
# How GPT-2 splits text. `++` does not backtrack: the same words, and no stack for long runs.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


def byte_level_alphabet():
    """The characters by which byte-level BPE writes bytes: printable ones are themselves, others follow at 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def merges_of(ranks):
    """The pairs that form the tokens, in order. Merging a token's bytes by lower ranks leaves its pair of parts. A token
    that leaves another number of parts has no pair."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i: i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:])]
            lowest = min(pairs)
            if lowest >= rank:
                break
            at = pairs.index(lowest)
            parts[at: at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append(tuple(parts))
    return merges


def oniguruma(pattern):
    """tiktoken's pattern as `tokenizers` reads it, where {1,3}+ repeats {1,3}, and $ is the end of any line."""
    pattern = re.sub(r"(\\p\{\w+\}|\\?[^)\]]|\[[^\]]*\])(\{\d+(?:,\d*)?\})\+", r"(?>\1\2)", pattern)
    return re.sub(r"(\\.|\[(?:\\.|[^\]\\])*\])|\$", lambda match: match[1] or r"\z", pattern)


def byte_level_json(ranks, special, pattern):
    """A tokenizer.json: ids of tokens as bytes, ids of special tokens by name, how text is split (None: not at all)."""
    characters = {byte: character for character, byte in byte_level_alphabet().items()}

    def written(token):
        return "".join(characters[byte] for byte in token)

    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = pattern and {"type": "Split", "pattern": {"Regex": oniguruma(pattern)}, "behavior": "Isolated",
                         "invert": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    # Special tokens are in the vocabulary too: others get new ids.
    vocab = {written(token): i for token, i in ranks.items()} | special
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": name, **flags, "special": True}
                         for name, i in sorted(special.items(), key=lambda item: item[1])],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]} if split else level,
        "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "ignore_merges": bool(split),  # as tiktoken: a word that is a token is that token
                  "vocab": dict(sorted(vocab.items(), key=lambda item: item[1])),
                  "merges": [[written(a), written(b)] for a, b in merges_of(ranks)]},
    }, ensure_ascii=False, indent=1).encode()


def config_json(eot):
    """The tokenizer_config.json with which transformers takes a tokenizer.json as it is. Documents begin with `eot`."""
    return json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": eot, "eos_token": eot,
                       "model_max_length": int(1e30),  # transformers' number for none
                       "clean_up_tokenization_spaces": False}, ensure_ascii=False, indent=1).encode()


def split_pattern(config):
    """The pattern at whose matches a pre_tokenizer splits text; None if it does something else."""
    *splits, level = config["pretokenizers"] if config and config["type"] == "Sequence" else [config]
    if not level or level["type"] != "ByteLevel" or level.get("add_prefix_space") or len(splits) + level.get("use_regex", True) != 1:
        return None
    if not splits:
        return GPT2_PATTERN
    isolated = {"type": "Split", "behavior": "Isolated", "invert": False}
    return splits[0]["pattern"].get("Regex") if isolated.items() <= splits[0].items() else None


def tiktoken_parts(config):
    """The pattern and ranks of a tokenizer.json for tiktoken.Encoding; None where tiktoken would merge otherwise."""
    model, normalizer, added = config["model"], config.get("normalizer"), config["added_tokens"]
    pattern = split_pattern(config["pre_tokenizer"])
    others = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if model["type"] != "BPE" or any(map(model.get, others)) or normalizer and normalizer.get("normalizers") != [] \
            or not pattern or not all(token["special"] for token in added):
        return None
    alphabet, names = byte_level_alphabet(), {token["content"] for token in added}
    merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    try:
        ranks = {bytes(alphabet[c] for c in token): i for token, i in model["vocab"].items() if token not in names}
        merges = [tuple(bytes(alphabet[c] for c in part) for part in pair) for pair in merges]
    except KeyError:  # a character that stands for no byte
        return None
    if merges != merges_of(ranks) or len(merges) + 256 != len(ranks):
        return None
    return {"pat_str": pattern, "mergeable_ranks": ranks}


# ---- The tokens as bytes, and the file that has them


def vocabulary(config):
    """(token, id) of the model's tokens. Unigram has a list of [token, score]."""
    vocab = config["model"]["vocab"]
    return list(vocab.items()) if isinstance(vocab, dict) else [(token, i) for i, (token, _) in enumerate(vocab)]


def kinds_of(config):
    """The types of all parts that tell how the texts of tokens encode bytes."""
    parts = json.dumps([config.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")])
    return {*re.findall(r'"type": "(\w+)"', parts), *["ByteFallback"] * bool(config["model"].get("byte_fallback"))}


def piece(text):
    """A token as SentencePiece writes it."""
    return bytes([int(text[3:5], 16)]) if re.fullmatch("<0x[0-9A-Fa-f]{2}>", text) else text.replace("▁", " ").encode()


def added_tokens(config):
    return [(token["content"], token["id"]) for token in config.get("added_tokens") or []]


def dense(tokens):
    """Tokens by id. An id without a token has no bytes."""
    if not tokens:
        raise Failure("the vocabulary is empty")
    for i in tokens:
        if type(i) is not int or not 0 <= i < MAX_VOCAB:
            raise Failure(f"a token has the id {i!r}; train_moe takes ids below {MAX_VOCAB}")
    return [tokens.get(i, b"") for i in range(max(tokens) + 1)]


def token_bytes(config):
    """The bytes of each token of a tokenizer.json, by id."""
    alphabet, kinds, ids, table = byte_level_alphabet(), kinds_of(config), dict(vocabulary(config)[::-1]), {}
    pieces = kinds & {"ByteFallback", "Metaspace"}
    for text, i, added in [(*entry, False) for entry in vocabulary(config)] + [(*entry, True) for entry in added_tokens(config)]:
        # Only an added token may repeat one of the vocabulary, with its id.
        repeats = added and text in ids
        if ids[text] != i if repeats else i in table:
            raise Failure(f"token {text!a}, id {i}: the id is another token's, or the token has another id")
        if "ByteLevel" in kinds and not added and all(c in alphabet for c in text):
            table[i] = bytes(alphabet[c] for c in text)
        else:  # added tokens are plain text, but for SentencePiece's byte tokens and spaces
            table[i] = piece(text) if pieces and (repeats or not added) else text.encode()
    return dense(table)


def find_eot(path, vocab, special, files=()):
    """The name of the end-of-text token, and its source. A usual name may be other text as well: Gemma's </s> is a tag of
    HTML. So the model's own files come first, then special tokens."""
    names = {i: name for name, i in vocab.items()}
    for file, field in (*files, ("tokenizer_config.json", "eos_token"), ("generation_config.json", "eos_token_id")):
        config = re.sub(r"tokenizer\.json$", file, path)
        if config == path or not os.path.exists(config):
            continue
        try:
            with open(config, encoding="utf-8") as opened:
                token = json.load(opened).get(field)
            token = token[0] if isinstance(token, list) else token["content"] if isinstance(token, dict) else token
            if token is not None:
                return names.get(token, token), f"{field} of {config}"
        except (ValueError, AttributeError, LookupError, TypeError, RecursionError) as error:
            raise Failure(f"{config}: its {field} cannot be read ({error}); name the end of text with --eot") from error
    for tokens, kind in ((special, "special"), (vocab, "not special")):
        for name in EOT_NAMES:
            if name in tokens:
                return name, f"its usual name ({kind})"
    raise Failure(f"no end-of-text token is named {' or '.join(EOT_NAMES)}; --eot of prepare_text.py or tokenizer_json.py names it")


def write_table(file, table, eot):
    """The file that train_moe reads (data/tokenizer.h): llm.c's version 2, or 3 where a token has more than 255 bytes."""
    version, length = (2, "<B") if max(map(len, table)) < 256 else (3, "<I")
    file.write(struct.pack("<256I", TABLE_MAGIC, version, len(table), eot, *[0] * 252))
    for token in table:
        file.write(struct.pack(length, len(token)) + token)


def check_table(source, table):
    """Failure unless the tokens of a tokenizer.json are those of the table beside it."""
    given, made = table.read_bytes(), io.BytesIO()
    tokens = token_bytes(json.loads(source.read_text("utf-8")))
    if given[4] == 2:  # as 0.1.0 wrote tokens of more than 255 bytes
        tokens = [token if len(token) < 256 else b"" for token in tokens]
    write_table(made, tokens, 0)
    if made.getvalue()[HEADER:] != given[HEADER:]:
        raise Failure(f"{source} and {table} belong to different tokenizers")


def tokens_and_eot(path, config, eot_name, files=()):
    """The tokens of a tokenizer.json as bytes, the name and the id of its end of text, and the source of the name."""
    tokens, vocab = token_bytes(config), dict([*vocabulary(config)[::-1], *added_tokens(config)])
    special = {token["content"] for token in config.get("added_tokens") or [] if token.get("special")}
    eot, named_by = (eot_name, "--eot") if eot_name else find_eot(path, vocab, special, files)
    if eot not in vocab:
        raise Failure(f"{named_by} names {eot!a} as the end of text, and the tokenizer has no such token; name another with --eot")
    return tokens, eot, vocab[eot], named_by


def make_table(source, target, eot_name=None):
    """Writes `target` from the tokenizer.json `source`. Returns a line about it."""
    try:
        tokens, eot, i, named_by = tokens_and_eot(str(source), json.loads(source.read_text("utf-8")), eot_name,
                                                  [("config.json", "eos_token_id")])
    except Failure as failure:
        raise Failure(f"{source}: {failure}") from failure
    except (ValueError, AttributeError, LookupError, TypeError, RecursionError) as error:
        raise Failure(f"{source}: not as `tokenizers` writes it: {type(error).__name__} {str(error)[:100]}") from error
    if os.path.lexists(target):
        raise Failure(f"{target} is there already; remove it to make it again")
    with script.in_place(target) as part, open(part, "wb") as file:
        write_table(file, tokens, i)
    return f"{len(tokens)} tokens, the end of text is {eot!a} (id {i}) by {named_by}"


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=pathlib.Path, metavar="PATH", help="a folder with a tokenizer.json, or a file like it")
    parser.add_argument("--eot", type=script.text, metavar="TOKEN", help="the end-of-text token")
    args = parser.parse_args()
    source = args.source / "tokenizer.json" if args.source.is_dir() else args.source
    try:
        target = source.with_suffix(".bin")
        print(f"wrote {target}: {make_table(source, target, args.eot)}")
    except Failure as error:
        message = error
    except OSError as error:
        message = f"{error.filename or source}: {error.strerror or error}"
    else:
        return 0
    print(f"tokenizer_json.py: error: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
