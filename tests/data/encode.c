// Prints the tokens of texts, for tests/data/test_tokenizer.py: encode TOKENIZER FILE. The file has texts, each with a
// NUL after it. The output has one line for each text, with its ids or with the reason why it cannot be encoded. The
// last line has the seconds for opening and for encoding.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/tokenizer.h"
#include "device/check.h"
#include "device/files.h"

int main(int argc, char** argv) {
    if (argc != 3) die(EXIT_USAGE, "encode TOKENIZER FILE");
    size_t size;
    char* texts = read_file(argv[2], (size_t)1 << 30, &size);
    if (!texts) die(EXIT_FAILED, "%s: cannot read", argv[2]);
    double began = host_seconds(), opened, encoded = 0;
    Tokenizer* t = tokenizer_open(argv[1]);
    opened = host_seconds() - began;

    for (char* text = texts; text < texts + size; text += strlen(text) + 1) {
        int64_t room = (int64_t)strlen(text);
        int32_t* ids = (int32_t*)host_alloc((size_t)room * sizeof(int32_t));
        began = host_seconds();
        int64_t n = tokenizer_encode(t, text, ids, room);
        encoded += host_seconds() - began;
        if (n < 0) printf("%s", tokenizer_why(t));
        for (int64_t i = 0; i < n; i++) printf("%d ", ids[i]);
        printf("\n");
        free(ids);
    }
    printf("%.3f %.3f\n", opened, encoded);
    tokenizer_close(t);
    free(texts);
    return 0;
}
