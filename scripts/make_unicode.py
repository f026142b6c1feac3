#!/usr/bin/env python3
"""Write data/unicode.h: what kind of character each code point is, for the patterns of data/split.c.

It is the Unicode version that the library tokenizers knows (its Oniguruma 6.9.10: 16.0), which Python 3.14 has; others need
the package unicodedata2:  pip install unicodedata2==16.0.0;  scripts/make_unicode.py
"""
import pathlib
import sys

try:
    import unicodedata2 as unicodedata
except ImportError:
    import unicodedata

VERSION = "16.0.0"
APART = ("Lu", "Ll", "Lt", "Lm", "Lo", "Cc")  # because patterns ask for them; of the rest the first letter counts
KINDS = (*APART[:5], "M", "N", "P", "S", "Z", "Cc", "C")

HEAD = f"""\
// Written by scripts/make_unicode.py: the general categories of Unicode {VERSION}, letters by case, control characters apart,
// the rest by the first letter of their names. An entry is the first code point of a range, which ends ahead of the next.
#ifndef DATA_UNICODE_H
#define DATA_UNICODE_H

#include <stdint.h>

// Letters: upper case, lower case, title case, modifiers, others; marks, numbers, punctuation, symbols, separators,
// control characters, and what is none of these (format characters, unassigned code points).
enum {{ {", ".join(KINDS)} }};

typedef struct UnicodeRange {{
    uint32_t first : 24;
    uint32_t kind : 8;
}} UnicodeRange;

// clang-format off
static const UnicodeRange unicode_ranges[] = {{
"""
TAIL = """\
};
// clang-format on

#endif
"""


def ranges():
    last = None
    for code in range(sys.maxunicode + 1):
        category = unicodedata.category(chr(code))
        kind = category if category in APART else category[0]
        if kind != last:
            yield f"{{{code:#x}, {kind}}}"
        last = kind


def main():
    if unicodedata.unidata_version != VERSION:
        sys.exit(f"make_unicode.py: error: this Python has Unicode {unicodedata.unidata_version}, not {VERSION}: "
                 f"pip install unicodedata2=={VERSION}")
    lines = [""]
    for entry in ranges():
        if len(lines[-1]) + len(entry) + 1 > 119:
            lines.append("")
        lines[-1] += entry + ","
    path = pathlib.Path(__file__).resolve().parent.parent / "data" / "unicode.h"
    path.write_text(HEAD + "\n".join(lines) + "\n" + TAIL)


if __name__ == "__main__":
    main()
