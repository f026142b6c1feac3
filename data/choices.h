// Multiple-choice questions in llm.c's file format (dev/data/hellaswag.py, dataloader.h). The header has 256
// little-endian int32, {20240522, 1, number of examples, bytes of the longest}. Each example is then uint16:
//
//   65535  bytes of this example  its index  label  P   n context...   n ending...   n ending...   (P endings)
//
// Each n counts the ids after it. For vocabularies above 65536, a file {20240802, 1, ...} has uint32 instead of uint16,
// and 0xffffffff instead of 65535. Files of scripts/prepare_eval.py, in either width, have the tokenizer_hash as the
// header's fifth number. In llm.c's files this number is 0.
#pragma once

#include "device/types.h"

// An ending of a question, and the context before it.
typedef struct Choice {
    int32_t question, number;         // index of the question; of the ending among the question's endings
    int64_t context, context_length;  // offset into Choices.ids, number of ids
    int64_t ending, ending_length;    // offset into Choices.ids, number of ids: at least 1
} Choice;

// The questions of one file.
typedef struct Choices {
    char* name;              // of the file, without folder and ".bin"
    uint32_t tokenizer;      // tokenizer_hash of the tokenizer that made the ids; 0: not known
    uint32_t hash;           // CRC-32 (zlib) of all numbers after the header, as int32
    int32_t questions, cut;  // cut: questions that have more than T + 1 tokens with their longest ending
    int32_t* label;          // (questions): the number of the correct ending
    int64_t count;
    Choice* list;  // (count): question after question, ending after ending
    int32_t* ids;  // all numbers of the file after its header
} Choices;

// Opens all files that match, in the order of their names; *count gets their number. A file that is missing or invalid,
// or an id outside of the vocabulary, ends the run; the message names file and byte. An ending of more than T tokens
// (--seq-len) ends the run too. Two files of one name end the run, because names are columns of the log. Contexts lose
// their beginning where a question exceeds T + 1 tokens, with a warning that counts these questions. choices_close
// frees the files.
Choices* choices_open(const char* pattern, int32_t vocab, int64_t T, int* count);
void choices_close(Choices* files, int count);
