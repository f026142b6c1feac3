#!/bin/sh
# Installs missing packages for the CPU build and its tests. If none is missing, it is silent and needs no network.
# It uses apt as root or through sudo. Elsewhere it prints the command to run and stops, unless only optional ones are missing.
# `make probe` names the packages of conda-forge and of modules, which need no root.
missing=""
command -v "${CC:-gcc}" >/dev/null 2>&1 || missing="$missing gcc libc6-dev"
command -v make >/dev/null 2>&1 || missing="$missing make"
python=${PYTHON:-python3}
"$python" -c 'import gzip, lzma, unittest' 2>/dev/null || missing="$missing python3"
! command -v "$python" >/dev/null 2>&1 || "$python" "$(dirname "$0")/least_python.py" || exit

has() { [ -n "$(sh "$(dirname "$0")/find.sh" "$@")" ]; }
has zlib zlib.h z || missing="$missing zlib1g-dev"
has openblas cblas.h openblas "cblas blas" cblas || missing="$missing libopenblas-dev"

# Open MPI is for runs of several ranks. All else works without it.
wanted=""
[ "${MPI:-1}" = 0 ] || command -v mpicc >/dev/null 2>&1 || wanted=" libopenmpi-dev openmpi-bin"
without() {
    echo "setup: without$wanted ($1)" >&2
    exit 0
}

[ -z "$missing$wanted" ] && exit 0

# Another apt may be at work, such as the upgrades of a machine that has just started: minutes.
apt="env LC_ALL=C apt-get -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o DPkg::Lock::Timeout=600"
install="install -y --no-install-recommends"
if ! command -v apt-get >/dev/null 2>&1; then
    [ -z "$missing" ] && without "this is no Debian or Ubuntu: install it with this system's package manager"
    echo "setup: missing (by their Debian names):$missing$wanted" >&2
    echo "setup: this is no Debian or Ubuntu; install them with this system's package manager, conda or modules" >&2
    echo "setup: (make probe has their names) and run make again" >&2
    exit 1
fi
if [ "$(id -u)" = 0 ]; then
    as_root=""
elif command -v sudo >/dev/null 2>&1 && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
    as_root="sudo"
else
    [ -z "$missing" ] && without "as root: apt-get $install$wanted"
    echo "setup: missing:$missing$wanted; run this as root, then make again:" >&2
    echo "    apt-get update && apt-get $install$missing$wanted" >&2
    echo "setup: without root: make probe has the names in conda-forge and of modules" >&2
    exit 1
fi
echo "setup: installing$missing$wanted"
export DEBIAN_FRONTEND=noninteractive
# DPkg::Lock::Timeout is not for the lock of the lists.
tries=60
until said=$($as_root $apt update -qq 2>&1); do
    case $said in *"Could not get lock"*) tries=$((tries - 1)) ;; *) tries=0 ;; esac
    [ $tries -gt 0 ] && sleep 10 && continue
    [ -z "$missing" ] && break
    printf '%s\n' "$said" "setup: this failed: apt-get update" >&2
    exit 1
done
[ -z "$missing" ] || $as_root $apt $install $missing >/dev/null || {
    echo "setup: this failed: apt-get $install$missing" >&2
    exit 1
}
[ -z "$wanted" ] || $as_root $apt $install $wanted >/dev/null ||
    without "this failed: apt-get $install$wanted"
