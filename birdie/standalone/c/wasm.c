/* wasm.c: birdie.c for JavaScript, where there is no C library, and a structure is numbers in memory.
 *
 *     decoder.js ──allocate, open, tensor, array, decode, unpack──► birdie.c, lzma2.c
 *
 * An instance of the module holds one file, and its memory goes with it.
 */
#include <string.h>

#include "birdie.h"
#include "lzma2.h"

#define EXPORT(name) __attribute__((export_name(#name)))

/* ---- Of the C library. The first three are instructions of WebAssembly ("bulk memory"). ---- */

void *memcpy(void *restrict to, const void *restrict from, size_t size)
{
    return __builtin_memcpy(to, from, size);
}

void *memmove(void *to, const void *from, size_t size)
{
    return __builtin_memmove(to, from, size);
}

void *memset(void *to, int byte, size_t size)
{
    return __builtin_memset(to, byte, size);
}

int memcmp(const void *a, const void *b, size_t size)
{
    const unsigned char *x = a, *y = b;
    for (size_t i = 0; i < size; i++) {
        if (x[i] != y[i]) return x[i] - y[i];
    }
    return 0;
}

void *memchr(const void *memory, int byte, size_t size)
{
    const unsigned char *at = memory;
    for (size_t i = 0; i < size; i++) {
        if (at[i] == (unsigned char)byte) return (void *)(at + i);
    }
    return NULL;
}

/* ---- Memory: a stack of blocks. The last one is given back once it is free, with all free ones below it. ---- */

typedef struct block {
    struct block *below;
    size_t is_free;
    size_t padding[2]; /* to 16 bytes, for vectors */
} block;

extern unsigned char __heap_base;
static block *last;
static uintptr_t end;

EXPORT(allocate) void *allocate(size_t size)
{
    const size_t page = 65536;
    if (!end) end = ((uintptr_t)&__heap_base + 15) & ~(uintptr_t)15;
    if (size > (size_t)-1 - end - sizeof(block) - page) return NULL;
    uintptr_t after = (end + sizeof(block) + size + 15) & ~(uintptr_t)15;
    size_t pages = (after + page - 1) / page, have = __builtin_wasm_memory_size(0);
    if (pages > have && __builtin_wasm_memory_grow(0, pages - have) == (size_t)-1) return NULL;
    block *added = (block *)end;
    added->below = last;
    added->is_free = 0;
    last = added;
    end = after;
    return added + 1;
}

EXPORT(release) void release(void *memory)
{
    if (memory) ((block *)memory - 1)->is_free = 1;
    while (last && last->is_free) {
        end = (uintptr_t)last;
        last = last->below;
    }
}

static void *allocate_for(void *opaque, size_t size)
{
    (void)opaque;
    return allocate(size);
}

static void release_for(void *opaque, void *memory)
{
    (void)opaque;
    release(memory);
}

/* ---- The file ---- */

static birdie_file *file;
static double numbers[10 + 16]; /* what describes a tensor or an array; all of it is below 2^53 */

static uint64_t limit(double value)
{
    return value >= 18446744073709551616.0 ? UINT64_MAX : value < 1 ? 0 : (uint64_t)value;
}

EXPORT(open) int open(const void *data, size_t size, double max_bytes, double max_operations)
{
    birdie_options options = {.allocator = {allocate_for, release_for, NULL}};
    options.limits.max_bytes = limit(max_bytes);
    options.limits.max_operations = limit(max_operations);
    return birdie_open(data, size, &options, &file);
}

EXPORT(hasViews) int has_views(void)
{
    return birdie_has_views(file);
}

EXPORT(check) int check(void)
{
    return birdie_check(file);
}

EXPORT(tensorCount) size_t tensor_count(void)
{
    return birdie_count(file);
}

/* Describe a tensor: name, its bytes, dtype, array, first element, elements, bytes, is_alias, is_copy, dimensions,
 * shape. */
EXPORT(tensor) const double *tensor(size_t i)
{
    birdie_tensor of;
    birdie_get(file, i, &of);
    const double fields[10] = {(double)(uintptr_t)of.name, (double)of.name_size, of.dtype, (double)of.array,
                               (double)of.first, (double)of.elements, (double)of.bytes, of.is_alias, of.is_copy,
                               of.dimensions};
    memcpy(numbers, fields, sizeof fields);
    for (int axis = 0; axis < of.dimensions; axis++) numbers[10 + axis] = (double)of.shape[axis];
    return numbers;
}

/* Describe an array: an error, or 0; its bytes. */
EXPORT(array) const double *array(size_t i)
{
    birdie_array of = {0};
    numbers[0] = birdie_array_get(file, i, &of);
    numbers[1] = (double)of.bytes;
    return numbers;
}

EXPORT(decode) int decode(size_t array, void *out, size_t size)
{
    return birdie_array_decode(file, array, BIRDIE_OWN, out, size);
}

/* Leave the metadata's place and bytes in `numbers`. */
EXPORT(metadata) const double *metadata(void)
{
    size_t size;
    numbers[0] = (double)(uintptr_t)birdie_metadata(file, &size);
    numbers[1] = (double)size;
    return numbers;
}

/* Unpack the files that are kept beside the tensors: `size` bytes in all. Return 1 if these are not what they are. */
EXPORT(unpack) int unpack(unsigned char *out, size_t size)
{
    static const char name[] = {0, 'f', 'i', 'l', 'e', 's'};
    for (size_t i = 0; i < birdie_entry_count(file); i++) {
        birdie_entry of;
        if (birdie_entry_get(file, i, &of) || of.name_size != sizeof name || memcmp(of.name, name, sizeof name)) continue;
        if (of.kind != 5 || of.dimensions != 1 || of.shape[0] != size || of.stream_count != 1 || of.coders[0]) return 1;
        return !birdie_lzma2(of.payload, (size_t)of.payload_size, out, size);
    }
    return 1;
}

/* ---- Words ---- */

static size_t length(const char *text)
{
    size_t size = 0;
    while (text[size]) size++;
    return size;
}

/* Leave a text's place and bytes in `numbers`. */
EXPORT(errorText) const double *error_text(int error)
{
    const char *text = birdie_error_text(error);
    numbers[0] = (double)(uintptr_t)text;
    numbers[1] = (double)length(text);
    return numbers;
}

EXPORT(dtypeName) const double *dtype_name(int dtype)
{
    const char *text = birdie_dtype_name(dtype);
    numbers[0] = (double)(uintptr_t)text;
    numbers[1] = (double)length(text);
    return numbers;
}
