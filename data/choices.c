// Reader of multiple-choice files. A file is read whole (HellaSwag's 10,042 questions are 8 MB). The file's numbers
// become one int32 array, and the questions store offsets into the array.
#include "data/choices.h"

#include <errno.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "device/check.h"
#include "device/files.h"

// NARROW and WIDE are the magic numbers of uint16 and uint32 files.
enum { NARROW = 20240522, WIDE = 20240802, VERSION = 1, HEADER_BYTES = 1024, MAX_ENDINGS = 256 };
// The largest file that is read, in bytes.
static const size_t LIMIT = (size_t)1 << 30;

// The read position in a file.
typedef struct Reader {
    const char* path;
    int64_t at, end;  // offsets into ids; the file's first number is at 0
    int64_t width;    // bytes of a number
    int32_t vocab;
    int64_t T;  // tokens of a window
    const int32_t* ids;
} Reader;

// Ends the run with the byte offset of number `at` in the file.
static NORETURN void refuse(const Reader* r, int64_t at, const char* what) {
    die(EXIT_FAILED, "--eval: %s: byte %ld: %s; write the file again", r->path, HEADER_BYTES + at * r->width, what);
}

// The next number as unsigned: a uint32 above 2^31 is negative in ids.
static int64_t next(Reader* r) {
    if (r->at == r->end) refuse(r, r->at, "the file ends inside a question: it was cut off");
    return (uint32_t)r->ids[r->at++];
}

// Reads a count and that number of ids. Returns the offset of the first id.
static int64_t next_ids(Reader* r, int64_t* length) {
    *length = next(r);
    const int64_t from = r->at;
    if (*length > r->end - from) refuse(r, r->at, "the file ends inside a question: it was cut off");
    for (int64_t i = 0; i < *length; i++)
        if (r->ids[from + i] < 0 || r->ids[from + i] >= r->vocab) refuse(r, from + i, "an id is outside of --vocab");
    r->at = from + *length;
    return from;
}

// Reads question q and appends its endings to the list.
static void read_question(Reader* r, Choices* c, int32_t q) {
    // The head of the question.
    const int64_t start = r->at, mark = r->width == 2 ? 0xffff : 0xffffffff;
    if (next(r) != mark) refuse(r, start, "no question begins here");
    const int64_t bytes = next(r);
    next(r);  // its index, which nothing depends on
    const int64_t label = next(r), endings = next(r);
    if (endings < 2 || endings > MAX_ENDINGS || label >= endings)
        refuse(r, start, "a question has 2 to 256 endings, and its label is one of them");

    // The list grows by one question at a time: the header does not say how many endings there are.
    c->label[q] = (int32_t)label;
    c->list = (Choice*)realloc(c->list, (size_t)(c->count + endings) * sizeof(Choice));
    if (!c->list) die(EXIT_FAILED, "out of host memory for --eval");

    // The context and the endings.
    Choice choice = {.question = q};
    bool cut = false;
    choice.context = next_ids(r, &choice.context_length);
    for (int32_t i = 0; i < endings; i++) {
        choice.number = i;
        choice.ending = next_ids(r, &choice.ending_length);
        if (choice.ending_length == 0) refuse(r, choice.ending, "an ending is empty");
        if (choice.ending_length > r->T)
            die(EXIT_USAGE, "--eval: %s: question %d has an ending of %ld tokens, more than --seq-len %ld", c->name, q,
                choice.ending_length, r->T);
        c->list[c->count++] = choice;
        // The first token of a window is no target.
        cut |= choice.context_length + choice.ending_length > r->T + 1;
    }
    c->cut += cut;
    if ((r->at - start) * r->width != bytes) refuse(r, start, "the length of this question is not the recorded length");
}

// Reads one file; an error ends the run. The result owns its arrays, and choices_close frees them.
static Choices open_one(const char* path, int32_t vocab, int64_t T) {
    // The file and its header.
    size_t size;
    int32_t header[5];
    char* data = read_file(path, LIMIT, &size);
    if (!data) die(EXIT_FAILED, "--eval: %s: cannot read: %s", path, file_error(errno));
    if (size < HEADER_BYTES) die(EXIT_FAILED, "--eval: %s: shorter than its header of %d bytes", path, HEADER_BYTES);
    memcpy(header, data, sizeof(header));
    if ((header[0] != NARROW && header[0] != WIDE) || header[1] != VERSION || header[2] < 1)
        die(EXIT_FAILED,
            "--eval: %s: not a file of questions (its header is %d %d %d); scripts/prepare_eval.py makes such files",
            path, header[0], header[1], header[2]);

    // The numbers, uint16 or uint32, as int32.
    Reader r = {.path = path, .width = header[0] == NARROW ? 2 : 4, .vocab = vocab, .T = T};
    r.end = (int64_t)(size - HEADER_BYTES) / r.width;
    int32_t* ids = (int32_t*)host_alloc((size_t)r.end * sizeof(int32_t));
    for (int64_t i = 0; i < r.end; i++)
        memcpy(&ids[i], data + HEADER_BYTES + i * r.width, (size_t)r.width);  // little-endian
    r.ids = ids;

    // The questions. A question has at least 9 numbers, which bounds the count of a valid header.
    if (header[2] > r.end / 9 + 1) refuse(&r, r.end, "the header counts more questions than the file has room for");
    // The name in the log is the file's, without folder and extension.
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path, *dot = strrchr(name, '.');
    Choices c = {.name = host_format("%.*s", (int)(dot ? dot - name : (int64_t)strlen(name)), name),
                 .tokenizer = (uint32_t)header[4],
                 .hash = (uint32_t)crc32_z(0, (const Bytef*)ids, (size_t)r.end * sizeof(int32_t)),
                 .questions = header[2],
                 .label = (int32_t*)host_alloc((size_t)header[2] * sizeof(int32_t)),
                 .ids = ids};
    for (int32_t q = 0; q < c.questions; q++) read_question(&r, &c, q);

    // The file must end with the last question. The second test finds part of a number at the end.
    if (r.at != r.end || (size - HEADER_BYTES) % (size_t)r.width) refuse(&r, r.at, "bytes after the last question");
    free(data);
    return c;
}

Choices* choices_open(const char* pattern, int32_t vocab, int64_t T, int* count) {
    glob_t found;
    if (glob(pattern, GLOB_ERR, NULL, &found) != 0) die(EXIT_FAILED, "--eval: no file matches '%s'", pattern);
    Choices* files = (Choices*)host_alloc(found.gl_pathc * sizeof(Choices));
    *count = (int)found.gl_pathc;
    for (int i = 0; i < *count; i++) {
        const Choices c = files[i] = open_one(found.gl_pathv[i], vocab, T);
        if (c.cut)
            warn(
                "--eval: %s: %d of %d questions are longer than a window of --seq-len %ld: their contexts lose the "
                "beginning",
                c.name, c.cut, c.questions, T);
        for (int k = 0; k < i; k++)
            if (strcmp(files[k].name, c.name) == 0)
                die(EXIT_USAGE,
                    "--eval: two files are named %s, so their columns in the log would be one: rename a file", c.name);
    }
    globfree(&found);
    return files;
}

void choices_close(Choices* files, int count) {
    for (int i = 0; i < count; i++) {
        free(files[i].name);
        free(files[i].label);
        free(files[i].list);
        free(files[i].ids);
    }
    free(files);
}
