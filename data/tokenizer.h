// Turning tokens back into text, for samples and logs, and prompts into bytes.
//
// A tokenizer file has llm.c's layout: 256 little-endian uint32 {20240328, 2, number of tokens, end-of-text id, 0...},
// then for each token one length byte and its bytes. Without a file the tokens are bytes: ids 0..255, 256 = end of
// text.
#ifndef DATA_TOKENIZER_H
#define DATA_TOKENIZER_H

#include "device/types.h"

BEGIN_C

typedef struct Tokenizer Tokenizer;

// path "" gives the byte tokenizer. die()s naming the file and the reason on a file that is not one.
Tokenizer* tokenizer_open(const char* path);
void tokenizer_close(Tokenizer* tokenizer);
int32_t tokenizer_size(const Tokenizer* tokenizer);
int32_t tokenizer_eot(const Tokenizer* tokenizer);  // end of text

// The bytes of a token (not NUL-terminated), NULL for ids out of range; end of text and unknown ids have length 0.
const char* tokenizer_decode(const Tokenizer* tokenizer, int32_t id, int* length);

// Greedy longest match over the token table: enough for a prompt (BPE's own merges may cut differently). Returns the
// number of ids written, at most `room`; -1 where some byte has no token.
int64_t tokenizer_encode(const Tokenizer* tokenizer, const char* text, int32_t* ids, int64_t room);

END_C

#endif
