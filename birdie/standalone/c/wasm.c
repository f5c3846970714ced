/* wasm.c: birdie.c for JavaScript, where there is no C library, and a structure is numbers in memory.
 *
 *     decoder.js ──allocate, open, tensor, array, decode, unpack──► birdie.c, lzma2.c
 *
 * An instance of the module holds one file, and its memory goes with it. BIRDIE_SMALL leaves out what the pages of
 * `birdie page` do not need.
 */
#include "birdie.c" /* for the checksum of an entry, which birdie.h has not */
#ifndef BIRDIE_SMALL
#include "lzma2.h"
#endif

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

typedef struct js_block {
    struct js_block *below;
    size_t is_free;
    size_t padding[2]; /* to 16 bytes, for vectors */
} js_block;

extern unsigned char __heap_base;
static js_block *last;
static uintptr_t end;

EXPORT(allocate) void *js_allocate(size_t size)
{
    const size_t page = 65536;
    if (!end) end = ((uintptr_t)&__heap_base + 15) & ~(uintptr_t)15;
    if (size > (size_t)-1 - end - sizeof(js_block) - page) return NULL;
    uintptr_t after = (end + sizeof(js_block) + size + 15) & ~(uintptr_t)15;
    size_t pages = (after + page - 1) / page, have = __builtin_wasm_memory_size(0);
    if (pages > have && __builtin_wasm_memory_grow(0, pages - have) == (size_t)-1) return NULL;
    js_block *added = (js_block *)end;
    added->below = last;
    added->is_free = 0;
    last = added;
    end = after;
    return added + 1;
}

EXPORT(release) void js_release(void *memory)
{
    if (memory) ((js_block *)memory - 1)->is_free = 1;
    while (last && last->is_free) {
        end = (uintptr_t)last;
        last = last->below;
    }
}

static void *allocate_for(void *opaque, size_t size)
{
    (void)opaque;
    return js_allocate(size);
}

static void release_for(void *opaque, void *memory)
{
    (void)opaque;
    js_release(memory);
}

/* ---- The file ---- */

static birdie_file *opened;
static double numbers[10 + 16]; /* what describes a tensor or an array; all of it is below 2^53 */

static uint64_t limit_of(double value)
{
    return value >= 18446744073709551616.0 ? UINT64_MAX : value < 1 ? 0 : (uint64_t)value;
}

EXPORT(open) int js_open(const void *data, size_t size, double max_bytes, double max_operations)
{
    birdie_options options = {.allocator = {allocate_for, release_for, NULL}};
    options.limits.max_bytes = limit_of(max_bytes);
    options.limits.max_operations = limit_of(max_operations);
    return birdie_open(data, size, &options, &opened);
}

EXPORT(hasViews) int js_has_views(void)
{
    return birdie_has_views(opened);
}

EXPORT(check) int js_check(void)
{
    return birdie_check(opened);
}

EXPORT(tensorCount) size_t js_tensor_count(void)
{
    return birdie_count(opened);
}

/* Describe a tensor: name, its bytes, dtype, array, first element, elements, bytes, is_alias, is_copy, dimensions,
 * shape. */
EXPORT(tensor) const double *js_tensor(size_t i)
{
    birdie_tensor of;
    birdie_get(opened, i, &of);
    const double fields[10] = {(double)(uintptr_t)of.name, (double)of.name_size, of.dtype, (double)of.array,
                               (double)of.first, (double)of.elements, (double)of.bytes, of.is_alias, of.is_copy,
                               of.dimensions};
    memcpy(numbers, fields, sizeof fields);
    for (int axis = 0; axis < of.dimensions; axis++) numbers[10 + axis] = (double)of.shape[axis];
    return numbers;
}

/* Describe an array: an error, or 0; its bytes. */
EXPORT(array) const double *js_array(size_t i)
{
    birdie_array of = {0};
    numbers[0] = birdie_array_get(opened, i, &of);
    numbers[1] = (double)of.bytes;
    return numbers;
}

EXPORT(decode) int js_decode(size_t array, void *out, size_t size)
{
    return birdie_array_decode(opened, array, BIRDIE_OWN, out, size);
}

/* Leave the metadata's address and bytes in `numbers`. */
EXPORT(metadata) const double *js_metadata(void)
{
    size_t size;
    numbers[0] = (double)(uintptr_t)birdie_metadata(opened, &size);
    numbers[1] = (double)size;
    return numbers;
}

#ifndef BIRDIE_SMALL
/* Unpack the files that are kept beside the tensors: `size` bytes in all. Return 1 if the file does not hold them. */
EXPORT(unpack) int js_unpack(unsigned char *out, size_t size)
{
    static const char name[] = {0, 'f', 'i', 'l', 'e', 's'};
    for (uint32_t i = 0; i < opened->count; i++) {
        const entry *e = &opened->entries[i];
        if (e->name_size != sizeof name || memcmp(e->name, name, sizeof name)) continue;
        if (e->kind != 5 || e->dimensions != 1 || e->shape[0] != size || e->streams != 1 || e->coder[0]) return 1;
        const uint8_t *payload = opened->data + e->offset;
        if (crc32(opened, 0, payload, (size_t)e->payload) != e->crc) return 1;
        return !birdie_lzma2(payload, (size_t)e->payload, out, size);
    }
    return size > 0;
}
#endif

/* ---- Words ---- */

static size_t length_of(const char *text)
{
    size_t size = 0;
    while (text[size]) size++;
    return size;
}

/* Leave a text's address and bytes in `numbers`. */
EXPORT(errorText) const double *js_error_text(int error)
{
    const char *text = birdie_error_text(error);
    numbers[0] = (double)(uintptr_t)text;
    numbers[1] = (double)length_of(text);
    return numbers;
}

EXPORT(dtypeName) const double *js_dtype_name(int dtype)
{
    const char *text = birdie_dtype_name(dtype);
    numbers[0] = (double)(uintptr_t)text;
    numbers[1] = (double)length_of(text);
    return numbers;
}
