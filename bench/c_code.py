#!/usr/bin/env python3
"""Makes the shards of "C code 2" (bench/RESULTS.md) from sources of Debian 12, with the tokenizers package:

    apt-get install linux-source-6.1
    apt-get source --download-only ffmpeg git openssl qemu
    for archive in *.orig.tar.?z /usr/src/linux-source-6.1.tar.xz; do tar xf $archive --wildcards '*.c' '*.h'; done
    python3 bench/c_code.py ffmpeg-5.1.9 git-2.39.5 openssl-3.0.22 qemu-7.2.0 linux-source-6.1 --out corpus

A document is a file of C. Files are in random order, so that the first shards are a sample of all. Left out are equal files, those of less
than 200 or more than 1.5 million characters, and the registers of AMD's GPUs: 377 MB of numbers. It takes a quarter of an hour on two cores.
"""
import argparse
import hashlib
import os
import pathlib
import random
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import least_python  # noqa: E402,F401

END = "<|endoftext|>"


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+", help="folders")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()

    # The files, in an order that depends on their names alone.
    files = []
    for source in args.sources:
        found = [os.path.join(folder, name) for folder, _, names in os.walk(source) for name in names
                 if name.endswith((".c", ".h")) and "/drivers/gpu/drm/amd/include" not in folder]
        files += sorted(filter(os.path.isfile, found))
    random.Random(1).shuffle(files)

    # Their text, each once.
    os.makedirs(args.out, exist_ok=True)
    text = pathlib.Path(args.out, "c.txt")
    seen = set()
    with open(text, "w", encoding="utf-8") as out:
        for file in files:
            try:
                code = pathlib.Path(file).read_text("utf-8")
            except UnicodeDecodeError:
                code = pathlib.Path(file).read_text("latin-1")
            key = hashlib.sha256(code.encode()).digest()
            if key not in seen and 200 <= len(code) <= 1500000 and END not in code:
                seen.add(key)
                out.write(code + END)
    done = subprocess.run([sys.executable, ROOT / "scripts/prepare_text.py", text, "--split-on", END, "--out", args.out, "--name", "c",
                           "--train-tokenizer", "32000", "--val-fraction", "0.008", "--shard-tokens", "24000000"])
    text.unlink()
    sys.exit(done.returncode)  # prepare_text.py has printed the fault


if __name__ == "__main__":
    main()
