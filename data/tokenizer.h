// Tokens back into text, for samples and logs, and prompts into tokens.
//
// A tokenizer file has llm.c's layout: 256 little-endian uint32 {20240328, 2, number of tokens, end-of-text id, 0...},
// then for each token one length byte and its bytes. Or it is Hugging Face's tokenizer.json; its name ends in .json.
// One that lies beside a table (x.json beside x.bin) is read instead of it, and must have the table's tokens. Without a
// file the tokens are bytes: ids 0..255, 256 = end of text.
#ifndef DATA_TOKENIZER_H
#define DATA_TOKENIZER_H

#include <stdbool.h>

#include "device/types.h"

BEGIN_C

enum { TOKENIZER_MAGIC = 20240328 };  // the first number of a tokenizer file

typedef struct Tokenizer Tokenizer;

// path "" gives the byte tokenizer. die()s naming the file and the reason on a file that is not one.
Tokenizer* tokenizer_open(const char* path);
void tokenizer_close(Tokenizer* tokenizer);
int32_t tokenizer_size(const Tokenizer* tokenizer);
int32_t tokenizer_eot(const Tokenizer* tokenizer);  // end of text
// Whether text is encoded as the tokenizer itself does it. A table alone does not tell how: then it is the longest
// match.
bool tokenizer_exact(const Tokenizer* tokenizer);

// The bytes of a token (not NUL-terminated), NULL for ids out of range; end of text and unknown ids have length 0.
const char* tokenizer_decode(const Tokenizer* tokenizer, int32_t id, int* length);

// By the merges of tokenizer.json: the ids that the library tokenizers gives, without what it puts around a text; names
// of special tokens are text. Else the longest token, again and again. Returns the number of ids written, at most
// `room`; -1 where it cannot be done, and tokenizer_why says why. By one thread at a time.
int64_t tokenizer_encode(const Tokenizer* tokenizer, const char* text, int32_t* ids, int64_t room);
const char* tokenizer_why(const Tokenizer* tokenizer);

END_C

#endif
