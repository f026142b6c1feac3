"""Hugging Face's tokenizer.json of a byte-level BPE: written from bytes or tiktoken's ranks, and read back as ranks.

Both libraries merge the first pair of parts in an order. `tokenizers` has a list of pairs. tiktoken merges any two
parts that form a token, the lowest id first. They agree if each token is formed by one pair, of parts with lower ids,
in the order of ids. So a list of merges follows from the ranks, but not every list can be written as ranks.
"""
import json
import re

EOT = "<|endoftext|>"
# How GPT-2 splits text. `++` does not backtrack: the same words, and no stack for long runs.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


class Unfit(Exception):
    """tiktoken cannot replace this tokenizer.json; the message has the reason."""


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
    """The pattern that a pre_tokenizer splits by."""
    steps = config["pretokenizers"] if config and config["type"] == "Sequence" else [config]
    *splits, level = steps
    if not level or level["type"] != "ByteLevel" or level.get("add_prefix_space"):
        raise Unfit("it is not byte-level, or puts a space before text")
    if not splits and level.get("use_regex", True):
        return GPT2_PATTERN
    if len(splits) != 1 or level.get("use_regex", True):
        raise Unfit(f"it splits text in {len(splits) + level.get('use_regex', True)} steps, not in one")
    split, = splits
    pattern = split.get("pattern", {}).get("Regex")
    if split["type"] != "Split" or not pattern or split["behavior"] != "Isolated" or split["invert"]:
        raise Unfit(f"it splits text by {split['type']} otherwise than at the matches of a pattern")
    return pattern


def tiktoken_parts(config):
    """(pattern, ranks) of a tokenizer.json; Unfit where tiktoken would merge otherwise."""
    model = config["model"]
    if model["type"] != "BPE":
        raise Unfit(f"its model is {model['type']}, not BPE")
    for part in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(part):
            raise Unfit(f"its model has {part}")
    normalizer = config.get("normalizer")
    if normalizer and normalizer.get("normalizers") != []:
        raise Unfit(f"it normalizes text ({normalizer['type']})")
    if not all(token["special"] for token in config["added_tokens"]):
        raise Unfit("it has added tokens that are not special")
    pattern = split_pattern(config["pre_tokenizer"])
    alphabet, added = byte_level_alphabet(), {token["content"] for token in config["added_tokens"]}
    merges = [tuple(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
    try:
        ranks = {bytes(alphabet[c] for c in token): i for token, i in model["vocab"].items() if token not in added}
        merges = [tuple(bytes(alphabet[c] for c in part) for part in pair) for pair in merges]
    except KeyError as error:
        raise Unfit(f"a token has the character {ascii(error.args[0])}, which stands for no byte") from error
    if merges != merges_of(ranks):
        raise Unfit("its merges are not those that follow from the order of its tokens")
    if len(merges) + 256 != len(ranks):
        raise Unfit(f"it has {len(ranks)} tokens, not 256 bytes and one for each of {len(merges)} merges")
    return pattern, ranks
