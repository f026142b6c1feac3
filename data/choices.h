// Multiple-choice questions in llm.c's file format (dev/data/hellaswag.py, dataloader.h): a header of 256 little-endian
// int32, {20240522, 1, number of examples, bytes of the longest}, then for each example uint16
//
//   65535  bytes of this example  its index  label  P   n context...   n ending...   n ending...   (P endings)
//
// where each n counts the ids after it. For vocabularies above 65536, {20240802, 1, ...} has uint32 instead of uint16,
// and 0xffffffff as the mark. scripts/prepare_eval.py writes both.
#ifndef DATA_CHOICES_H
#define DATA_CHOICES_H

#include "device/types.h"

BEGIN_C

// An ending of a question, with the context that it completes.
typedef struct Choice {
    int32_t question, number;         // of the ending among its question's
    int64_t context, context_length;  // ids from there on
    int64_t ending, ending_length;    // not empty
} Choice;

typedef struct Choices {
    char* name;  // of the file, without folder and ".bin"
    int32_t questions;
    int32_t* label;  // (questions): the number of the right ending
    int64_t count;
    Choice* list;  // (count): question after question, ending after ending
    int32_t* ids;
} Choices;

// All files that match, in the order of their names; *count gets how many. Ends the run, naming file and byte, at what
// does not have this form or has an id outside of the vocabulary.
Choices* choices_open(const char* option, const char* pattern, int32_t vocab, int* count);
void choices_close(Choices* files, int count);

END_C

#endif
