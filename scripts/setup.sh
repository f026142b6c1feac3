#!/bin/sh
# Installs what the CPU build and its tests need and this machine lacks; silent, and without network, where nothing is missing.
# As root or through sudo with apt; elsewhere it prints the command to run and stops.
missing=""
command -v "${CC:-gcc}" >/dev/null 2>&1 || missing="$missing gcc libc6-dev"
command -v make >/dev/null 2>&1 || missing="$missing make"
python3 -c 'import gzip, lzma, unittest' 2>/dev/null || missing="$missing python3"

# has HEADER LIBRARY...: a program that includes the header links against one of the libraries
has() {
    header=$1
    shift
    for library in "$@"; do
        printf '#include <%s>\nint main(void) { return 0; }\n' "$header" |
            "${CC:-gcc}" -x c - -o /dev/null $library 2>/dev/null && return 0
    done
    return 1
}
has zlib.h -lz || missing="$missing zlib1g-dev"
has cblas.h -lopenblas "-lcblas -lblas" -lcblas || missing="$missing libopenblas-dev"

[ -z "$missing" ] && exit 0

command="apt-get install -y --no-install-recommends$missing"
if ! command -v apt-get >/dev/null 2>&1; then
    echo "setup: missing (by their Debian names):$missing" >&2
    echo "setup: this is no Debian or Ubuntu; install them with this system's package manager and run make again" >&2
    exit 1
fi
if [ "$(id -u)" = 0 ]; then
    as_root=""
elif command -v sudo >/dev/null 2>&1 && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
    as_root="sudo"
else
    echo "setup: missing:$missing; run this as root, then make again:" >&2
    echo "    apt-get update && $command" >&2
    exit 1
fi
echo "setup: installing$missing"
export DEBIAN_FRONTEND=noninteractive
$as_root apt-get update -qq && $as_root $command >/dev/null || {
    echo "setup: this failed: $command" >&2
    exit 1
}
