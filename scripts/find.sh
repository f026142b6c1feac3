#!/bin/sh
# find.sh PACKAGE HEADER LIBRARY...: the flags that compile and link with the first library found, or nothing.
# Order: the folders NCCL_HOME, CUDA_HOME and CONDA_PREFIX; those that the compiler knows (also by CPATH and
# LIBRARY_PATH, which modules set); pkg-config's PACKAGE; PIP, the folders of pip's nvidia-* packages.
package=$1 header=$2
shift 2

works() {
    printf '#if !__has_include(<%s>)\n#error\n#endif\nint main(void) { return 0; }\n' "$header" |
        ${CC:-gcc} -x c - -o /dev/null "$@" 2>/dev/null && echo "$@" && exit
}

# below PREFIX LIBRARY...: conda has CUDA in targets/; pip's libraries have a version after .so
below() {
    prefix=$1
    shift
    for library in "$@"; do
        for file in "$prefix"/lib*/"lib$library".so* "$prefix"/targets/*/lib/"lib$library".so*; do
            folder=${file%/*}
            [ ! -e "$file" ] || works -I"${folder%/*}/include" -L"$folder" -Wl,-rpath,"$folder" -l:"${file##*/}"
        done
    done
}

for prefix in $NCCL_HOME $CUDA_HOME $CONDA_PREFIX; do below "$prefix" "$@"; done
for libraries in "$@"; do works $(printf -- '-l%s ' $libraries); done
flags=$(pkg-config --cflags --libs "$package" 2>/dev/null) && works $flags
for prefix in $PIP; do below "$prefix" "$@"; done
exit 0
