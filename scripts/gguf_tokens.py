"""The tokens of a GGUF file, from a tokenizer.json: byte-level BPE, or bytes, which are BPE without merges.

llama.cpp has code for each way of splitting text before the merges, and finds it by name. The name follows from the
digest of the steps of tokenizer.json's pre_tokenizer.
"""
import hashlib
import json
import sys

from export import read_json, want
from script import Failure

SPLITTERS = {
    "da45177f402f64bb": "gpt-2",  # ByteLevel's own
    "4ed16dc854e5eb8e": "gpt-2",  # tiktoken's pattern for the same words
    "ba84515862dd5c96": "deepseek-llm",  # DeepSeek-V2
    "c12c2616486bc456": "deepseek-v3",
}


def merged(text, ranks):
    """A word after all merges."""
    parts = list(text)
    while len(parts) > 1:
        rank, at = min((ranks.get(pair, len(ranks)), i) for i, pair in enumerate(zip(parts, parts[1:])))
        if rank == len(ranks):
            break
        parts[at:at + 2] = ["".join(parts[at:at + 2])]
    return parts


def steps_of(parts, level):
    """How text is split: an expression, or what else a step is."""
    steps = []
    for part in parts:
        if part["type"] == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
            steps.append(part["pattern"].get("Regex"))
        else:
            steps.append(part["type"] if part != {"type": "Digits", "individual_digits": False} else "Digits together")
    return steps + ["ByteLevel"] * bool(level.get("use_regex", True))


def normalizers(tokenizer):
    normalizer = tokenizer["normalizer"]
    return normalizer.get("normalizers", [normalizer]) if normalizer else []


def splitter(tokenizer):
    """llama.cpp's name for how this tokenizer splits text; a Failure where it would make other tokens."""
    model, pre = tokenizer["model"], tokenizer["pre_tokenizer"] or {}
    *parts, level = pre.get("pretokenizers", [pre])
    odd = [key for key in ("unk_token", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
    odd += ["add_prefix_space"] if level.get("add_prefix_space") else []
    odd += ["normalizer"] if any(part != {"type": "NFC"} for part in normalizers(tokenizer)) else []
    if model["type"] != "BPE" or level.get("type") != "ByteLevel" or odd:
        raise Failure("not the byte-level BPE that llama.cpp has" + "".join(f"; it has {key}" for key in odd))

    # A token that merges do not make is one that llama.cpp never finds.
    ranks = {tuple(pair.split(" ") if isinstance(pair, str) else pair): rank for rank, pair in enumerate(model["merges"])}
    if model.get("ignore_merges"):
        added = {token["content"] for token in tokenizer["added_tokens"]}
        lost = [token for token in model["vocab"] if token not in added and len(merged(token, ranks)) > 1]
        if lost:
            raise Failure(f"llama.cpp makes tokens by merges alone, and no merges give {len(lost)} of its tokens (ignore_merges), "
                          f"such as {lost[0]!r}")
    if not ranks:
        return "gpt-2"  # each byte is a token, however text is split

    steps = steps_of(parts, level)
    digest = hashlib.sha256(json.dumps(steps).encode()).hexdigest()[:16]
    if digest not in SPLITTERS:
        known = ", ".join(sorted({*SPLITTERS.values()}))
        raise Failure(f"llama.cpp's name for its pre_tokenizer is not known, only names for {known}: {steps}")
    return SPLITTERS[digest]


def tokens_of(tokenizer, size):
    """(texts, types, merges). Every id has a text and a type, unused ones too."""
    import gguf
    tokens, types = [f"[PAD{i}]" for i in range(size)], [gguf.TokenType.UNUSED] * size
    listed = [(i, text, gguf.TokenType.NORMAL) for text, i in tokenizer["model"]["vocab"].items()]
    listed += [(added["id"], added["content"], gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED)
               for added in tokenizer["added_tokens"]]
    for i, text, kind in listed:
        if not 0 <= i < size:
            raise Failure(f"token {i} is {text!r}, but the model has {size} tokens")
        tokens[i], types[i] = text, kind
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    "".join(tokens + merges).encode()  # all are text
    return tokens, types, merges


def add_tokenizer(writer, step, config):
    """Writes the keys of the tokenizer in the folder `step`."""
    import gguf
    path, size, end = step / "tokenizer.json", config["vocab_size"], config["eos_token_id"]
    if not path.exists():
        raise Failure(f"{path}: no such file; put the tokenizer.json of the training data there")
    if end >= size:
        raise Failure(f"{step / 'config.json'}: eos_token_id is {end}, but the model has {size} tokens")
    tokenizer = read_json(path)
    want(tokenizer, path, "model", "an object", lambda value: type(value) is dict)
    want(tokenizer["model"], f"{path}: model", "vocab", "an object", lambda value: type(value) is dict)
    want(tokenizer["model"], f"{path}: model", "merges", "a list", lambda value: type(value) is list)
    want(tokenizer, path, "added_tokens", "a list", lambda value: type(value) is list)
    try:
        pre = splitter(tokenizer)
        tokens, types, merges = tokens_of(tokenizer, size)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        # llama.cpp must have merges: for bytes one that never comes about, because text has neither of the two tokens.
        writer.add_token_merges(merges or [f"{tokens[end]} {tokens[end]}"])
        # The tokens that begin and end texts, and whether every text gets them: post_processor or tokenizer_config.json.
        special = gguf.SpecialVocab(step, n_vocab=size)
        special.add_special_token.setdefault("bos", False)
        special.add_to_gguf(writer, quiet=True)
        if normalizers(tokenizer):
            print(f"to_gguf.py: warning: {path} has the normalizer NFC, and llama.cpp normalizes nothing: give it text in NFC",
                  file=sys.stderr)
    except Failure as failure:
        raise Failure(f"{path}: {failure}") from failure
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        raise Failure(f"{path}, or tokenizer_config.json next to it, is not as `tokenizers` writes it: {error}") from error
