// safetensors, Hugging Face's file format for tensors (https://github.com/huggingface/safetensors, "Format"). A file
// has three parts: the header's length (8 bytes, little-endian), the header in JSON, and the tensors' bytes. The header
// is {name: {dtype, shape, data_offsets}, "__metadata__": {..}}.
//
//   | length | {"a": {..., "data_offsets": [0, 64]}, "b": {...}} | a        | b        |
//   0        8                                                   data 0     data 64
#pragma once

#include "data/json.h"
#include "device/types.h"

// The element types that this program reads; st_open refuses a file with others.
typedef enum { ST_F64, ST_F32, ST_F16, ST_BF16, ST_I64, ST_I32, ST_U8, ST_F8_E4M3, ST_DTYPES } StDtype;
size_t st_dtype_bytes(StDtype dtype);

// A tensor's entry in the header. Shapes are row-major, with at most 4 dimensions.
typedef struct StTensor {
    char* name;  // in the header of the file
    StDtype dtype;
    int rank;
    int64_t shape[4];
    int64_t offset;  // of the first byte, from the start of the file
    int64_t bytes;
    bool used;  // a mark for the caller of st_open
} StTensor;

// An open file. st_read reads a tensor's data on request, so only the header is in memory.
typedef struct SafeTensors {
    char* path;
    int count;
    StTensor* tensors;  // in order of name
    Json* header;       // with "__metadata__"
    int fd;
} SafeTensors;

// Opens a file and checks its header: unique names, offsets inside the file, bytes = shape * dtype, no overlap and no
// hole, as the format requires. NULL on error with a message that names the file.
SafeTensors* st_open(const char* path, char* error, size_t error_size);
void st_close(SafeTensors* st);
const StTensor* st_find(const SafeTensors* st, const char* name);  // NULL if absent
// Reads elements first .. first + count - 1 of a tensor, in the tensor's dtype. 0, or -1 with errno set.
int st_read(const SafeTensors* st, const StTensor* tensor, int64_t first, int64_t count, void* out);

// Plans a file. Sets the tensors' offset and bytes from name, dtype, rank and shape, in the given order. Returns the
// header in fresh memory, with its 8-byte length, padded with spaces to a multiple of 8. The header's size, in *size,
// is the offset of the data in the file.
char* st_plan_header(StTensor* tensors, int count, int64_t* size);
