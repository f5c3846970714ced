/* birdie.h: decoder of .birdie files, format version 1.0 (docs/format.md), in C99.
 *
 *     birdie_file *file;
 *     int error = birdie_open(data, size, NULL, &file);         // data stays the caller's, and stays as it is
 *     for (size_t i = 0; !error && i < birdie_count(file); i++) {
 *         birdie_tensor tensor;
 *         birdie_get(file, i, &tensor);
 *         float *out = malloc(4 * tensor.elements);
 *         error = birdie_decode(file, i, BIRDIE_FLOAT32, out, 4 * tensor.elements);
 *     }
 *     if (error) puts(birdie_error_text(error));
 *     birdie_close(file);
 *
 * birdie.c is the decoder: no dependency, no global variable, no input or output. It does what birdie.load does in
 * Python, to the same bits; every length is checked before it is believed, and a file may come from anywhere.
 *
 *     cc -std=c99 -O3 -ffp-contract=off -c birdie.c
 *
 * Floating point is that of IEEE 754: no -ffast-math, and -ffp-contract=off, since gcc ignores the pragma that says so.
 * Of the C library it takes memcpy, memset, memcmp, memchr, and, unless BIRDIE_NO_MALLOC is defined, malloc and free.
 */
#ifndef BIRDIE_H
#define BIRDIE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Errors: what functions return, and a sentence for each. A number never changes its meaning. ---- */

#define BIRDIE_ERRORS(X) \
    X(OK, 0, "no error") \
    X(ARGUMENT, 1, "an argument is null, out of range, or memory that is not aligned for its elements") \
    X(MEMORY, 2, "memory ran out") \
    X(SIZE, 3, "the buffer has not the size that the tensor takes; elements times birdie_dtype_size") \
    X(CONVERSION, 4, "the tensor cannot be had in that dtype; take its own") \
    X(TOO_MANY_BYTES, 5, "decoding takes more bytes than max_bytes;" \
      " raise it if you trust where the file comes from") \
    X(TOO_MUCH_MEMORY, 6, "decoding takes more memory than max_memory;" \
      " raise it if you trust where the file comes from") \
    X(TOO_MANY_OPERATIONS, 7, "decoding takes more operations than max_operations;" \
      " raise it if you trust where the file comes from") \
    X(NOT_BIRDIE, 16, "this is not a .birdie file") \
    X(TEXT_MODE, 17, "the file was changed by a text-mode transfer; copy it again as binary") \
    X(CUT, 18, "the file is cut, or has bytes added") \
    X(VERSION, 19, "the file has a format version other than 1.0; take a newer decoder") \
    X(HEADER, 20, "the header of the file is damaged") \
    X(HEADER_CHECKSUM, 21, "the header of the file fails its checksum") \
    X(NAMES, 22, "the names in the file are damaged: not UTF-8, not in rising order, or too long") \
    X(KIND, 23, "the file has an entry of an unknown kind; take a newer decoder") \
    X(ALIAS, 24, "an alias in the file points to no stored tensor of its shape and dtype") \
    X(GROUP, 25, "the tensors of a group in the file do not make it up") \
    X(BLOCKS, 26, "the blocks of a tensor in the file do not make it up") \
    X(METADATA, 27, "the metadata of the file is not what birdie writes") \
    X(CHECKSUM, 32, "the tensor fails its checksum; the file is damaged") \
    X(DTYPE, 33, "the tensor has an unknown dtype; take a newer decoder") \
    X(SCHEME, 34, "the tensor has a scheme of another package, or a newer one; load it with birdie") \
    X(BASE, 35, "the tensor is a delta to a tensor that neither this file nor the base has; open it with its base") \
    X(WRONG_BASE, 36, "the tensor is a delta to other numbers than the base has; open the base it was made with") \
    X(PARAMETERS, 37, "the tensor has parameters that its scheme does not allow; the file is damaged") \
    X(STREAMS, 38, "the tensor has not as many streams as its scheme needs; the file is damaged") \
    X(CODER, 39, "the tensor has an unknown coder; take a newer decoder") \
    X(PAYLOAD, 40, "a stream of the tensor has not the bytes that its coder needs; the file is damaged") \
    X(RANGE, 41, "a stream of the tensor holds numbers beyond what its scheme allows; the file is damaged") \
    X(SIDE, 42, "the side information of a stream of the tensor is damaged") \
    X(TABLE, 43, "a frequency table of a stream of the tensor is impossible; the file is damaged") \
    X(CHUNK, 44, "a coded chunk of a stream of the tensor does not end where it should; the file is damaged") \
    X(LEVELS, 45, "the levels or scales of the tensor are impossible; the file is damaged") \
    X(RUNS, 46, "the runs or matches of the tensor do not add up to it; the file is damaged")

typedef enum birdie_error {
#define BIRDIE_ERROR_(name, number, text) BIRDIE_ERROR_##name = number,
    BIRDIE_ERRORS(BIRDIE_ERROR_)
#undef BIRDIE_ERROR_
    BIRDIE_ERROR_END_
} birdie_error;

/* Return the sentence of an error, which is never freed. */
const char *birdie_error_text(int error);

/* ---- Dtypes: the numbers of the format. Words are in the order of the machine, which is little-endian. ---- */

typedef enum birdie_dtype {
    BIRDIE_BOOL, BIRDIE_UINT8, BIRDIE_INT8, BIRDIE_UINT16, BIRDIE_INT16, BIRDIE_UINT32, BIRDIE_INT32, BIRDIE_UINT64,
    BIRDIE_INT64, BIRDIE_FLOAT16, BIRDIE_BFLOAT16, BIRDIE_FLOAT32, BIRDIE_FLOAT64, BIRDIE_COMPLEX32, BIRDIE_COMPLEX64,
    BIRDIE_COMPLEX128, BIRDIE_FLOAT8_E4M3FN, BIRDIE_FLOAT8_E4M3FNUZ, BIRDIE_FLOAT8_E5M2, BIRDIE_FLOAT8_E5M2FNUZ,
    BIRDIE_FLOAT8_E8M0FNU, BIRDIE_FLOAT4_E2M1FN_X2,
    BIRDIE_OWN = -1 /* of birdie_decode: the tensor's own */
} birdie_dtype;

/* Return the name that torch has for a dtype, "float32"; NULL for a number that is none. */
const char *birdie_dtype_name(int dtype);

/* Return the bytes of an element; 0 for a number that is no dtype. */
size_t birdie_dtype_size(int dtype);

/* ---- Files ---- */

typedef struct birdie_file birdie_file;

/* Memory by the caller. Blocks are aligned as those of malloc; `alloc` returns NULL where there is none. Threads that
 * decode from one file call it at the same time. */
typedef struct birdie_allocator {
    void *(*alloc)(void *opaque, size_t size);
    void (*free)(void *opaque, void *block);
    void *opaque;
} birdie_allocator;

/* Most that one call may take, checked before it is taken; 0 stands for the default. */
typedef struct birdie_limits {
    uint64_t max_bytes;      /* decoded; default: the larger of 1 GiB and 64 times the file */
    uint64_t max_memory;     /* allocated at a time, beside the output; default of decoding: 64 MiB, 16 times the larger
                                of the array and a max_bytes that is given, and 1,024 times the file */
    uint64_t max_operations; /* of about a nanosecond; default: the larger of 2^31 and 2 for each byte of max_bytes, and
                                65,536 for each of the file */
} birdie_limits;

typedef struct birdie_options {
    birdie_allocator allocator; /* all NULL: malloc and free */
    birdie_limits limits;
    const birdie_file *base; /* open file to whose tensors those of the file are deltas, NULL for none; it has no deltas
                                itself, and stays open as long as the other */
} birdie_options;

/* Open a file that lies in memory: its header, names and metadata are checked, no payload is read.
 *
 * data: the bytes of the file. They are not copied, so they must stay where they are until birdie_close.
 * options: NULL for the defaults.
 * file: where the open file is left; NULL if it is damaged. Threads may share it: no function changes it. */
int birdie_open(const void *data, size_t size, const birdie_options *options, birdie_file **file);

/* Free a file; NULL is none. */
void birdie_close(birdie_file *file);

/* Return the metadata, JSON in UTF-8 that was checked; its bytes may be none. Nothing ends it. */
const char *birdie_metadata(const birdie_file *file, size_t *size);

/* Return 1 if the file holds views of tensors, which have no entry in the file (docs/format.md, "tree"), else 0. */
int birdie_has_views(const birdie_file *file);

/* ---- Tensors ----
 *
 * A tensor is some elements of an *array* that is stored: all of one for most, the same array for tied names, a part of
 * one for the tensors of a group. Who decodes all tensors of a file that has groups decodes each array once and cuts
 * the tensors out, `first` says where; birdie_decode decodes a whole group for one tensor of it. */

typedef struct birdie_tensor {
    const char *name;   /* UTF-8; nothing ends it */
    size_t name_size;
    int dtype;          /* birdie_dtype */
    int dimensions;
    uint64_t shape[16]; /* row-major */
    uint64_t elements;
    uint64_t bytes;     /* of the tensor in its own dtype */
    size_t array;       /* index of the array that holds it */
    uint64_t first;     /* its first element in that array */
    int is_alias;       /* 1: a second name of the tensor that has this array */
    int is_copy;        /* 1: an alias whose tensor is independent of the other when it is loaded */
} birdie_tensor;

/* Return the number of tensors; they are in the order of the bytes of their names. */
size_t birdie_count(const birdie_file *file);

/* Describe tensor `i`. */
int birdie_get(const birdie_file *file, size_t i, birdie_tensor *tensor);

/* Return the index of the tensor of a name, birdie_count if there is none. */
size_t birdie_find(const birdie_file *file, const char *name, size_t name_size);

/* Decode tensor `i`.
 *
 * dtype: BIRDIE_OWN, or the tensor's own; of tensors of float16, bfloat16, float32 and float64 also BIRDIE_FLOAT16,
 *     BIRDIE_BFLOAT16, BIRDIE_FLOAT32: rounded to float32 and from there, to the nearest, ties to even.
 * out: where the elements go in row-major order; aligned for them.
 * size: its bytes, which are elements times birdie_dtype_size, no more and no less. */
int birdie_decode(const birdie_file *file, size_t i, int dtype, void *out, size_t size);

/* ---- Arrays ---- */

typedef struct birdie_array {
    int dtype;
    uint64_t elements;
    uint64_t bytes;      /* in its own dtype */
    uint64_t payload;    /* bytes in the file */
    uint64_t operations; /* that decoding takes at most, about */
    size_t entry;        /* index of its entry in the file */
    size_t parts;        /* number of entries with its payload: blocks, or 1 */
} birdie_array;

/* Return the number of arrays. */
size_t birdie_array_count(const birdie_file *file);

/* Describe an array, and what decoding it takes; an error says why it cannot be decoded. */
int birdie_array_get(const birdie_file *file, size_t array, birdie_array *description);

/* Decode an array as birdie_decode does a tensor. */
int birdie_array_decode(const birdie_file *file, size_t array, int dtype, void *out, size_t size);

/* Check that all arrays together are within the limits, as who decodes a whole file should first. */
int birdie_check(const birdie_file *file);

/* ---- Entries: the file as it is, for tools ---- */

typedef struct birdie_entry {
    const char *name; /* with NUL where it is no tensor's */
    size_t name_size;
    int kind;         /* 0 tensor, 1 alias, 2 blocks, 3 member, 4 delta, 5 files */
    int scheme;       /* number, 0 for what is no tensor */
    int dtype;
    int dimensions;
    uint64_t shape[16];
    size_t target;             /* of aliases and members: index of the entry they refer to */
    const int64_t *parameters;
    size_t parameter_count;
    const uint8_t *coders; /* a number for each stream */
    size_t stream_count;
    const uint8_t *payload; /* of all streams, one after the other; its checksum is not looked at */
    uint64_t payload_size;
} birdie_entry;

/* Return the number of entries. */
size_t birdie_entry_count(const birdie_file *file);

/* Describe an entry. */
int birdie_entry_get(const birdie_file *file, size_t i, birdie_entry *entry);

/* Return the bytes of a stream's payload; 0 where there is none. */
uint64_t birdie_entry_stream(const birdie_file *file, size_t i, size_t stream);

#ifdef __cplusplus
}
#endif
#endif
