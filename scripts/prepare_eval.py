#!/usr/bin/env python3
"""Makes a multiple-choice evaluation file in the format of llm.c's HellaSwag from jsonl.

  prepare_eval.py hellaswag_val.jsonl --out hellaswag.bin --tokenizer tiktoken:gpt2
  prepare_eval.py piqa/valid.jsonl --labels piqa/valid-labels.lst --out piqa.bin --tokenizer tokenizers:tokenizer.json

Each line is an example. Its fields decide its kind; prompts are those of lm-evaluation-harness:

  HellaSwag  ctx, endings, label        without marks of its source such as [title]; if it has activity_label, ctx_a and
                                        ctx_b, the context is "ACTIVITY_LABEL: CTX_A Ctx_b"
  ARC        question, answerKey        question {stem, choices [{text, label}]}, or choices {text, label} next to it;
                                        "Question: STEM\\nAnswer:", then the choices
  PIQA       goal, sol1, sol2, label    "Question: GOAL\\nAnswer:", then the solutions
  any other  context, endings, label    as it is

Labels count from 0. A space always separates the context from an ending. The tokens of an ending are those of the
whole text after the context's tokens. If the whole text does not begin with the context's tokens, the ending is
encoded alone.

The file is little-endian. Its header has 256 int32: {20240522, 1, number of examples, bytes of the longest example,
CRC-32 of the tokenizer's tokens}, then zeros. train_moe refuses a file whose tokenizer is not that of its data. The
examples follow, in uint16:

  65535                           begins an example
  its size in bytes               from the 65535 to its end, as in the header
  its index                       from 0
  its label
  the number of its endings
  the number of the context's tokens, and the tokens
  for each ending: the number of its tokens, and the tokens

uint16 is too small for a vocabulary above 65536, an example above 65535 bytes, or more than 65535 examples. Then the
magic is 20240802 and the version 1. All of these are uint32, and 4294967295 begins an example. The program llm.c
reads only the uint16 form, with 4 endings.
"""
import script
from script import Failure

import argparse
import array
import json
import os
import re
import struct
import sys
import zlib
from collections import Counter

from text_tokenizers import make_tokenizer, width_of

MAGIC = {2: 20240522, 4: 20240802}  # by bytes per word
START = {2: 2**16 - 1, 4: 2**32 - 1}
LARGEST = 65535  # that an uint16 holds
MAX_ENDINGS = 256  # train_moe reads no more
BATCH = 256  # examples tokenized at a time: libraries spread them over the cores


# ---- The kinds of examples: (context, endings, label) of a line


def text_of(value):
    if not isinstance(value, str):
        raise TypeError(f"{json.dumps(value)} is no text")
    return value


def clean(text):
    """HellaSwag's text comes from WikiHow and video captions, and has marks of the former in brackets."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def hellaswag(row):
    context = row["ctx"]
    if "activity_label" in row:
        context = text_of(row["activity_label"]) + ": " + text_of(row["ctx_a"]) + " " + row["ctx_b"].capitalize()
    return clean(context), [clean(ending) for ending in row["endings"]], row["label"]


def arc(row):
    stem = row["question"]
    if isinstance(stem, dict):  # as published
        stem, choices = stem["stem"], stem["choices"]
        texts, labels = [c["text"] for c in choices], [c["label"] for c in choices]
    else:  # as on the Hugging Face hub
        texts, labels = row["choices"]["text"], row["choices"]["label"]
    return f"Question: {text_of(stem)}\nAnswer:", texts, labels.index(row["answerKey"])


def piqa(row):
    return f"Question: {text_of(row['goal'])}\nAnswer:", [row["sol1"], row["sol2"]], row["label"]


def plain(row):
    return row["context"], row["endings"], row["label"]


KINDS = {"ctx": hellaswag, "question": arc, "goal": piqa, "context": plain}  # by the first field that an example has


def example_of(row, labels, number):
    """(context, endings, label) of a line, or Failure; labels: None, or those of a file."""
    if not isinstance(row, dict):
        raise Failure("not a JSON object")
    kind = next((KINDS[field] for field in KINDS if field in row), None)
    if not kind:
        raise Failure(f"no known kind of example: it has none of the fields {', '.join(KINDS)}")
    if labels and kind is arc:
        raise Failure("leave out --labels: lines of this kind have an answerKey")
    if labels:
        row["label"] = labels[number - 1]
    try:
        context, endings, label = kind(row)
        label = int(label) if type(label) in (int, str) else None
    except KeyError as error:
        raise Failure(f"the field {error} is missing") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise Failure(f"a field is not as this kind of example has it: {error}") from error
    if not isinstance(context, str) or not context.strip():
        raise Failure("the context is no text")
    if not isinstance(endings, list) or not all(isinstance(ending, str) for ending in endings):
        raise Failure("the endings are no list of texts")
    if not 2 <= len(endings) <= MAX_ENDINGS or label is None or not 0 <= label < len(endings):
        raise Failure(f"label {label} of {len(endings)} endings: give 2 to {MAX_ENDINGS} endings, and a label below their number")
    return context, [" " + ending for ending in endings], label


def read_lines(path):
    with open(path, encoding="utf-8") as file:
        try:
            return [line for line in file.read().split("\n") if line.strip()]
        except UnicodeDecodeError as error:
            raise Failure(f"{path}: not UTF-8 at byte {error.start}") from error


def read_examples(path, labels_path):
    lines, labels, examples = read_lines(path), None, []
    if labels_path:
        labels = read_lines(labels_path)
        if len(labels) != len(lines):
            raise Failure(f"{labels_path}: {len(labels)} labels for {len(lines)} examples")
    for number, line in enumerate(lines, 1):
        try:
            examples.append(example_of(json.loads(line), labels, number))
        except (ValueError, RecursionError) as error:
            raise Failure(f"{path}: example {number}: not JSON: {error}") from error
        except Failure as error:
            raise Failure(f"{path}: example {number}: {error}") from error
    if not examples:
        raise Failure(f"{path}: no examples")
    return examples


# ---- Tokens


def tokenize(examples, tokenizer):
    """Yields (tokens of the context, of each ending) for each example."""
    code = {2: "H", 4: "I"}[width_of(tokenizer.vocab)]

    def encode(texts):
        for packed in tokenizer.encode([text.encode("utf-8", "replace") for text in texts]):
            yield array.array(code, packed)

    for at in range(0, len(examples), BATCH):
        batch = examples[at:at + BATCH]
        ids = encode([text for context, endings, _ in batch
                      for text in (context, *endings, *(context + ending for ending in endings))])
        for context, endings, _ in batch:
            start = next(ids)
            alone, whole = [[next(ids) for _ in endings] for _ in range(2)]
            yield start, [w[len(start):] if w[:len(start)] == start else a for a, w in zip(alone, whole)]


# ---- Writing


def words_of(index, label, context, endings):
    """An example, but for how it begins, and its size."""
    words = [0, 0, index, label, len(endings), len(context), *context]
    for ending in endings:
        words += [len(ending), *ending]
    return words


def crc_of(tokenizer):
    """CRC-32 of the tokens: a length byte and the bytes of each. End of text and those above 255 bytes have length 0."""
    table = [*tokenizer.table]
    table[tokenizer.eot] = b""
    return zlib.crc32(b"".join(bytes([len(token)]) + token if len(token) < 256 else b"\0" for token in table))


def write_file(path, examples, width, crc):
    longest = max(map(len, examples)) * width
    with script.in_place(path) as part, open(part, "wb") as file:
        file.write(struct.pack("<4iI", MAGIC[width], 1, len(examples), longest, crc).ljust(1024, b"\0"))
        for words in examples:
            words[:2] = START[width], len(words) * width
            file.write(struct.pack(f"<{len(words)}{'H' if width == 2 else 'I'}", *words))


def prepare(args):
    for path in filter(None, (args.input, args.labels)):
        if os.path.exists(args.out) and os.path.samefile(path, args.out):
            raise Failure(f"--out {args.out} is an input; choose another name")
    examples = read_examples(args.input, args.labels)
    tokenizer = make_tokenizer(args.tokenizer, args.eot, lambda: [context for context, _, _ in examples[:BATCH]])
    written, most = [], 0
    for (_, _, label), (context, endings) in zip(examples, tokenize(examples, tokenizer)):
        if not context or not all(endings):
            raise Failure(f"{args.input}: example {len(written) + 1}: the tokenizer makes no tokens of a text")
        written.append(words_of(len(written), label, context, endings))
        most = max(most, len(context) + max(map(len, endings)))
    fits = tokenizer.vocab <= 65536 and len(written) <= LARGEST and 2 * max(map(len, written)) <= LARGEST
    width = 2 if fits else 4
    write_file(args.out, written, width, crc_of(tokenizer))

    counts = Counter(len(endings) for _, endings, _ in examples)
    print(f"{args.out}: {len(written)} examples as uint{8 * width}, endings: "
          + ", ".join(f"{n} in {count}" for n, count in sorted(counts.items()))
          + f"; the longest has {most} tokens with its longest ending; vocabulary {tokenizer.vocab}")


def main(arguments=None):
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", metavar="JSONL", help="one example a line")
    parser.add_argument("--out", required=True, metavar="FILE", help="the evaluation file to write")
    parser.add_argument("--tokenizer", default="bytes", metavar="SPEC", help="as in prepare_text.py (bytes)")
    parser.add_argument("--eot", type=script.text, metavar="TOKEN", help="as in prepare_text.py")
    parser.add_argument("--labels", metavar="FILE", help="labels of the examples from 0, one a line, instead of the field")
    args = parser.parse_args(arguments)
    try:
        prepare(args)
    except Failure as error:
        message = error
    except OSError as error:
        message = f"{error.filename or args.out}: {error.strerror or error}"
    else:
        return 0
    print(f"prepare_eval.py: error: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
