#!/usr/bin/env python3
"""Makes shards of more than two billion tokens from sources of Debian 12: code in many languages and its prose.

    cd FOLDER && apt-get source --download-only PACKAGE ...
    python3 bench/source_text.py FOLDER --val ANOTHER --out corpus

It needs the tokenizers package. The folders have the archives of training and of validation, *.orig*.tar.*, which are not unpacked on
the disk. No package may be in both.

A document is a file with a suffix of LANGUAGES. Left out are files of less than 200 or more than 1.5 million characters, those with long
lines, as minified ones, tables of numbers, and text that is not in ASCII. Equal files are left out too, and near-equal ones: more than
half of their lines of 30 characters or more are in files before them. Validation comes first, so training has no near-equal of it.

The order is that of hashes of the files' names: random, and the same in each run. So the first shards have files of all packages. The text
is made in parts, one after another. The first part trains the tokenizer. Later parts are smaller, as files before them have more of their
lines. A run that was ended goes on with the first part that has no shards. The text takes three times the disk of its shards.

The packages below of November 2026 give 7.9 GB of text in 10 parts: 2,403 million tokens in 53 shards, and 3.9 million of validation.
Before, 28 % were near-equal and 2 % equal. Archives named *l10n*, *translations*, *helpcontent*, *hyphenation*, *models* or
*regressiontests* are not among them. It takes three quarters of an hour on two cores.

validation: exim4 maven pylint rust-ripgrep
training: ant apache2 autoconf automake-1.16 bash bind9 binutils bioperl bison blender boost1.81 bouncycastle calibre cmake containerd
coreutils curl derby dlib docker.io dokuwiki dovecot dpdk elixir-lang emacs erlang etcd ffmpeg findutils firefox-esr flex fpc frr gawk
gcc-12 gdb ghc ghdl gimp git glib2.0 glibc gnupg2 gnutls28 godot golang-1.19 golang-golang-x-tools golang-google-grpc grep gromacs groovy
gtk4 haproxy heimdal hsqldb hugo icinga2 iverilog jinja2 josm jython krb5 krita kubernetes lammps lapack ldc libapache-poi-java
libgcrypt20 libnb-platform18-java libpod libreoffice libspring-java libtool linux llvm-toolchain-15 lua5.4 lucene-solr make-dfsg manpages
mariadb mediawiki memcached mercurial mesa mono nagios4 netty neutron nginx nim nmap node-typescript nodejs nss ocaml octave openjdk-17
openjfx openldap openssh openssl openttd perl php8.2 phpmyadmin postfix postgis postgresql-15 prometheus python-django python3.11 pytorch
qemu qtbase-opensource-src r-base racket rails rdkit redis request-tracker5 roundcube rsyslog ruby3.1 rustc sagemath samba scala sed
sqlite3 squid swi-prolog symfony sympy syncthing syslog-ng systemd tar tcl8.6 texinfo tomcat10 trilinos tryton-server verilator vim vtk9
webkit2gtk wine wireshark wordpress xen yosys zabbix
"""
import argparse
import collections
import hashlib
import multiprocessing
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import tarfile
import zlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import least_python  # noqa: E402,F401

END = "<|endoftext|>"
LANGUAGES = {
    "C": ".c .h", "C++": ".cc .cpp .cxx .hh .hpp .hxx .ipp .inl .mm", "Java": ".java", "Rust": ".rs", "Go": ".go", "Python": ".py .pyx",
    "JavaScript": ".js .mjs .jsm .jsx", "TypeScript": ".ts .tsx", "Perl": ".pl .pm .t", "PHP": ".php", "Ruby": ".rb", "C#": ".cs",
    "Lisp": ".el .lisp .scm .ss", "Haskell": ".hs", "Erlang": ".erl .hrl", "OCaml": ".ml .mli", "Pascal": ".pas .pp", "SQL": ".sql",
    "Fortran": ".f .f90", "Scala": ".scala", "shell": ".sh .cmake", "R": ".R .Rd", "assembly": ".S .asm",
    "other code": ".lua .tcl .m .jl .vim .nim .ex .exs .rkt .kt .groovy .vhdl",
    "prose": ".md .rst .txt .texi .pod .adoc .org .tex .sgml .1 .2 .3 .4 .5 .7 .8"}
LANGUAGE = {suffix: language for language, suffixes in LANGUAGES.items() for suffix in suffixes.split()}
SHORTEST, LONGEST = 200, 1500000  # characters of a file
LONG_LINE, MEAN_LINE = 5000, 200  # characters, of lines that nobody wrote
LINE = 30  # characters of a line that shows where it is from


def why_not(data):
    """Why a file is left out for its text alone, or None."""
    text = data.decode()
    lines = text.splitlines()
    if not SHORTEST <= len(text) <= LONGEST or b"\0" in data or END in text:
        return "size or bytes"
    if max(map(len, lines)) > LONG_LINE or len(text) > MEAN_LINE * len(lines):
        return "long lines"
    if 5 * (len(data) - len(data.translate(None, b"0123456789"))) > len(data.translate(None, b" \t\n")):
        return "numbers"
    return "not in ASCII" if 20 * len(data.translate(None, bytes(range(128)))) > len(text) else None


def files_of(tar):
    """The files of an archive, and of archives at its top, as (name, bytes). AMD's registers of GPUs are 377 MB of numbers."""
    for member in tar:
        if not member.isfile() or "/drivers/gpu/drm/amd/include" in member.name:
            continue
        if ".tar." in member.name and member.name.count("/") == 1:
            with tarfile.open(fileobj=tar.extractfile(member)) as inner:
                yield from files_of(inner)
        elif os.path.splitext(member.name)[1] in LANGUAGE and SHORTEST <= member.size <= 4 * LONGEST:
            yield member.name, tar.extractfile(member).read()


def read_archive(job):
    """Writes the files of an archive to the parts that the hashes of their names choose."""
    archive, parts = job
    package = archive.name.partition("_")[0]
    left_out = collections.Counter()
    spools = [open(part / archive.name, "wb") for part in parts]
    with tarfile.open(archive) as tar:
        for name, data in files_of(tar):
            try:
                data.decode("utf-8")
            except UnicodeDecodeError:
                data = data.decode("latin-1").encode()
            data = data.replace(b"\r\n", b"\n")
            reason = why_not(data)
            if reason:
                left_out[reason] += len(data)
                continue
            key = hashlib.blake2b(os.fsencode(f"{package}/{name}"), digest_size=16).digest()
            part = int.from_bytes(key[:8], "big") * len(parts) >> 64
            pickle.dump((key, package, LANGUAGE[os.path.splitext(name)[1]], data), spools[part])
    for spool in spools:
        spool.close()
    return archive.name, left_out


def load(spool):
    """The files of a part, in their order."""
    files = []
    for path in spool.iterdir():
        with open(path, "rb") as file:
            while file.peek(1):
                files.append(pickle.load(file))
    return sorted(files)


class Seen:
    """The texts so far. A line is a bit of 2^32, at its checksum. At most a line in fifty is taken for another one."""

    def __init__(self):
        self.files, self.lines = set(), bytearray(1 << 29)

    def take(self, data):
        """Why a file is left out for the files before it, or None: then it is one of them."""
        key = hashlib.sha256(data).digest()
        if key in self.files:
            return "equal"
        lines = [zlib.crc32(line) for line in map(bytes.strip, data.split(b"\n")) if len(line) >= LINE]
        if 2 * sum(self.lines[line >> 3] >> (line & 7) & 1 for line in lines) > len(lines):
            return "near-equal"
        self.files.add(key)
        for line in lines:
            self.lines[line >> 3] |= 1 << (line & 7)
        return None


def archives_in(folder):
    return sorted(path for path in pathlib.Path(folder).iterdir() if path.suffix in (".gz", ".xz", ".bz2") and ".orig" in path.name)


def select(training, validation, folder, parts):
    """Writes the text of validation and of the parts of training into a new folder, and an account of it."""
    archives = {"train": archives_in(training), "val": archives_in(validation)}
    packages = {split: {path.name.partition("_")[0] for path in paths} for split, paths in archives.items()}
    if packages["train"] & packages["val"] or not all(packages.values()):
        sys.exit(f"source_text.py: error: {validation}: needs packages, and others than {training}")
    spools = {"val": [folder / "val"], "train": [folder / f"part_{number:03d}" for number in range(parts)]}
    for spool in (*spools["val"], *spools["train"]):
        spool.mkdir(parents=True)
    todo = [(path, spools[split]) for split, paths in archives.items() for path in paths]
    account = collections.Counter()
    with multiprocessing.Pool() as pool:
        for name, left_out in pool.imap_unordered(read_archive, sorted(todo, key=lambda job: -job[0].stat().st_size), 1):
            print(f"source_text.py: read {name}", flush=True)
            account.update({("left out", reason): size for reason, size in left_out.items()})

    seen = Seen()
    for split, spool in [(split, spool) for split in ("val", "train") for spool in spools[split]]:
        with open(f"{spool}.txt", "wb") as out:
            for _, package, language, data in load(spool):
                reason = seen.take(data)
                if reason:
                    account["left out", reason] += len(data)
                    continue
                out.write(data + END.encode())
                account["language", language] += len(data)
                account[split, package] += len(data)
                account["all", split] += len(data)
        shutil.rmtree(spool)
        print(f"source_text.py: selected {spool.name}", flush=True)
    return "".join(f"{kind}\t{name}\t{size}\n" for (kind, name), size in sorted(account.items()))


def tokenize(out, text, val, shard_tokens):
    """Makes the shards of a part, and gives them the next numbers."""
    new = out / "next"
    if text.exists():
        shutil.rmtree(new, ignore_errors=True)
        tokenizer = out / "text_tokenizer.json"
        options = (["--val-fraction", "0", "--tokenizer", f"tokenizers:{tokenizer}"] if tokenizer.exists() else
                   ["--val", val, "--train-tokenizer", "32000"])
        made = subprocess.run([sys.executable, ROOT / "scripts/prepare_text.py", text, "--split-on", END, "--out", new, "--shard-tokens",
                               str(shard_tokens), *options], check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout
        print(text.name, *made.splitlines()[:-1], sep="\n", flush=True)  # the last line names the new folder
        text.unlink()
    if new.exists():
        for path in sorted(new.iterdir()):
            number = len(list(out.glob("text_train_*.bin")))
            path.rename(out / (f"text_train_{number:06d}.bin" if "_train_" in path.name else path.name))
        new.rmdir()


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("training", help="folder of archives")
    parser.add_argument("--val", required=True, metavar="FOLDER", help="archives of validation")
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--parts", type=int, default=10, metavar="N", help="parts of the text (10)")
    parser.add_argument("--shard-tokens", type=int, default=50_000_000, metavar="N", help="tokens per shard at most (50000000)")
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    texts, account = args.out / "texts", args.out / "text_account.tsv"
    if not account.exists():
        shutil.rmtree(texts, ignore_errors=True)
        lines = select(args.training, args.val, texts, args.parts)
        account.write_text(lines, "utf-8")
    for number in range(args.parts):
        tokenize(args.out, texts / f"part_{number:03d}.txt", texts / "val.txt", args.shard_tokens)
    shutil.rmtree(texts, ignore_errors=True)


if __name__ == "__main__":
    main()
