/* Mutants for the decoder in C, compiled with it, so that its checks of checksums can be got around.
 *
 * stdin: seed (4 bytes), mutants of each file (4); then files, each its length (4) and bytes, the first one being the
 * base of all deltas. stdout: a line for each file: its error, and how many of its mutants were decoded and refused.
 * Every decoded tensor lies in memory of just its size, and what the decoder allocates is counted: whatever is read or
 * written beyond is a report of AddressSanitizer, whatever C leaves undefined one of UndefinedBehaviorSanitizer.
 */
#include "birdie.c"

#include <stdio.h>

static size_t held, most_held;
static uint64_t state;

static void *counted_alloc(void *opaque, size_t size) {
    size_t *block = malloc(size + 16);
    (void)opaque;
    if (!block) return NULL;
    held += *block = size;
    if (held > most_held) most_held = held;
    return (char *)block + 16;
}

static void counted_free(void *opaque, void *block) {
    size_t *first = (size_t *)(void *)((char *)block - 16);
    (void)opaque;
    held -= *first;
    free(first);
}

static uint64_t below(uint64_t n) { /* xorshift64* (Vigna 2016) */
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return n ? (state * 2685821657736338717u >> 11) % n : 0;
}

static const birdie_options limits = {{counted_alloc, counted_free, NULL}, {1 << 20, 1 << 28, 20000000}, NULL};

/* Decode array i; return its error. */
static int decode_one(const birdie_file *f, size_t i) {
    birdie_array a;
    int error = birdie_array_get(f, i, &a);
    if (error || a.bytes > limits.limits.max_bytes) return error ? error : BIRDIE_ERROR_TOO_MANY_BYTES;
    static const int others[4] = {BIRDIE_OWN, BIRDIE_OWN, BIRDIE_FLOAT32, BIRDIE_FLOAT16};
    int dtype = is_real(a.dtype) ? others[below(4)] : BIRDIE_OWN;
    size_t size = (size_t)a.elements * birdie_dtype_size(dtype == BIRDIE_OWN ? a.dtype : dtype);
    void *out = malloc(size);
    error = birdie_array_decode(f, i, dtype, out, size);
    free(out);
    return error;
}

static int decode_all(const uint8_t *data, size_t size, const birdie_file *base) {
    birdie_options options = limits;
    birdie_file *f;
    options.base = base;
    int error = birdie_open(data, size, &options, &f);
    if (error) return error;
    for (size_t i = 0; i < birdie_count(f); i++) {
        birdie_tensor t;
        birdie_get(f, i, &t);
        if (birdie_find(f, t.name, t.name_size) != i) abort();
    }
    for (size_t i = 0; i < birdie_entry_count(f); i++) {
        birdie_entry e;
        birdie_entry_get(f, i, &e);
    }
    for (size_t i = 0; i < birdie_array_count(f) && !error; i++) error = decode_one(f, i);
    birdie_close(f);
    return error;
}

/* Change a few bytes. */
static void edit(uint8_t *data, size_t size) {
    for (uint64_t k = 1 + below(3); k && size; k--) {
        uint8_t *one = &data[below(size)];
        switch (below(4)) {
        case 0: *one ^= (uint8_t)(1 << below(8)); break;
        case 1: *one = (uint8_t)(below(2) ? 255 : 0); break;
        case 2: *one = (uint8_t)(*one + (below(2) ? 1 : -1)); break;
        default: *one = (uint8_t)below(256);
        }
    }
}

static int64_t near_number(int64_t v) {
    static const int64_t some[] = {0,   1,   2,   3,    7,     8,       16,        31,       64,
                                   255, 256, 512, 4096, 65536, 1 << 20, INT32_MAX, INT64_MAX};
    return below(2) ? (int64_t)((uint64_t)v + below(5) - 2) : below(8) ? some[below(17)] : -some[below(17)];
}

/* Return the error of a mutant of a file that is open: of a header, or of an entry whose checksum is made to agree. */
static int mutant(const birdie_file *f, uint8_t *data, size_t size, const birdie_file *base) {
    uint8_t *copy = malloc(size + MOST_NAME);
    int error;
    if (below(8) == 0 || !f->array_count) { /* the header, not packed, with its checksum */
        const uint8_t *header = data + 22;
        size_t length = little32(data + 14), packed = little32(data + 10), rest = size - 22 - packed;
        uint8_t *unpacked = malloc(length + 1), *made = malloc(22 + length + rest);
        if (packed == length) memcpy(unpacked, header, length);
        else if (inflate(header, packed, unpacked, length)) abort();
        edit(unpacked, length);
        memcpy(made, data, 10);
        for (int i = 0; i < 4; i++) made[10 + i] = made[14 + i] = (uint8_t)(length >> 8 * i);
        memcpy(made + 22, unpacked, length);
        memcpy(made + 22 + length, header + packed, rest);
        uint32_t crc = crc32(f, crc32(f, 0, made + 8, 10), made + 22, length);
        for (int i = 0; i < 4; i++) made[18 + i] = (uint8_t)(crc >> 8 * i);
        error = decode_all(made, 22 + length + rest, base);
        free(unpacked);
        free(made);
    } else { /* an entry of the open file, put back afterwards */
        size_t array = below(f->array_count);
        uint32_t parts = 0, i = f->arrays[array];
        while (block_of(f, i, parts) != NONE) parts++;
        entry *e = &f->entries[block_of(f, i, (uint32_t)below(parts))], before = *e;
        uint64_t shape[MOST_DIMENSIONS];
        int64_t parameter[MOST_PARAMETERS];
        uint8_t coder[MOST_STREAMS], *payload = data + e->offset;
        memcpy(copy, payload, e->payload);
        memcpy(parameter, e->parameter, e->parameters * sizeof *parameter);
        memcpy(coder, e->coder, e->streams);
        memcpy(shape, e->shape, e->dimensions * sizeof *shape);
        uint64_t way = below(10);
        if (way < 7 || !e->streams) edit(payload, (size_t)e->payload);
        else if (way == 7 && e->parameters)
            parameter[below(e->parameters)] = near_number(parameter[below(e->parameters)]);
        else if (way == 8) coder[below(e->streams)] = (uint8_t)below(8);
        else if (e->parameters) e->parameters = (uint32_t)below(e->parameters + 1);
        if (way == 9 && e == &f->entries[i]) /* blocks have the dtype of their tensor, which opening checks */
            e->dtype = (uint8_t)below(DTYPES), e->scheme = e->kind == TENSOR ? (uint16_t)below(OWN_SCHEMES) : 0;
        e->parameter = parameter;
        e->coder = coder;
        e->shape = shape;
        e->crc = crc32(f, 0, payload, (size_t)e->payload);
        error = decode_one(f, array);
        memcpy(payload, copy, (size_t)before.payload);
        *e = before;
    }
    free(copy);
    return error;
}

static uint32_t take32(void) {
    uint8_t bytes[4];
    return fread(bytes, 1, 4, stdin) == 4 ? little32(bytes) : 0;
}

static uint8_t *take_file(uint32_t *size) {
    *size = take32();
    uint8_t *data = malloc(*size ? *size : 1);
    if (fread(data, 1, *size, stdin) != *size) abort();
    return data;
}

int main(void) {
    uint32_t size, base_size;
    state = take32() * 2862933555777941757u + 3037000493u;
    const uint32_t count = take32();
    uint8_t *base_data = take_file(&base_size);
    birdie_file *base = NULL;
    if (base_size && birdie_open(base_data, base_size, NULL, &base)) return 1;
    for (int c; (c = getchar()) != EOF;) {
        ungetc(c, stdin);
        uint8_t *data = take_file(&size);
        birdie_options options = limits;
        birdie_file *f = NULL;
        uint64_t refused = 0;
        options.base = base;
        const int error = decode_all(data, size, base);
        if (!birdie_open(data, size, &options, &f)) {
            if (!f->tables && make_tables(f)) abort(); /* mutants have other coders */
            for (uint32_t k = 0; k < count; k++) refused += mutant(f, data, size, base) != 0;
        }
        printf("%d %u %u\n", error, f ? count : 0, (unsigned)refused);
        fflush(stdout);
        birdie_close(f);
        free(data);
        if (held) abort(); /* nothing is kept */
    }
    birdie_close(base);
    free(base_data);
    return most_held > limits.limits.max_memory + (1 << 20);
}
