/* birdie.c: decoder of .birdie files (birdie.h), and the format's second specification.
 *
 * Sections stand in the order of docs/format.md and then docs/coders.md, whose names, letters and words they use; a
 * comment here says why, those pages say what. At the end are the functions of birdie.h.
 *
 * Conventions. A function that can fail returns an error of birdie.h, 0 for none; TRY hands it on. Sums and products of
 * numbers from a file are of 64 bits, in which they cannot overflow, or unsigned, where they may wrap. A right shift of
 * a negative number rounds towards -infinity, as every compiler has it. Memory of a call is a stack: `take` puts a
 * block on it, `release` frees all blocks above a mark, so an error needs no cleaning up.
 */
#include "birdie.h"

#include <float.h>
#ifndef BIRDIE_NO_MALLOC
#include <stdlib.h>
#endif

/* Declared here, since there is no string.h where there is no C library. */
void *memcpy(void *restrict to, const void *restrict from, size_t size);
void *memset(void *to, int byte, size_t size);
int memcmp(const void *a, const void *b, size_t size);
void *memchr(const void *data, int byte, size_t size);

#if defined(FLT_EVAL_METHOD) && FLT_EVAL_METHOD != 0 && FLT_EVAL_METHOD != 16
#error "birdie.c needs float and double as IEEE 754 has them; on x86 of 32 bits compile with -msse2 -mfpmath=sse"
#endif
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "birdie.c writes words as they are in the file, which is little-endian"
#endif
#ifdef __FAST_MATH__
#error "birdie.c cannot be compiled with -ffast-math: its sums are defined to the last bit"
#endif
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

/* Symbols of a chunk and rows of a tile, about; tests that look for faults have shorter ones. */
#ifndef BIRDIE_CHUNK
#define BIRDIE_CHUNK ((size_t)1 << 20)
#define BIRDIE_TILE 1024
#endif

/* Of gcc: a function whose loop needs all registers, which inlining would take. */
#if defined(__GNUC__) && !defined(__clang__)
#define APART __attribute__((noinline))
#else
#define APART
#endif

#define TRY(call) \
    do { \
        int error_ = (call); \
        if (error_) return error_; \
    } while (0)
#define FAIL(name) return BIRDIE_ERROR_##name
#define CHECK(condition, name) \
    do { \
        if (!(condition)) FAIL(name); \
    } while (0)

typedef struct memory memory;
typedef struct birdie_file file;
typedef struct entry entry;
typedef struct machine machine;

/* ==== Memory and bytes ==== */

typedef struct block {
    struct block *below;
    uint64_t size;
} block;

struct memory {
    birdie_allocator by;
    uint64_t left; /* bytes that may still be taken */
    block *top;
    int error; /* of the last `take` that failed */
};

/* Return memory for `count` things of `size` bytes, on top of the stack; NULL sets the error. */
static void *take(memory *m, uint64_t count, size_t size) {
    uint64_t most = m->left < SIZE_MAX / 2 ? m->left : SIZE_MAX / 2;
    m->error = BIRDIE_ERROR_TOO_MUCH_MEMORY;
    if (most < sizeof(block) || count > (most - sizeof(block)) / size) return NULL;
    m->error = BIRDIE_ERROR_MEMORY;
    uint64_t bytes = sizeof(block) + count * size;
    block *one = m->by.alloc(m->by.opaque, (size_t)bytes);
    if (!one) return NULL;
    one->below = m->top;
    one->size = bytes;
    m->top = one;
    m->left -= bytes;
    return one + 1;
}

static void *take_zeros(memory *m, uint64_t count, size_t size) {
    void *out = take(m, count, size);
    if (out) memset(out, 0, (size_t)count * size);
    return out;
}

/* Free the blocks above one. */
static void release(memory *m, block *mark) {
    while (m->top != mark) {
        block *below = m->top->below;
        m->left += m->top->size;
        m->by.free(m->by.opaque, m->top);
        m->top = below;
    }
}

static uint32_t little16(const uint8_t *p) { return p[0] | (uint32_t)p[1] << 8; }
static uint32_t little32(const uint8_t *p) { return little16(p) | little16(p + 2) << 16; }

static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }
static uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }
static uint64_t ceiling(uint64_t a, uint64_t b) { return a / b + (a % b != 0); }
static int64_t hold(int64_t v, int64_t a, int64_t b) { return v < a ? a : v > b ? b : v; }
static int64_t unzigzag(uint64_t v) { return (int64_t)(v >> 1) ^ -(int64_t)(v & 1); }

/* Return a // b, which rounds down, of b > 0. */
static int64_t floored(int64_t a, int64_t b) { return a / b - (a % b < 0); }

/* Sort numbers, rising by `compare`. Heapsort: no recursion, and no order in which it is slow. */
static void sort(uint64_t *v, size_t n, int (*compare)(const void *, uint64_t, uint64_t), const void *with) {
    for (size_t start = n / 2, end = n; end > 1;) {
        if (start) {
            start--;
        } else {
            end--;
            uint64_t first = v[0];
            v[0] = v[end];
            v[end] = first;
        }
        uint64_t moved = v[start];
        size_t at = start;
        for (size_t child; (child = 2 * at + 1) < end; at = child) {
            if (child + 1 < end && compare(with, v[child], v[child + 1]) < 0) child++;
            if (compare(with, moved, v[child]) >= 0) break;
            v[at] = v[child];
        }
        v[at] = moved;
    }
}

static int by_number(const void *with, uint64_t a, uint64_t b) {
    (void)with;
    return a < b ? -1 : a > b;
}

/* ==== File (docs/format.md, "File") ==== */

enum { TENSOR, ALIAS, BLOCKS, MEMBER, DELTA, FILES }; /* kinds */
enum { CONSTANT, BYTES, PACKED, NUMBERS, STATIC, MIXED, TILES, CODERS };
enum { MOST_ENTRIES = 1 << 17, MOST_NAME = 4096, MOST_DIMENSIONS = 16, MOST_PARAMETERS = 4096, MOST_STREAMS = 64 };
#define MOST_HEADER (1u << 26)
#define MOST_NAMES (1u << 24)
#define MOST_FIELDS (1u << 20)
#define MOST_ELEMENTS ((uint64_t)1 << 48)
#define NONE UINT32_MAX

struct entry {
    const char *name;
    uint32_t name_size;
    uint16_t scheme;
    uint8_t kind, dtype, dimensions, streams;
    uint8_t is_copy; /* of an alias */
    uint32_t parameters;
    uint32_t target; /* of an alias or member */
    uint32_t base;   /* of a delta: the entry of the base that it is relative to */
    uint32_t array;  /* that holds its elements */
    uint32_t group;  /* of an entry that members share: their number */
    uint32_t position;
    const uint64_t *shape;
    const int64_t *parameter;
    const uint8_t *coder;
    const uint64_t *length; /* of each stream */
    uint64_t elements, offset, payload;
    uint32_t crc;
};

struct tables; /* of coder 5 */

struct birdie_file {
    memory m;
    birdie_limits limits;
    const uint8_t *data;
    size_t size, header_bytes;
    const char *metadata;
    size_t metadata_size;
    entry *entries;
    uint32_t count;
    uint32_t *tensors, *arrays; /* entries */
    uint32_t tensor_count, array_count;
    int has_views;
    const file *base; /* that deltas are relative to; the file itself, if they are inside */
    uint32_t crc[8][256];
    struct tables *tables; /* where a stream needs them */
};

/* CRC-32 of zlib, eight bytes at a time: crc[k][i] is that of byte i and k zeros. */
static void make_crc(uint32_t crc[8][256]) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;
        for (int k = 0; k < 8; k++) value = value >> 1 ^ (0xEDB88320 & (0 - (value & 1)));
        crc[0][i] = value;
    }
    for (int k = 1; k < 8; k++)
        for (int i = 0; i < 256; i++) crc[k][i] = crc[k - 1][i] >> 8 ^ crc[0][crc[k - 1][i] & 255];
}

static uint32_t crc32(const file *f, uint32_t start, const uint8_t *data, size_t size) {
    uint32_t value = ~start;
    for (; size >= 8; size -= 8, data += 8) {
        uint32_t low = value ^ little32(data), high = little32(data + 4);
        value = f->crc[7][low & 255] ^ f->crc[6][low >> 8 & 255] ^ f->crc[5][low >> 16 & 255] ^ f->crc[4][low >> 24];
        value ^= f->crc[3][high & 255] ^ f->crc[2][high >> 8 & 255];
        value ^= f->crc[1][high >> 16 & 255] ^ f->crc[0][high >> 24];
    }
    for (; size; size--) value = value >> 8 ^ f->crc[0][(value ^ *data++) & 255];
    return ~value;
}

/* ---- Raw deflate (RFC 1951) ---- */

typedef struct bits {
    const uint8_t *data;
    size_t size, at;
    uint32_t held, count;
    int failed;
} bits;

static uint32_t take_bits(bits *b, uint32_t need) {
    for (; b->count < need; b->count += 8) {
        if (b->at == b->size) b->failed = 1;
        b->held |= (uint32_t)(b->failed ? 0 : b->data[b->at++]) << b->count;
    }
    uint32_t value = b->held & ((1u << need) - 1);
    b->held >>= need;
    b->count -= need;
    return value;
}

typedef struct huffman {
    uint16_t counts[16], symbols[288];
} huffman;

/* Make a canonical code; a code that is not complete has one symbol at most, of one bit. */
static int make_huffman(huffman *code, const uint8_t *lengths, int n, int must_be_complete) {
    uint16_t starts[17] = {0};
    int left = 1;
    memset(code->counts, 0, sizeof code->counts);
    for (int i = 0; i < n; i++) code->counts[lengths[i]]++;
    for (int length = 1; length < 16; length++) {
        left = 2 * left - code->counts[length];
        CHECK(left >= 0, HEADER);
        starts[length + 1] = (uint16_t)(starts[length] + code->counts[length]);
    }
    for (int i = 0; i < n; i++)
        if (lengths[i]) code->symbols[starts[lengths[i]]++] = (uint16_t)i;
    CHECK(!left || (!must_be_complete && code->counts[0] + code->counts[1] == n), HEADER);
    return 0;
}

static uint32_t take_symbol(bits *b, const huffman *code) {
    uint32_t word = 0, first = 0, index = 0;
    for (int length = 1; length < 16; length++) {
        uint32_t count = code->counts[length];
        word |= take_bits(b, 1);
        if (word < first + count) return code->symbols[index + word - first];
        index += count;
        first = (first + count) << 1;
        word <<= 1;
    }
    b->failed = 1;
    return 256;
}

static int dynamic_codes(bits *b, huffman *literals, huffman *distances) {
    static const uint8_t order[19] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
    uint8_t lengths[320] = {0};
    int some = (int)take_bits(b, 5) + 257, others = (int)take_bits(b, 5) + 1, given = (int)take_bits(b, 4) + 4;
    CHECK(some <= 286 && others <= 30, HEADER);
    for (int i = 0; i < given; i++) lengths[order[i]] = (uint8_t)take_bits(b, 3);
    TRY(make_huffman(literals, lengths, 19, 1));
    memset(lengths, 0, sizeof lengths);
    for (int i = 0; i < some + others;) {
        uint32_t symbol = take_symbol(b, literals);
        if (symbol < 16) {
            lengths[i++] = (uint8_t)symbol;
            continue;
        }
        CHECK(!b->failed && (i || symbol != 16), HEADER);
        uint8_t value = symbol == 16 ? lengths[i - 1] : 0;
        int count = symbol == 18 ? 11 + (int)take_bits(b, 7) : 3 + (int)take_bits(b, symbol - 14);
        CHECK(count <= some + others - i, HEADER);
        while (count--) lengths[i++] = value;
    }
    CHECK(lengths[256], HEADER);
    TRY(make_huffman(literals, lengths, some, 0));
    return make_huffman(distances, lengths + some, others, 0);
}

/* Undo raw deflate of exactly `size` bytes, after which nothing follows. */
static int inflate(const uint8_t *packed, size_t packed_size, uint8_t *out, size_t size) {
    bits b = {packed, packed_size, 0, 0, 0, 0};
    huffman literals, distances;
    size_t at = 0;
    for (uint32_t is_last = 0; !is_last;) {
        is_last = take_bits(&b, 1);
        uint32_t kind = take_bits(&b, 2);
        CHECK(!b.failed && kind < 3, HEADER);
        if (!kind) {
            b.held = b.count = 0;
            uint32_t count = take_bits(&b, 16);
            CHECK(take_bits(&b, 16) == (~count & 0xFFFF) && !b.failed, HEADER);
            CHECK(count <= size - at && count <= b.size - b.at, HEADER);
            memcpy(out + at, packed + b.at, count);
            b.at += count;
            at += count;
            continue;
        }
        if (kind == 1) {
            uint8_t lengths[288];
            for (int i = 0; i < 288; i++) lengths[i] = i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8;
            TRY(make_huffman(&literals, lengths, 288, 1));
            memset(lengths, 5, 32); /* the last two of them stand for nothing */
            TRY(make_huffman(&distances, lengths, 32, 1));
        } else {
            TRY(dynamic_codes(&b, &literals, &distances));
        }
        for (uint32_t symbol; (symbol = take_symbol(&b, &literals)) != 256;) {
            if (symbol < 256) {
                CHECK(at < size && !b.failed, HEADER);
                out[at++] = (uint8_t)symbol;
                continue;
            }
            uint32_t step = symbol - 257, extra = step < 8 || step == 28 ? 0 : (step >> 2) - 1;
            CHECK(step <= 28, HEADER);
            uint32_t least = step == 28 ? 258 : step < 8 ? step + 3 : ((4 | (step & 3)) << extra) + 3;
            uint32_t count = least + take_bits(&b, extra), far = take_symbol(&b, &distances);
            CHECK(far <= 29, HEADER);
            uint32_t more = far < 4 ? 0 : (far >> 1) - 1;
            uint32_t back = (far < 4 ? far + 1 : ((2 | (far & 1)) << more) + 1) + take_bits(&b, more);
            CHECK(!b.failed && back <= at && count <= size - at, HEADER);
            for (size_t end = at + count; at < end; at++) out[at] = out[at - back];
        }
    }
    CHECK(!b.failed && at == size && b.at == b.size, HEADER);
    return 0;
}

/* ---- Header ---- */

typedef struct cursor {
    const uint8_t *data;
    size_t size, at;
} cursor;

/* Read a varint, LEB128 without needless bytes, that is at most `limit`. */
static int take_varint(cursor *c, uint64_t limit, uint64_t *value) {
    *value = 0;
    for (int count = 0;; count++) {
        CHECK(c->at < c->size && count < 10, HEADER);
        uint64_t byte = c->data[c->at++];
        *value |= (byte & 127) << 7 * count;
        if (byte < 128) {
            CHECK((byte || !count) && (count < 9 || byte == 1) && *value <= limit, HEADER);
            return 0;
        }
    }
}

/* Read the count of things of a byte or more each: more of them than bytes are left is damage. */
static int take_count(cursor *c, uint64_t limit, uint64_t *value) {
    TRY(take_varint(c, limit, value));
    CHECK(*value <= c->size - c->at, HEADER);
    return 0;
}

static int is_utf8(const uint8_t *p, size_t size) {
    for (size_t i = 0; i < size;) {
        uint32_t first = p[i], more = first < 0x80 ? 0 : first < 0xE0 ? 1 : first < 0xF0 ? 2 : 3;
        if ((first >= 0x80 && first < 0xC2) || first > 0xF4 || more >= size - i) return 0;
        for (uint32_t k = 1; k <= more; k++)
            if ((p[i + k] & 0xC0) != 0x80) return 0;
        if (more && ((first == 0xE0 && p[i + 1] < 0xA0) || (first == 0xED && p[i + 1] > 0x9F) ||
                     (first == 0xF0 && p[i + 1] < 0x90) || (first == 0xF4 && p[i + 1] > 0x8F)))
            return 0;
        i += more + 1;
    }
    return 1;
}

/* Compare texts by their bytes. */
static int compare_names(const char *a, size_t a_size, const char *b, size_t b_size) {
    int order = memcmp(a, b, a_size < b_size ? a_size : b_size);
    return order ? order : a_size < b_size ? -1 : a_size > b_size;
}

/* Read the names, each of which begins as the one before. They are read twice: for the sum of their lengths first. */
static int take_names(file *f, cursor *c) {
    size_t start = c->at;
    char *text = NULL;
    for (int pass = 0; pass < 2; pass++) {
        uint64_t total = 0, shared, more, before = 0;
        c->at = start;
        for (uint32_t i = 0; i < f->count; i++, before = shared + more, total += before) {
            TRY(take_varint(c, before, &shared));
            TRY(take_count(c, MOST_NAME - shared, &more));
            CHECK(total + shared + more <= MOST_NAMES, NAMES);
            if (pass) {
                char *name = text + total;
                entry *one = &f->entries[i];
                memcpy(name, name - before, (size_t)shared);
                memcpy(name + shared, c->data + c->at, (size_t)more);
                one->name = name;
                one->name_size = (uint32_t)(shared + more);
                CHECK(is_utf8((const uint8_t *)name, one->name_size), NAMES);
                CHECK(!i || compare_names(name - before, (size_t)before, name, one->name_size) < 0, NAMES);
            }
            c->at += (size_t)more;
        }
        if (!pass && !(text = take(&f->m, total + 1, 1))) return f->m.error;
    }
    return 0;
}

/* Read the fields of an entry: a count, at most `most`, and that many varints. `left` is what all entries may have. */
static int take_fields(cursor *c, uint64_t most, uint64_t limit, uint64_t **next, uint64_t *left, uint64_t *count) {
    TRY(take_count(c, most, count));
    CHECK(*count <= *left, HEADER);
    *left -= *count;
    for (uint64_t i = 0; i < *count; i++) TRY(take_varint(c, limit, (*next)++));
    return 0;
}

static int is_coded(const entry *e) { return e->kind == TENSOR || e->kind == DELTA || e->kind == FILES; }

/* Read the columns after the names. */
static int take_columns(file *f, cursor *c, uint64_t *end) {
    entry *first = f->entries, *last = first + f->count;
    uint64_t value, left = MOST_FIELDS;
    uint64_t *next = take(&f->m, smaller(left, c->size - c->at), sizeof *next);
    if (!next) return f->m.error;
    for (entry *e = first; e < last; e++) {
        TRY(take_varint(c, 65535, &value));
        e->scheme = (uint16_t)value;
    }
    for (entry *e = first; e < last; e++) {
        TRY(take_varint(c, (uint64_t)1 << 22, &value));
        CHECK(value >> 6 <= FILES, KIND);
        e->kind = (uint8_t)(value >> 6);
        e->dtype = value & 63;
        CHECK(e->kind == TENSOR || !e->scheme, HEADER);
    }
    for (entry *e = first; e < last; e++) {
        e->target = NONE;
        if (e->kind != ALIAS && e->kind != MEMBER) continue;
        TRY(take_varint(c, f->count - 1, &value));
        e->target = (uint32_t)value;
    }
    for (entry *e = first; e < last; e++) {
        e->shape = next;
        TRY(take_fields(c, MOST_DIMENSIONS, MOST_ELEMENTS, &next, &left, &value));
        e->dimensions = (uint8_t)value;
        uint64_t product = e->elements = 1;
        for (int i = 0; i < e->dimensions; i++) { /* an empty dimension must not hide an absurd one */
            CHECK(!e->shape[i] || product <= MOST_ELEMENTS / e->shape[i], HEADER);
            product *= e->shape[i] ? e->shape[i] : 1;
            e->elements = e->shape[i] ? e->elements * e->shape[i] : 0;
        }
    }
    for (entry *e = first; e < last; e++) {
        if (!is_coded(e)) continue;
        uint64_t *some = next;
        TRY(take_fields(c, MOST_PARAMETERS, UINT64_MAX, &next, &left, &value));
        for (uint64_t i = 0; i < value; i++) some[i] = (uint64_t)unzigzag(some[i]);
        e->parameter = (const int64_t *)some;
        e->parameters = (uint32_t)value;
    }
    for (entry *e = first; e < last; e++) {
        if (!is_coded(e)) continue;
        TRY(take_count(c, MOST_STREAMS, &value));
        CHECK(value <= left, HEADER);
        left -= value;
        e->coder = c->data + c->at;
        e->streams = (uint8_t)value;
        c->at += (size_t)value;
    }
    for (entry *e = first; e < last; e++) {
        e->offset = *end;
        e->length = next;
        for (int i = 0; i < e->streams; i++, next++) {
            TRY(take_varint(c, (uint64_t)1 << 63, next));
            CHECK(*next <= f->size - *end, CUT);
            *end += *next;
            e->payload += *next;
        }
    }
    for (entry *e = first; e < last; e++) {
        if (!e->payload) continue;
        CHECK(c->size - c->at >= 4, HEADER);
        e->crc = little32(c->data + c->at);
        c->at += 4;
    }
    CHECK(c->at == c->size, HEADER);
    return 0;
}

static int check_kinds(file *f);
static int check_metadata(file *f);
static int make_tables(file *f);

static int open_file(file *f) {
    static const uint8_t magic[8] = {0x89, 'B', 'R', 'D', '\r', '\n', 0x1A, '\n'};
    const uint8_t *data = f->data;
    size_t known = f->size < 8 ? f->size : 8;
    if (known < 8 || memcmp(data, magic, 8)) {
        CHECK(!(known >= 4 && !memcmp(data + 1, magic + 1, 3)), TEXT_MODE);
        FAIL(NOT_BIRDIE);
    }
    CHECK(f->size >= 22, CUT);
    uint32_t version = little16(data + 8), packed = little32(data + 10), length = little32(data + 14);
    CHECK(version == 0x100, VERSION);
    CHECK(packed <= length && length <= smaller(MOST_HEADER, larger(1 << 20, 64 * (uint64_t)f->size)), HEADER);
    CHECK(packed <= f->size - 22, CUT);
    make_crc(f->crc);
    CHECK(crc32(f, crc32(f, 0, data + 8, 10), data + 22, packed) == little32(data + 18), HEADER_CHECKSUM);
    f->header_bytes = 22 + (size_t)packed;
    cursor c = {data + 22, length, 0};
    if (packed < length) {
        uint8_t *header = take(&f->m, length, 1);
        if (!header) return f->m.error;
        TRY(inflate(data + 22, packed, header, length));
        c.data = header;
    }
    uint64_t count, end = f->header_bytes;
    TRY(take_count(&c, MOST_HEADER, &count));
    f->metadata = (const char *)c.data + c.at;
    f->metadata_size = (size_t)count;
    c.at += f->metadata_size;
    TRY(take_count(&c, MOST_ENTRIES, &count));
    f->count = (uint32_t)count;
    if (!(f->entries = take_zeros(&f->m, count, sizeof *f->entries))) return f->m.error;
    TRY(take_names(f, &c));
    TRY(take_columns(f, &c, &end));
    TRY(check_kinds(f));
    CHECK(end == f->size, CUT);
    TRY(check_metadata(f));
    for (uint32_t i = 0; i < f->count && !f->tables; i++) {
        const entry *e = &f->entries[i];
        if (e->kind == DELTA || (e->streams && memchr(e->coder, MIXED, e->streams))) TRY(make_tables(f));
    }
    return 0;
}

/* ==== Kinds of entries ==== */

static int is_tensor(const entry *e) { return !memchr(e->name, 0, e->name_size); }

/* Return the index of the entry of a name, or NONE. */
static uint32_t find(const file *f, const char *name, size_t size) {
    uint32_t low = 0, high = f->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        int order = compare_names(f->entries[middle].name, f->entries[middle].name_size, name, size);
        if (!order) return middle;
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return NONE;
}

/* Return block `index` of an entry that is cut, NONE after the last; of another entry, itself. */
static uint32_t block_of(const file *f, uint32_t i, uint32_t index) {
    const entry *e = &f->entries[i];
    char name[MOST_NAME + 12];
    size_t size = e->name_size, digits = 1;
    if (e->kind != BLOCKS) return index ? NONE : i;
    memcpy(name, e->name, size);
    name[size] = 0;
    for (uint32_t rest = index; rest >= 10; rest /= 10) digits++;
    for (size_t k = digits; k; k--, index /= 10) name[size + k] = (char)('0' + index % 10);
    return size + 1 + digits > MOST_NAME ? NONE : find(f, name, size + 1 + digits);
}

static int is_alike(const entry *a, const entry *b) {
    return a->dtype == b->dtype && a->dimensions == b->dimensions &&
           !memcmp(a->shape, b->shape, a->dimensions * sizeof *a->shape);
}

static int is_part(int part, int complex) {
    return complex >= BIRDIE_COMPLEX32 && complex <= BIRDIE_COMPLEX128 &&
           part == (complex == BIRDIE_COMPLEX32 ? BIRDIE_FLOAT16 : complex - BIRDIE_COMPLEX64 + BIRDIE_FLOAT32);
}

/* Check that blocks make up an entry: whole rows of it, or any parts of a vector. */
static int check_blocks(const file *f, uint32_t i) {
    const entry *e = &f->entries[i];
    uint32_t first = block_of(f, i, 0);
    CHECK(first != NONE, BLOCKS);
    const entry *one = &f->entries[first];
    uint64_t planes[3] = {2, e->dimensions ? e->shape[0] : 1, 1};
    const uint64_t *shape = e->shape;
    uint64_t total = 0, elements = e->elements;
    int dimensions = e->dimensions;
    if (one->dtype != e->dtype) {
        CHECK(is_part(one->dtype, e->dtype), BLOCKS);
        for (int k = 1; k < e->dimensions; k++) planes[2] *= e->shape[k];
        shape = planes;
        dimensions = e->dimensions ? 3 : 2;
        elements *= 2;
    }
    int cut = dimensions - (one->dimensions - 1), of_rows = one->dimensions >= 1 && cut >= 1;
    for (uint32_t index = 0, k; (k = block_of(f, i, index)) != NONE; index++) {
        const entry *b = &f->entries[k];
        CHECK(b->elements && b->dtype == one->dtype && (b->kind == TENSOR || b->kind == DELTA), BLOCKS);
        of_rows = of_rows && b->dimensions == one->dimensions;
        for (int d = 1; of_rows && d < b->dimensions; d++) of_rows = b->shape[d] == shape[cut + d - 1];
        CHECK((of_rows || e->dimensions == 1) && b->elements <= elements - total, BLOCKS);
        total += b->elements;
    }
    CHECK(total == elements, BLOCKS);
    return 0;
}

/* Check aliases, groups and blocks; number tensors and arrays. */
static int check_kinds(file *f) {
    uint32_t *list = take(&f->m, 2 * (uint64_t)f->count, sizeof *list);
    if (!list) return f->m.error;
    f->tensors = list;
    f->arrays = list + f->count;
    for (uint32_t i = 0; i < f->count; i++) {
        entry *e = &f->entries[i], *target = e->target == NONE ? NULL : &f->entries[e->target];
        if (e->kind == ALIAS) CHECK(target->kind != ALIAS && is_tensor(target) && is_alike(e, target), ALIAS);
        if (e->kind == MEMBER) e->position = target->group++;
        if (is_tensor(e)) f->tensors[f->tensor_count++] = i;
        e->array = NONE;
    }
    for (uint32_t i = 0; i < f->count; i++) {
        entry *e = &f->entries[i];
        if (e->kind == MEMBER) {
            const entry *group = &f->entries[e->target];
            CHECK(group->kind != ALIAS && group->kind != FILES && group->kind != MEMBER && is_tensor(e), GROUP);
            CHECK(group->name_size && !group->name[0] && !memchr(group->name + 1, 0, group->name_size - 1), GROUP);
            CHECK(e->dtype == group->dtype && (uint64_t)group->group * e->elements == group->elements, GROUP);
            if (!e->position) f->entries[e->target].base = i; /* the first member, which all are like */
            CHECK(is_alike(e, &f->entries[group->base]), GROUP);
        }
        if (e->group || (is_tensor(e) && e->kind != ALIAS && e->kind != MEMBER)) {
            e->array = f->array_count;
            f->arrays[f->array_count++] = i;
        }
        if (e->kind == BLOCKS && (is_tensor(e) || e->group)) TRY(check_blocks(f, i));
    }
    for (uint32_t i = 0; i < f->count; i++) {
        entry *e = &f->entries[i];
        if (e->kind == MEMBER) e->array = f->entries[e->target].array;
    }
    for (uint32_t i = 0; i < f->count; i++) {
        entry *e = &f->entries[i];
        if (e->kind == ALIAS) {
            e->array = f->entries[e->target].array;
            e->position = f->entries[e->target].position;
        }
        e->base = NONE;
    }
    return 0;
}

/* ==== Schemes ====
 *
 * A scheme has two functions. `plan` checks the parameters and lists the streams that the tensor needs, and what
 * decoding it takes; `decode` reads these streams in order and writes the words of all elements. */

typedef struct stream { /* its shape, what its values must fit, and the trellis on whose paths they lie */
    uint64_t rows, columns;
    int64_t low, high;
    int states;
} stream;

typedef struct plan {
    stream streams[MOST_STREAMS];
    int count;
    uint64_t operations;
} plan;

typedef struct tensor {
    int dtype, dimensions;
    const uint64_t *shape;
    uint64_t rows, columns;
    const int64_t *parameter;
    uint64_t parameters;
} tensor;

typedef struct values { /* of a stream: number i is v[i * step], step being 0 for a constant */
    const int32_t *v;
    size_t step;
} values;

typedef struct reader { /* of the streams of an entry */
    const file *f;
    memory *m;
    const entry *e;
    const plan *plan;
    int next;
    const uint8_t *payload;
    const machine *halves; /* what `coded` says: wanted of the next stream, and had from the last one */
    int has_halves;
} reader;

static int read_stream(reader *r, values *out);

static int32_t value_at(values v, size_t i) { return v.v[i * v.step]; }

static uint64_t count_of(const tensor *t) { return t->rows * t->columns; }

static int add_stream(plan *p, uint64_t rows, uint64_t columns, int bits, int states) {
    CHECK(p->count < MOST_STREAMS, STREAMS);
    int64_t above = (int64_t)1 << (bits < 0 ? -bits - 1 : bits);
    p->streams[p->count++] = (stream){rows, columns, bits < 0 ? -above : 0, above - 1, states};
    return 0;
}

/* Count operations, of about a nanosecond each, up to more than anybody allows. */
static void spend(plan *p, uint64_t count, uint64_t each) {
    const uint64_t most = (uint64_t)1 << 62;
    p->operations = each && count > (most - p->operations) / each ? most : p->operations + count * each;
}

static tensor tensor_of(int dtype, int dimensions, const uint64_t *shape, const int64_t *parameter, uint64_t count) {
    tensor t = {dtype, dimensions, shape, 1, 1, parameter, count};
    if (dimensions == 1) t.columns = shape[0];
    if (dimensions > 1) t.rows = shape[0];
    for (int i = 1; i < dimensions; i++) t.columns *= shape[i];
    return t;
}

/* ---- Dtypes ---- */

static const struct {
    const char *name;
    uint8_t bytes, words; /* of a word; words of an element */
    uint8_t exponent;     /* bits above the sign once it has moved; 0: it stays */
    uint8_t mantissa;     /* bits of a float with a sign bit, else 0 */
} dtypes[] = {
    {"bool", 1, 1, 0, 0}, {"uint8", 1, 1, 0, 0}, {"int8", 1, 1, 0, 0}, {"uint16", 2, 1, 0, 0}, {"int16", 2, 1, 0, 0},
    {"uint32", 4, 1, 0, 0}, {"int32", 4, 1, 0, 0}, {"uint64", 8, 1, 0, 0}, {"int64", 8, 1, 0, 0},
    {"float16", 2, 1, 8, 10}, {"bfloat16", 2, 1, 8, 7}, {"float32", 4, 1, 8, 23}, {"float64", 8, 1, 11, 52},
    {"complex32", 2, 2, 8, 10}, {"complex64", 4, 2, 8, 23}, {"complex128", 8, 2, 11, 52},
    {"float8_e4m3fn", 1, 1, 0, 3}, {"float8_e4m3fnuz", 1, 1, 0, 3}, {"float8_e5m2", 1, 1, 0, 2},
    {"float8_e5m2fnuz", 1, 1, 0, 2}, {"float8_e8m0fnu", 1, 1, 0, 0}, {"float4_e2m1fn_x2", 1, 1, 0, 0},
};
enum { DTYPES = sizeof dtypes / sizeof *dtypes, BLOCK = 1024 /* elements that are computed at a time */ };

static size_t element_size(int dtype) { return (size_t)dtypes[dtype].bytes * dtypes[dtype].words; }
static int is_real(int dtype) { return dtype >= BIRDIE_FLOAT16 && dtype <= BIRDIE_FLOAT64; }
static int is_whole(int dtype) { return dtype >= BIRDIE_UINT8 && dtype <= BIRDIE_INT64; }
static int is_wide(int dtype) { return dtype >= BIRDIE_UINT32 && dtype <= BIRDIE_INT64; }
static int is_signed(int dtype) {
    return dtype == BIRDIE_INT8 || dtype == BIRDIE_INT16 || dtype == BIRDIE_INT32 || dtype == BIRDIE_INT64;
}

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Return 2^n, -1022 <= n <= 1023. */
static double power_of_two(int n) {
    uint64_t bits = (uint64_t)(n + 1023) << 52;
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint16_t to_bfloat16(uint32_t bits) {
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static uint16_t to_float16(uint32_t bits) {
    uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
    /* Below 2^-14 the steps of float16 are those of float32 between 0.5 and 1. */
    uint32_t small = bits_of(float_of(size) + 0.5f) - 0x3F000000;
    uint32_t normal = (size + 0xFFF + (size >> 13 & 1) - 0x38000000) >> 13;
    uint32_t half = size < 0x38800000 ? small : size < 0x477FF000 ? normal : 0x7C00;
    if (size > 0x7F800000) half = 0x7E00 | (size >> 13 & 0x3FF);
    return (uint16_t)(sign | half);
}

static float from_float16(uint32_t word) {
    uint32_t sign = (word & 0x8000) << 16, size = word & 0x7FFF;
    if (size >= 0x7C00) return float_of(sign | 0x7F800000 | (size & 0x3FF) << 13 | (size > 0x7C00 ? 0x400000 : 0));
    if (size >= 0x400) return float_of(sign | ((size << 13) + 0x38000000));
    return float_of(sign | bits_of((float)size * (1.0f / 16777216)));
}

/* Load and store up to BLOCK elements of a real dtype. */

static void load_floats(int dtype, const void *words, size_t n, float *out) {
    uint16_t half[BLOCK];
    if (dtype == BIRDIE_FLOAT32) {
        memcpy(out, words, n * sizeof *out);
    } else if (dtype == BIRDIE_FLOAT64) {
        double wide[BLOCK];
        memcpy(wide, words, n * sizeof *wide);
        for (size_t i = 0; i < n; i++) out[i] = (float)wide[i];
    } else {
        memcpy(half, words, n * sizeof *half);
        if (dtype == BIRDIE_BFLOAT16)
            for (size_t i = 0; i < n; i++) out[i] = float_of((uint32_t)half[i] << 16);
        else
            for (size_t i = 0; i < n; i++) out[i] = from_float16(half[i]);
    }
}

#ifndef BIRDIE_SMALL
static void load_doubles(int dtype, const void *words, size_t n, double *out) {
    float x[BLOCK];
    if (dtype == BIRDIE_FLOAT64) {
        memcpy(out, words, n * sizeof *out);
        return;
    }
    load_floats(dtype, words, n, x);
    for (size_t i = 0; i < n; i++) out[i] = x[i];
}
#endif

static void store_words(int dtype, const float *x, size_t n, void *out) {
    uint16_t half[BLOCK];
    if (dtype == BIRDIE_FLOAT32) {
        memcpy(out, x, n * sizeof *x);
    } else if (dtype == BIRDIE_FLOAT64) {
        double wide[BLOCK];
        for (size_t i = 0; i < n; i++) wide[i] = x[i];
        memcpy(out, wide, n * sizeof *wide);
    } else {
        if (dtype == BIRDIE_BFLOAT16)
            for (size_t i = 0; i < n; i++) half[i] = to_bfloat16(bits_of(x[i]));
        else
            for (size_t i = 0; i < n; i++) half[i] = to_float16(bits_of(x[i]));
        memcpy(out, half, n * sizeof *half);
    }
}

/* Convert elements from one real dtype to another; `out` may lie where the words are, if it begins before them. */
static void convert(int from, const void *words, uint64_t n, int to, void *out) {
    float x[BLOCK];
    const char *p = words;
    char *q = out;
    for (size_t some; n; n -= some, p += some * element_size(from), q += some * element_size(to)) {
        some = (size_t)smaller(n, BLOCK);
        load_floats(from, p, some, x);
        store_words(to, x, some, q);
    }
}

/* ---- store and scale ---- */

static float most_of(int dtype) {
    return dtype == BIRDIE_FLOAT16 ? 65504.0f : float_of(dtype == BIRDIE_BFLOAT16 ? 0x7F7F0000 : 0x7F7FFFFF);
}

/* store(x) of up to BLOCK numbers. */
static void store(int dtype, float *x, size_t n, void *out) {
    const float most = most_of(dtype);
    for (size_t i = 0; i < n; i++) x[i] = x[i] > most ? most : x[i] < -most ? -most : x[i];
    store_words(dtype, x, n, out);
}

/* store(x) of any number of doubles. */
static void store_doubles(int dtype, const double *x, uint64_t n, void *out) {
    const double most = most_of(dtype);
    float y[BLOCK];
    char *q = out;
    for (size_t some; n; n -= some, x += some, q += some * element_size(dtype)) {
        some = (size_t)smaller(n, BLOCK);
        for (size_t i = 0; i < some; i++) y[i] = (float)(x[i] > most ? most : x[i] < -most ? -most : x[i]);
        store_words(dtype, y, some, q);
    }
}

static const int32_t sixteenths[16] = {8388608,  8760003,  9147842,  9552851,  9975792,  10417458, 10878679, 11360319,
                                       11863283, 12388516, 12937002, 13509772, 14107901, 14732511, 15384775, 16065917};

static int scale(int64_t k, float *out) {
    CHECK(k >= -2016 && k <= 2047, LEVELS);
    *out = (float)(sixteenths[k & 15] * power_of_two((int)(k >> 4) - 23));
    return 0;
}

/* Read a stream of scale indices as scales. */
static int read_scales(reader *r, uint64_t n, float **out) {
    values k;
    if (!(*out = take(r->m, n, sizeof **out))) return r->m->error;
    TRY(read_stream(r, &k));
    for (uint64_t i = 0; i < n; i++) TRY(scale(value_at(k, i), *out + i));
    return 0;
}

/* ---- Lossless ---- */

/* Return plane i of a dtype: its lowest bit, and its bits, negative for two's complement; 0 after the last. */
static int plane_of(int dtype, int i, int *low) {
    int bits = 8 * dtypes[dtype].bytes;
    *low = 0;
    if (dtype == BIRDIE_BOOL) return i ? 0 : 1;
    if (bits <= 16 && !dtypes[dtype].exponent) return i ? 0 : is_signed(dtype) ? -bits : bits;
    *low = bits - 8 * (i + 1);
    if (dtypes[dtype].exponent == 11 && i < 2) *low = i ? 48 : 53;
    return *low < 0 ? 0 : dtypes[dtype].exponent == 11 && i < 2 ? (i ? 5 : 11) : 8;
}

static int plan_planes(plan *p, uint64_t rows, uint64_t columns, int dtype) {
    for (int i = 0, low, bits; rows && columns && (bits = plane_of(dtype, i, &low)) != 0; i++)
        TRY(add_stream(p, rows, columns * dtypes[dtype].words, bits < 0 ? bits : bits > 8 ? 16 : 8, 1));
    return 0;
}

#define EACH_WORD(type, expression) \
    do { \
        type *w = out; \
        for (uint64_t i = 0; i < n; i++) w[i] = (type)(expression); \
    } while (0)

/* Put values at a bit of words that have zeros there. */
static void put(void *out, int bytes, uint64_t n, values v, int low) {
    if (bytes == 1) EACH_WORD(uint8_t, w[i] | (uint32_t)value_at(v, i) << low);
    if (bytes == 2) EACH_WORD(uint16_t, w[i] | (uint32_t)value_at(v, i) << low);
    if (bytes == 4) EACH_WORD(uint32_t, w[i] | (uint32_t)value_at(v, i) << low);
    if (bytes == 8) EACH_WORD(uint64_t, w[i] | (uint64_t)value_at(v, i) << low);
}

/* Read the planes of `count` elements. */
static int read_planes(reader *r, int dtype, uint64_t count, void *out) {
    uint64_t n = count * dtypes[dtype].words;
    int bytes = dtypes[dtype].bytes, exponent = dtypes[dtype].exponent, mantissa = 8 * bytes - 1 - exponent;
    memset(out, 0, (size_t)(n * (uint64_t)bytes));
    for (int i = 0, low, bits; n && (bits = plane_of(dtype, i, &low)) != 0; i++) {
        block *mark = r->m->top;
        values v;
        TRY(read_stream(r, &v));
        for (uint64_t k = 0; bits > 0 && bits < 16 && bits != 8 && k < (v.step ? n : 1); k++)
            CHECK(v.v[k] < 1 << bits, RANGE);
        put(out, bytes, n, v, low);
        release(r->m, mark);
    }
    uint64_t below = ((uint64_t)1 << mantissa) - 1;
#define RAISED(w) ((w) >> mantissa & 1) << (8 * bytes - 1) | (w) >> (mantissa + 1) << mantissa | ((w) & below)
    if (exponent && bytes == 2) EACH_WORD(uint16_t, RAISED((uint32_t)w[i]));
    if (exponent && bytes == 4) EACH_WORD(uint32_t, RAISED(w[i]));
    if (exponent && bytes == 8) EACH_WORD(uint64_t, RAISED(w[i]));
    return 0;
}

enum { HALVES = 1, VALUES, DIFFERENCES, LISTED, RUNS, MATCHES, SCALED, TABLES };

/* Return how far floats that are stored as integers go. */
static int64_t most_whole(int dtype) {
    const int bits[4] = {11, 8, 24, 30};
    return (int64_t)1 << bits[dtype - BIRDIE_FLOAT16];
}

static int scale_dtype(int64_t kind) {
    return kind % 3 == 0 ? BIRDIE_FLOAT32 : kind % 3 == 1 ? BIRDIE_FLOAT16 : BIRDIE_BFLOAT16;
}

static int plan_lossless(plan *p, const tensor *t) {
    const uint64_t rows = t->rows, columns = t->columns, count = count_of(t), n = t->parameters;
    const int is_float = is_real(t->dtype) && t->dtype != BIRDIE_FLOAT64, bytes = dtypes[t->dtype].bytes;
    int64_t v[5] = {0};
    for (uint64_t i = 0; i < n && i < 5; i++) v[i] = t->parameter[i];
    const uint64_t size = (uint64_t)v[1], k = (uint64_t)v[2]; /* negative ones are too large for all limits */
    if (!n) {
        spend(p, count, 1);
        return plan_planes(p, rows, columns, t->dtype);
    }
    CHECK(count && v[0] >= HALVES && v[0] <= TABLES, PARAMETERS);
    switch (v[0]) {
    case HALVES:
        CHECK(n == 1 && (is_whole(t->dtype) || t->dtype == BIRDIE_FLOAT4_E2M1FN_X2), PARAMETERS);
        spend(p, count, 8 * (uint64_t)bytes);
        return add_stream(p, 2 * (uint64_t)bytes * rows, columns, 8, 1);
    case VALUES:
    case DIFFERENCES:
        CHECK(n == 1 && (is_wide(t->dtype) || (v[0] == DIFFERENCES && is_real(t->dtype))), PARAMETERS);
        spend(p, count, 6);
        return add_stream(p, rows, columns, -32, 1);
    case LISTED:
        CHECK(n == 2 && is_float && size >= 1 && size <= count, PARAMETERS);
        CHECK(size <= (uint64_t)1 << (8 * bytes - 1), PARAMETERS);
        spend(p, count, 6);
        spend(p, size, 8);
        TRY(add_stream(p, rows, columns, -32, 1));
        return add_stream(p, 1, size, -32, 1);
    case RUNS:
        CHECK(n == 3 && dtypes[t->dtype].words == 1 && k >= 1 && k <= smaller(size, 256), PARAMETERS);
        CHECK(size <= count / 32 && count < (uint64_t)1 << 31, PARAMETERS);
        spend(p, count, 2);
        spend(p, size, 64);
        TRY(plan_planes(p, 1, k, t->dtype));
        TRY(add_stream(p, 1, size, -32, 1));
        return add_stream(p, 1, size, -32, 1);
    case MATCHES: {
        CHECK(n >= 4 && dtypes[t->dtype].words == 1 && count < (uint64_t)1 << 31, PARAMETERS);
        CHECK(k > 0 && k < count && size > 0 && size <= count - k, PARAMETERS);
        CHECK(v[3] >= 0 && v[3] < 27 && (n == 4 || v[4] != MATCHES), PARAMETERS);
        tensor literals = {t->dtype, 1, NULL, 1, k, t->parameter + 4, n - 4};
        TRY(plan_lossless(p, &literals));
        spend(p, count, 4);
        spend(p, size, 80);
        for (int i = 0; i < 3; i++) TRY(add_stream(p, 1, size, -32, 1));
        return 0;
    }
    default: {
        const uint64_t levels = v[0] == SCALED ? (uint64_t)v[3] : size;
        CHECK(is_float && n == (v[0] == SCALED ? 5 : 2) && levels >= 1 && levels <= 512, PARAMETERS);
        spend(p, count, 24);
        TRY(add_stream(p, rows, columns, levels <= 256 ? 8 : -16, 1));
        if (v[0] == TABLES) {
            spend(p, rows, 8 * levels);
            return plan_planes(p, rows, levels, t->dtype);
        }
        CHECK(size >= 1 && size <= rows && k >= 1 && k <= columns && v[4] >= 0 && v[4] < 6, PARAMETERS);
        spend(p, ceiling(rows, size) * ceiling(columns, k), 8);
        if (v[4] < 3) TRY(add_stream(p, 1, levels, -32, 1));
        else TRY(plan_planes(p, 1, levels, BIRDIE_FLOAT32));
        return plan_planes(p, ceiling(rows, size), ceiling(columns, k), scale_dtype(v[4]));
    }
    }
}

static int decode_halves(reader *r, const tensor *t, void *out) {
    const size_t bytes = dtypes[t->dtype].bytes, columns = (size_t)t->columns;
    uint8_t *words = out;
    size_t at = 0;
    values v;
    TRY(read_stream(r, &v));
    memset(out, 0, (size_t)count_of(t) * bytes);
    for (size_t row = 0; row < t->rows; row++) {
        for (size_t i = 0; i < 2 * bytes; i++) {
            for (size_t c = 0; c < columns; c++, at++) {
                int32_t half = value_at(v, at);
                CHECK(half >= 0 && half < 16, RANGE);
                words[(row * columns + c) * bytes + i / 2] |= (uint8_t)(half << 4 * (i & 1));
            }
        }
    }
    return 0;
}

/* Integers of 32 and 64 bits and whole floats: the values, or what each adds to the one before. */
static int decode_values(reader *r, const tensor *t, void *out) {
    const uint64_t n = count_of(t);
    const int is_float = is_real(t->dtype), bytes = dtypes[t->dtype].bytes, has_sign = is_signed(t->dtype);
    const int64_t most = is_float ? most_whole(t->dtype) : 0;
    uint64_t sum = 0;
    values v;
    TRY(read_stream(r, &v));
    for (uint64_t i = 0; i < n; i++) {
        sum = (t->parameter[0] == DIFFERENCES ? sum : 0) + (uint64_t)value_at(v, i);
        int64_t value = (int64_t)sum;
        if (is_float) {
            CHECK(value >= -most && value <= most, RANGE);
            float x = (float)value;
            store_words(t->dtype, &x, 1, (char *)out + i * (uint64_t)bytes);
        } else if (bytes == 4) {
            CHECK(has_sign ? value == (int32_t)sum : sum <= UINT32_MAX, RANGE);
            ((uint32_t *)out)[i] = (uint32_t)sum;
        } else {
            CHECK(has_sign || value >= 0, RANGE);
            ((uint64_t *)out)[i] = sum;
        }
    }
    return 0;
}

static int decode_listed(reader *r, const tensor *t, void *out) {
    const uint64_t n = count_of(t), size = (uint64_t)t->parameter[1];
    const uint32_t sign = (uint32_t)1 << (8 * dtypes[t->dtype].bytes - 1);
    uint32_t *listed = take(r->m, size, sizeof *listed);
    int64_t word = 0;
    values number, gap;
    if (!listed) return r->m->error;
    TRY(read_stream(r, &number));
    TRY(read_stream(r, &gap));
    for (uint64_t i = 0; i < size; i++) {
        word += value_at(gap, i);
        CHECK(value_at(gap, i) >= (i > 0) && word < sign, LEVELS);
        listed[i] = (uint32_t)word;
    }
    for (uint64_t i = 0; i < n; i++) {
        int64_t k = value_at(number, i);
        CHECK(k >= -(int64_t)size && k < (int64_t)size, RANGE);
        uint32_t one = k < 0 ? listed[-1 - k] | sign : listed[k];
        if (sign >> 15 == 1) ((uint16_t *)out)[i] = (uint16_t)one;
        else ((uint32_t *)out)[i] = one;
    }
    return 0;
}

/* Read numbers of which differences of an order are stored, each to the number before the last. */
static int read_sums(reader *r, uint64_t n, int64_t order, int64_t **out) {
    values v;
    int64_t *x = *out = take(r->m, n, sizeof *x);
    if (!x) return r->m->error;
    TRY(read_stream(r, &v));
    for (uint64_t i = 0; i < n; i++) x[i] = value_at(v, i);
    for (; order; order--)
        for (uint64_t i = 2; i < n; i++) x[i] = (int64_t)((uint64_t)x[i] + (uint64_t)x[i - 2]);
    return 0;
}

static int decode_runs(reader *r, const tensor *t, void *out) {
    const uint64_t n = count_of(t), runs = (uint64_t)t->parameter[1], size = (uint64_t)t->parameter[2];
    const size_t bytes = dtypes[t->dtype].bytes;
    char *p = out, *words = take(r->m, size, bytes);
    int64_t *number, *length;
    uint64_t at = 0;
    if (!words) return r->m->error;
    TRY(read_planes(r, t->dtype, size, words));
    TRY(read_sums(r, runs, 1, &number));
    TRY(read_sums(r, runs, 2, &length));
    for (uint64_t i = 0; i < runs; i++) {
        CHECK(number[i] >= 0 && (uint64_t)number[i] < size, RUNS);
        CHECK(length[i] >= 1 && (uint64_t)length[i] <= n - at, RUNS);
        at += (uint64_t)length[i];
        for (int64_t k = 0; k < length[i]; k++, p += bytes) memcpy(p, words + (size_t)number[i] * bytes, bytes);
    }
    CHECK(at == n, RUNS);
    return 0;
}

static int decode_lossless(reader *r, const tensor *t, void *out);

static int decode_matches(reader *r, const tensor *t, void *out) {
    const uint64_t n = count_of(t), matches = (uint64_t)t->parameter[1], size = (uint64_t)t->parameter[2];
    const int64_t orders = t->parameter[3];
    const size_t bytes = dtypes[t->dtype].bytes;
    tensor literals = {t->dtype, 1, NULL, 1, size, t->parameter + 4, t->parameters - 4};
    char *p = out, *words = take(r->m, size + 8, bytes);
    int64_t *count, *length, *distance;
    uint64_t at = 0, used = 0;
    if (!words) return r->m->error;
    TRY(decode_lossless(r, &literals, words));
    TRY(read_sums(r, matches, orders % 3, &count));
    TRY(read_sums(r, matches, orders / 3 % 3, &length));
    TRY(read_sums(r, matches, orders / 9, &distance));
    for (uint64_t i = 0; i <= matches; i++) {
        uint64_t some = i < matches ? (uint64_t)count[i] : size - used;
        CHECK(some <= size - used && some <= n - at, RUNS);
        memcpy(p + at * bytes, words + used * bytes, (size_t)some * bytes);
        used += some;
        at += some;
        if (i == matches) break;
        CHECK(length[i] >= 1 && (uint64_t)length[i] <= n - at, RUNS);
        CHECK(distance[i] >= 1 && (uint64_t)distance[i] <= at, RUNS);
        size_t begin = (size_t)at * bytes, end = begin + (size_t)length[i] * bytes, back = (size_t)distance[i] * bytes;
        for (size_t k = begin; k < end; k++) p[k] = p[k - back];
        at += (uint64_t)length[i];
    }
    CHECK(at == n, RUNS);
    return 0;
}

static int check_symbols(values v, uint64_t n, uint64_t size) {
    for (uint64_t i = 0; i < (v.step ? n : 1); i++) CHECK(v.v[i] >= 0 && (uint64_t)v.v[i] < size, RANGE);
    return 0;
}

/* Read the planes of floats of at most 32 bits, all of which must be finite. */
static int read_finite(reader *r, int dtype, uint64_t n, float **out) {
    if (!(*out = take(r->m, n, sizeof **out))) return r->m->error;
    char *words = (char *)*out + n * (sizeof **out - dtypes[dtype].bytes);
    TRY(read_planes(r, dtype, n, words));
    convert(dtype, words, n, BIRDIE_FLOAT32, *out);
    for (uint64_t i = 0; i < n; i++) CHECK((bits_of((*out)[i]) & 0x7F800000) != 0x7F800000, LEVELS);
    return 0;
}

static int decode_scaled(reader *r, const tensor *t, void *out) {
    const uint64_t height = (uint64_t)t->parameter[1], width = (uint64_t)t->parameter[2];
    const uint64_t size = (uint64_t)t->parameter[3], across = ceiling(t->columns, width);
    values symbol, gap;
    float whole[512], *levels = whole, *scales;
    TRY(read_stream(r, &symbol));
    TRY(check_symbols(symbol, count_of(t), size));
    if (t->parameter[4] < 3) {
        int64_t level = 0;
        int zeros = 0;
        TRY(read_stream(r, &gap));
        for (uint64_t i = 0; i < size; i++) {
            int32_t step = value_at(gap, i);
            level += step;
            if (i && !step) { /* the first of two zeros is -0 */
                CHECK(!level && !zeros++, LEVELS);
                whole[i - 1] = -0.0f;
            }
            CHECK((!i || step >= 0) && level >= -(1 << 23) && level <= 1 << 23, LEVELS);
            whole[i] = (float)level;
        }
    } else {
        TRY(read_finite(r, BIRDIE_FLOAT32, size, &levels));
    }
    TRY(read_finite(r, scale_dtype(t->parameter[4]), ceiling(t->rows, height) * across, &scales));
    for (uint64_t row = 0, at = 0; row < t->rows; row++) {
        const float *by = scales + row / height * across;
        double x[BLOCK];
        for (uint64_t c = 0, n; c < t->columns; c += n, at += n) {
            n = smaller(t->columns - c, BLOCK);
            for (uint64_t i = 0; i < n; i++) x[i] = (double)levels[value_at(symbol, at + i)] * by[(c + i) / width];
            store_doubles(t->dtype, x, n, (char *)out + at * element_size(t->dtype));
        }
    }
    return 0;
}

static int decode_tables(reader *r, const tensor *t, void *out) {
    const uint64_t size = (uint64_t)t->parameter[1];
    const size_t bytes = dtypes[t->dtype].bytes;
    values symbol;
    char *p = out, *words = take(r->m, t->rows * size, bytes);
    if (!words) return r->m->error;
    TRY(read_stream(r, &symbol));
    TRY(check_symbols(symbol, count_of(t), size));
    TRY(read_planes(r, t->dtype, t->rows * size, words));
    for (uint64_t row = 0, at = 0; row < t->rows; row++)
        for (uint64_t c = 0; c < t->columns; c++, at++, p += bytes)
            memcpy(p, words + (row * size + (uint64_t)value_at(symbol, at)) * bytes, bytes);
    return 0;
}

static int decode_lossless(reader *r, const tensor *t, void *out) {
    switch (t->parameters ? t->parameter[0] : 0) {
    case HALVES: return decode_halves(r, t, out);
    case VALUES:
    case DIFFERENCES: return decode_values(r, t, out);
    case LISTED: return decode_listed(r, t, out);
    case RUNS: return decode_runs(r, t, out);
    case MATCHES: return decode_matches(r, t, out);
    case SCALED: return decode_scaled(r, t, out);
    case TABLES: return decode_tables(r, t, out);
    default: return read_planes(r, t->dtype, count_of(t), out);
    }
}

/* ---- Cast ---- */

static int plan_cast(plan *p, const tensor *t) {
    CHECK(t->parameters == 1 && (t->parameter[0] == 0 || t->parameter[0] == 1), PARAMETERS);
    CHECK(t->dtype == BIRDIE_FLOAT32 || t->dtype == BIRDIE_FLOAT64, PARAMETERS);
    spend(p, count_of(t), 2);
    return plan_planes(p, t->rows, t->columns, BIRDIE_FLOAT16);
}

static int decode_cast(reader *r, const tensor *t, void *out) {
    int from = t->parameter[0] ? BIRDIE_BFLOAT16 : BIRDIE_FLOAT16;
    char *words = (char *)out + count_of(t) * (element_size(t->dtype) - 2); /* at the end of the output */
    TRY(read_planes(r, from, count_of(t), words));
    convert(from, words, count_of(t), t->dtype, out);
    return 0;
}

/* ---- Grid, ternary, codebook ---- */

static int plan_groups(plan *p, const tensor *t, uint64_t size, int bits) {
    CHECK(is_real(t->dtype) && count_of(t) && size >= 1 && size <= t->columns, PARAMETERS);
    uint64_t groups = ceiling(t->columns, size);
    spend(p, count_of(t), 2);
    spend(p, t->rows * groups, 20);
    TRY(add_stream(p, t->rows, t->columns, bits, 1));
    return add_stream(p, t->rows, groups, -16, 1);
}

static int plan_grid(plan *p, const tensor *t) {
    CHECK(t->parameters <= 1, PARAMETERS);
    return plan_groups(p, t, t->parameters ? (uint64_t)t->parameter[0] : t->columns, -32);
}

static int plan_ternary(plan *p, const tensor *t) {
    CHECK(t->parameters == 1, PARAMETERS);
    return plan_groups(p, t, (uint64_t)t->parameter[0], -8);
}

static int decode_grid(reader *r, const tensor *t, void *out) {
    const uint64_t size = t->parameters ? (uint64_t)t->parameter[0] : t->columns, groups = ceiling(t->columns, size);
    values symbol;
    float *scales;
    TRY(read_stream(r, &symbol));
    TRY(read_scales(r, t->rows * groups, &scales));
    for (uint64_t row = 0, at = 0; row < t->rows; row++) {
        for (uint64_t c = 0, n; c < t->columns; c += n, at += n) {
            const uint64_t group = c / size;
            const float by = scales[row * groups + group];
            float x[BLOCK];
            n = smaller(smaller(t->columns, (group + 1) * size) - c, BLOCK);
            for (uint64_t i = 0; i < n; i++) x[i] = (float)value_at(symbol, at + i) * by;
            store(t->dtype, x, (size_t)n, (char *)out + at * element_size(t->dtype));
        }
    }
    return 0;
}

static int decode_ternary(reader *r, const tensor *t, void *out) {
    const reader first = *r;
    block *mark = r->m->top;
    values symbol;
    TRY(read_stream(r, &symbol));
    for (uint64_t i = 0; i < (symbol.step ? count_of(t) : 1); i++) CHECK(symbol.v[i] >= -1 && symbol.v[i] <= 1, RANGE);
    release(r->m, mark);
    *r = first;
    return decode_grid(r, t, out);
}

static int plan_codebook(plan *p, const tensor *t) {
    CHECK(is_real(t->dtype) && count_of(t) && t->parameters == 2, PARAMETERS);
    CHECK(t->parameter[0] >= 1 && t->parameter[0] <= 256, PARAMETERS);
    CHECK(t->parameter[1] == 0 || t->parameter[1] == 1, PARAMETERS);
    spend(p, count_of(t), 24);
    spend(p, t->rows, 100 * (uint64_t)t->parameter[1]);
    TRY(add_stream(p, t->rows, t->columns, 8, 1));
    TRY(add_stream(p, 1, (uint64_t)t->parameter[0], -32, 1));
    return add_stream(p, t->parameter[1] ? t->rows : 1, 1, -16, 1);
}

static int decode_codebook(reader *r, const tensor *t, void *out) {
    const uint64_t size = (uint64_t)t->parameter[0];
    values symbol, level;
    float *scales;
    double levels[256], x[BLOCK];
    TRY(read_stream(r, &symbol));
    TRY(check_symbols(symbol, count_of(t), size));
    TRY(read_stream(r, &level));
    TRY(read_scales(r, t->parameter[1] ? t->rows : 1, &scales));
    for (uint64_t i = 0; i < size; i++) {
        levels[i] = value_at(level, i);
        CHECK(levels[i] >= -8388608 && levels[i] <= 8388608 && (!i || levels[i] > levels[i - 1]), LEVELS);
    }
    for (uint64_t row = 0, at = 0; row < t->rows; row++) {
        const double by = scales[t->parameter[1] ? row : 0];
        for (uint64_t c = 0, n; c < t->columns; c += n, at += n) {
            n = smaller(t->columns - c, BLOCK);
            for (uint64_t i = 0; i < n; i++) x[i] = levels[value_at(symbol, at + i)] * by;
            store_doubles(t->dtype, x, n, (char *)out + at * element_size(t->dtype));
        }
    }
    return 0;
}

/* ---- Trellis ---- */



struct machine { /* next(s, m) = s >> 1 ^ (shift if s is odd) ^ (flip if m is odd) */
    uint32_t states, shift, flip;
    int is_along_rows; /* one path, not one for each column */
};

static int machine_of(int64_t states, machine *out) {
    static const uint16_t polynomials[8][3] = {{1, 01, 0},    {4, 05, 02},     {8, 013, 04},     {16, 023, 04},
                                               {32, 045, 010}, {64, 0103, 024}, {128, 0251, 0106}, {256, 0467, 0242}};
    for (int i = 0; i < 8; i++) {
        if (states != polynomials[i][0] && states != -(int64_t)polynomials[i][0]) continue;
        *out = (machine){polynomials[i][0], polynomials[i][1] >> 1, polynomials[i][2] >> 1, states < 0};
        return 0;
    }
    FAIL(PARAMETERS);
}

static uint32_t next_state(const machine *m, uint32_t state, uint32_t number) {
    return state >> 1 ^ ((0 - (state & 1)) & m->shift) ^ ((0 - (number & 1)) & m->flip);
}

/* Return the rows of a chunk, at whose multiples paths begin again. */
static uint64_t chunk_rows(uint64_t columns) { return larger(1, BIRDIE_CHUNK / columns); }

static int is_resolution(int64_t v) { return v == 1 || v == 2 || v == 4 || v == 8 || v == 16; }

static int plan_trellis(plan *p, const tensor *t) {
    const int64_t *v = t->parameter;
    machine m;
    CHECK(is_real(t->dtype) && count_of(t) && t->parameters == 5, PARAMETERS);
    TRY(machine_of(v[0], &m));
    CHECK(is_resolution(v[1]) && (!v[2] || is_resolution(v[2])), PARAMETERS);
    CHECK(v[3] >= -2016 && v[3] <= 2047 && v[4] >= 0 && (uint64_t)v[4] < t->rows, PARAMETERS);
    spend(p, count_of(t), 16);
    spend(p, t->rows, 24);
    TRY(add_stream(p, t->rows, t->columns, -32, (int)v[0]));
    TRY(add_stream(p, t->rows, 1, -16, 1));
    return v[2] ? add_stream(p, t->columns, 1, -16, 1) : 0;
}

static int decode_trellis(reader *r, const tensor *t, void *out) {
    const size_t rows = (size_t)t->rows, columns = (size_t)t->columns, restart = (size_t)chunk_rows(columns);
    const int64_t *v = t->parameter;
    values number, k, j;
    machine paths;
    TRY(machine_of(v[0], &paths));
    float *by_column = take(r->m, columns, sizeof *by_column), by_row, x[BLOCK];
    uint32_t *state = take(r->m, columns, sizeof *state);
    if (!by_column || !state) return r->m->error;
    r->halves = &paths;
    TRY(read_stream(r, &number));
    const int has_halves = r->has_halves;
    TRY(read_stream(r, &k));
    if (v[2]) TRY(read_stream(r, &j));
    for (size_t c = 0; c < columns; c++) {
        by_column[c] = 1;
        if (v[2]) TRY(scale(16 / v[2] * value_at(j, c), &by_column[c]));
    }
    for (size_t row = 0; row < rows; row++) {
        const values line = {number.v + row * columns * number.step, number.step};
        TRY(scale(16 / v[1] * value_at(k, row) + v[3] + (row < (uint64_t)v[4]), &by_row));
        if (row % restart == 0) memset(state, 0, columns * sizeof *state);
        uint32_t some = 0; /* bits of numbers that are not 0 */
        for (size_t c = 0; c < columns; c++) some |= (uint32_t)value_at(line, c) >> has_halves;
        const float half = columns >= 16 && !some ? 0 : by_row * 0.5f;
        for (size_t c = 0, n; c < columns; c += n) {
            n = columns - c < BLOCK ? columns - c : BLOCK;
            for (size_t i = 0; i < n && has_halves; i++) x[i] = (float)line.v[c + i];
            for (size_t i = 0; i < n && !has_halves; i++) {
                uint32_t *s = &state[paths.is_along_rows ? 0 : c + i];
                const int32_t m = value_at(line, c + i);
                x[i] = (float)(2 * (int64_t)m + (*s & 1));
                *s = next_state(&paths, *s, (uint32_t)m);
            }
            for (size_t i = 0; i < n; i++) x[i] = x[i] * half * by_column[c + i];
            store(t->dtype, x, n, (char *)out + (row * columns + c) * element_size(t->dtype));
        }
    }
    return 0;
}

/* ---- Inner tensors ---- */

typedef struct scheme {
    int (*plan)(plan *p, const tensor *t);
    int (*decode)(reader *r, const tensor *t, void *out);
    int inside; /* 0: not inside others, 1: by rows and otherwise, 2: not by rows */
} scheme;

enum { OWN_SCHEMES = 11 };
static const scheme schemes[OWN_SCHEMES];

typedef struct inner {
    tensor t;
    const scheme *by;
} inner;

/* Take an inner tensor of a shape from the front of parameters. */
static int take_inner(const int64_t **v, uint64_t *n, int dimensions, const uint64_t *shape, int by_rows, inner *out) {
    CHECK(*n >= 2 && (*v)[0] >= 1 && (*v)[0] < OWN_SCHEMES, PARAMETERS);
    CHECK((*v)[1] >= 0 && (uint64_t)(*v)[1] <= *n - 2, PARAMETERS);
    out->by = &schemes[(*v)[0]];
    CHECK(out->by->inside && (!by_rows || out->by->inside == 1), PARAMETERS);
    out->t = tensor_of(BIRDIE_FLOAT32, dimensions, shape, *v + 2, (uint64_t)(*v)[1]);
    *n -= 2 + (uint64_t)(*v)[1];
    *v += 2 + (*v)[1];
    return 0;
}

/* Decode an inner tensor to new memory. */
static int decode_inner(reader *r, const inner *in, float **out) {
    if (!(*out = take(r->m, count_of(&in->t), sizeof **out))) return r->m->error;
    block *mark = r->m->top;
    TRY(in->by->decode(r, &in->t, *out));
    release(r->m, mark);
    return 0;
}

/* Take the inner tensor of rotation and lowrank, after one parameter of theirs. */
static int inner_by_rows(const tensor *t, inner *out) {
    const int64_t *v = t->parameter + 1;
    CHECK(is_real(t->dtype) && count_of(t) && t->parameters >= 1, PARAMETERS);
    uint64_t n = t->parameters - 1;
    TRY(take_inner(&v, &n, t->dimensions, t->shape, 1, out));
    CHECK(!n, PARAMETERS);
    return 0;
}

/* ---- Rotation ---- */

static int log2_of(uint64_t v) {
    int log = 0;
    while (v >>= 1) log++;
    return log;
}

static int plan_rotation(plan *p, const tensor *t) {
    inner in;
    TRY(inner_by_rows(t, &in));
    CHECK(t->parameter[0] >= 0 && t->parameter[0] < 65536, PARAMETERS);
    spend(p, count_of(t), (uint64_t)(16 + 8 * (log2_of(t->columns) + 1)));
    return in.by->plan(p, &in.t);
}

/* Fill in the factors of a seed, by which elements are multiplied after the transform. */
static void make_signs(double *out, uint64_t n, uint32_t seed) {
    int log = log2_of(n);
    double factor = power_of_two(-(log / 2)) * (log % 2 ? 0.7071067811865476 : 1);
    for (uint64_t i = 0; i < n; i++) {
        uint32_t z = ((uint32_t)i + (seed << 24) + 1) * 0x9E3779B1;
        z = (z ^ z >> 15) * 0x85EBCA6B;
        z = (z ^ z >> 15) * 0xC2B2AE35;
        out[i] = z >> 31 ? -factor : factor;
    }
}

static void turn_back(double *x, uint64_t n, const double *signs) {
    for (uint64_t h = 1; h < n; h *= 2) {
        for (uint64_t start = 0; start < n; start += 2 * h) {
            for (uint64_t i = start; i < start + h; i++) {
                double a = x[i], b = x[i + h];
                x[i] = a + b;
                x[i + h] = a - b;
            }
        }
    }
    for (uint64_t i = 0; i < n; i++) x[i] *= signs[i];
}

/* Turn a row back with the signs that make_signs gave for 2 * seed, and after those for 2 * seed + 1. */
static void rotate_row(double *x, uint64_t columns, const double *signs) {
    uint64_t p = (uint64_t)1 << log2_of(columns);
    if (p < columns) turn_back(x + columns - p, p, signs + p);
    turn_back(x, p, signs);
}

static int decode_rotation(reader *r, const tensor *t, void *out) {
    const uint64_t columns = t->columns, p = (uint64_t)1 << log2_of(columns);
    double *signs = take(r->m, 2 * p, sizeof *signs), *x = take(r->m, columns, sizeof *x);
    inner in;
    float *from;
    if (!signs || !x) return r->m->error;
    TRY(inner_by_rows(t, &in));
    TRY(decode_inner(r, &in, &from));
    make_signs(signs, p, 2 * (uint32_t)t->parameter[0]);
    make_signs(signs + p, p, 2 * (uint32_t)t->parameter[0] + 1);
    for (uint64_t row = 0; row < t->rows; row++) {
        for (uint64_t c = 0; c < columns; c++) x[c] = from[row * columns + c];
        rotate_row(x, columns, signs);
        store_doubles(t->dtype, x, columns, (char *)out + row * columns * element_size(t->dtype));
    }
    return 0;
}

/* ---- Lowrank ---- */

static int plan_lowrank(plan *p, const tensor *t) {
    inner in;
    TRY(inner_by_rows(t, &in));
    uint64_t rank = (uint64_t)t->parameter[0];
    CHECK(rank >= 1 && rank <= smaller(t->rows, t->columns), PARAMETERS);
    spend(p, count_of(t), 28 + 6 * rank);
    TRY(in.by->plan(p, &in.t));
    TRY(add_stream(p, t->rows, rank, -8, 1));
    TRY(add_stream(p, rank, t->columns, -8, 1));
    return add_stream(p, rank, 1, -16, 1);
}

static int decode_lowrank(reader *r, const tensor *t, void *out) {
    const uint64_t rows = t->rows, columns = t->columns, rank = (uint64_t)t->parameter[0];
    double *right = take(r->m, rank * columns, sizeof *right), *x = take(r->m, columns, sizeof *x);
    values a, b;
    inner in;
    float *base, *scales;
    if (!right || !x) return r->m->error;
    TRY(inner_by_rows(t, &in));
    TRY(decode_inner(r, &in, &base));
    TRY(read_stream(r, &a));
    TRY(read_stream(r, &b));
    TRY(read_scales(r, rank, &scales));
    for (uint64_t k = 0, i = 0; k < rank; k++)
        for (uint64_t c = 0; c < columns; c++, i++) right[i] = (double)value_at(b, i) * scales[k];
    for (uint64_t row = 0; row < rows; row++) {
        for (uint64_t c = 0; c < columns; c++) x[c] = base[row * columns + c];
        for (uint64_t k = 0; k < rank; k++) {
            const double factor = value_at(a, row * rank + k), *line = right + k * columns;
            for (uint64_t c = 0; c < columns; c++) x[c] += factor * line[c];
        }
        store_doubles(t->dtype, x, columns, (char *)out + row * columns * element_size(t->dtype));
    }
    return 0;
}

#ifndef BIRDIE_SMALL /* without schemes 9 and 10 and deltas, which take a fifth of the code */
/* ---- Spectral ---- */

enum { IDENTITY, DCT, WAVELET53, WAVELET97, HADAMARD };

typedef struct axes { /* of a tensor and its transform */
    int n, kind, levels;
    uint64_t length[MOST_DIMENSIONS], block[MOST_DIMENSIONS], classes[MOST_DIMENSIONS];
    uint64_t class_count;
} axes;

/* Return the length of the low band of an axis after some levels. */
static uint64_t low_band(uint64_t n, int levels) {
    for (; levels && n > 1; levels--) n = (n + 1) / 2;
    return n;
}

static int axes_of(const tensor *t, axes *a) {
    const int64_t *v = t->parameter;
    CHECK(is_real(t->dtype) && count_of(t) && t->parameters == 6, PARAMETERS);
    CHECK(v[0] >= IDENTITY && v[0] <= HADAMARD && v[3] >= 0 && v[3] <= 1, PARAMETERS);
    CHECK(v[0] == DCT ? v[1] >= 2 && v[1] <= 64 : !v[1], PARAMETERS);
    CHECK(v[0] == WAVELET53 || v[0] == WAVELET97 ? v[2] >= 1 && v[2] <= 16 : !v[2], PARAMETERS);
    CHECK(v[4] >= 0 && v[4] <= 2 && v[5] >= 0 && v[5] <= 1, PARAMETERS);
    *a = (axes){.n = t->dimensions ? t->dimensions : 1, .kind = (int)v[0], .levels = (int)v[2], .class_count = 1};
    for (int i = 0; i < a->n; i++) {
        const uint64_t length = a->length[i] = t->dimensions ? t->shape[i] : 1;
        const int is_still = v[0] == IDENTITY || v[0] == HADAMARD || (v[3] && i < 2);
        a->block[i] = a->classes[i] = is_still ? 1 : v[0] == DCT ? smaller((uint64_t)v[1], length) : length;
        if (a->levels) a->classes[i] = 1;
        for (int level = 1; level <= v[2] && low_band(a->block[i], level - 1) > 1; level++) a->classes[i]++;
        a->class_count *= a->classes[i];
        CHECK(v[4] != 2 || length % a->block[i] == 0, PARAMETERS);
    }
    return 0;
}

/* Return the class of a position of an axis. */
static uint64_t class_of(const axes *a, int axis, uint64_t position) {
    if (a->kind == DCT) return position % a->block[axis];
    uint64_t class = 0;
    for (int level = (int)a->classes[axis] - 1; level > 0; level--)
        class += position >= low_band(a->block[axis], level);
    return class;
}

static int plan_spectral(plan *p, const tensor *t) {
    axes a;
    TRY(axes_of(t, &a));
    uint64_t points = 0, rows = t->rows, columns = t->columns, across = 1, each = 20;
    for (int i = 0; i < a.n; i++) {
        across *= a.block[i];
        each += a.kind == DCT && a.block[i] > 1 ? 3 * a.block[i] : a.levels ? 32 : 0;
    }
    if (a.kind == HADAMARD) each += (uint64_t)(16 + 8 * (log2_of(columns) + 1));
    if (t->parameter[4] == 1) {
        const uint64_t first = a.n > 1 ? a.length[0] : 1, second = a.length[a.n > 1];
        points = count_of(t) / first / second + first + second;
        rows = count_of(t) / second;
        columns = second;
    } else if (t->parameter[4] == 2) {
        points = columns = across;
        rows = count_of(t) / across;
    }
    spend(p, count_of(t), each);
    spend(p, points, 400);
    spend(p, a.class_count, 8);
    TRY(add_stream(p, rows, columns, -32, 1));
    return add_stream(p, 1, a.class_count, -16, 1);
}

typedef struct points { /* all tuples of coordinates along some axes, numbered in row-major order */
    int n, is_morton;
    uint64_t size[MOST_DIMENSIONS];
    const uint32_t *class[MOST_DIMENSIONS]; /* of coordinates; NULL where they are compared themselves */
} points;

static int compare_points(const void *with, uint64_t a, uint64_t b) {
    const points *p = with;
    uint64_t top = 0, i = a, j = b;
    int order = 0;
    for (int k = p->n - 1; k >= 0; i /= p->size[k], j /= p->size[k], k--) {
        uint64_t x = i % p->size[k], y = j % p->size[k];
        if (p->class[k]) x = p->class[k][x], y = p->class[k][y];
        /* By the first axis that differs; along Morton's curve by that which differs in the highest bit. */
        if (x == y || (p->is_morton && (x ^ y) < top && (x ^ y) < ((x ^ y) ^ top))) continue;
        order = x < y ? -1 : 1;
        top = x ^ y;
    }
    return order ? order : a < b ? -1 : a > b;
}

/* Return where each point stands in their order. */
static uint64_t *rank_points(memory *m, const points *p) {
    uint64_t count = 1;
    for (int i = 0; i < p->n; i++) count *= p->size[i];
    uint64_t *order = take(m, count, sizeof *order), *rank = take(m, count, sizeof *rank);
    if (!order || !rank) return NULL;
    for (uint64_t i = 0; i < count; i++) order[i] = i;
    sort(order, (size_t)count, compare_points, p);
    for (uint64_t i = 0; i < count; i++) rank[order[i]] = i;
    return rank;
}

/* Numbers of twice the precision of doubles, high + low: products and sums right to about 2^-100. */
typedef struct wide {
    double high, low;
} wide;

static wide wide_sum(double a, double b) { /* |a| >= |b| */
    wide s = {a + b, 0};
    s.low = b - (s.high - a);
    return s;
}

static wide wide_product(wide a, wide b) {
    const double p = a.high * b.high, s = 134217729.0; /* halves of 26 bits, whose products are exact */
    const double a1 = s * a.high - (s * a.high - a.high), b1 = s * b.high - (s * b.high - b.high);
    const double a2 = a.high - a1, b2 = b.high - b1;
    return wide_sum(p, ((a1 * b1 - p) + a1 * b2 + a2 * b1) + a2 * b2 + (a.high * b.low + a.low * b.high));
}

static wide wide_quotient(wide a, double b) {
    const double q = a.high / b;
    const wide back = wide_product((wide){q, 0}, (wide){b, 0});
    return wide_sum(q, ((a.high - back.high) - back.low + a.low) / b);
}

/* Fill in b(k, i) of blocks of n at k * n + i, the double nearest to sqrt((2 - [k = 0]) / n) cos(pi k (2i + 1) / 2n) */
static void make_cosines(double *out, uint64_t n) {
    wide cosine[65], norm[2];
    for (uint64_t q = 0; q <= n; q++) { /* of pi q / 2n, by the series */
        const wide pi = {3.141592653589793, 1.2246467991473532e-16};
        const wide angle = wide_quotient(wide_product(pi, (wide){(double)q, 0}), 2 * (double)n);
        const wide square = wide_product(angle, angle);
        wide term = {1, 0};
        cosine[q] = term;
        for (int k = 1; k < 40; k += 2) {
            term = wide_quotient(wide_product(term, square), -(double)(k * (k + 1)));
            const wide sum = wide_sum(cosine[q].high, term.high);
            cosine[q] = wide_sum(sum.high, sum.low + cosine[q].low + term.low);
        }
    }
    /* The format's cosine of a right angle, which the series above cannot tell from 0; it decides signs of zeros. */
    cosine[n] = (wide){15 * power_of_two(-192), 0};
    for (int k = 0; k < 2; k++) { /* square roots by Newton's method */
        const wide a = wide_quotient((wide){1 + k, 0}, (double)n);
        double root = 1;
        for (int i = 0; i < 12; i++) root = (root + a.high / root) / 2;
        const wide square = wide_product((wide){root, 0}, (wide){root, 0});
        norm[k] = wide_sum(root, ((a.high - square.high) - square.low + a.low) / (2 * root));
    }
    for (uint64_t k = 0; k < n; k++) {
        for (uint64_t i = 0; i < n; i++) {
            uint64_t angle = (2 * i + 1) * k % (4 * n);
            if (angle > 2 * n) angle = 4 * n - angle;
            const double x = wide_product(norm[k > 0], cosine[angle > n ? 2 * n - angle : angle]).high;
            out[k * n + i] = angle > n ? -x : x;
        }
    }
}

static const double wavelet_factors[2][5] = {
    {-0.5, 0.25, 0, 0, 1.4142135623730951},
    {-1.586134342059924, -0.052980118572961, 0.882911075530934, 0.443506852043971, 1.1496043988602418},
};

/* Undo the wavelet transform of n samples; `other` has room for as many. */
static void undo_wavelet(const axes *a, double *x, double *other, uint64_t n) {
    const double *factor = wavelet_factors[a->kind == WAVELET97], by = factor[4];
    int level = 0;
    while (level < a->levels && low_band(n, level) > 1) level++;
    for (; level--;) {
        const uint64_t size = low_band(n, level), half = (size + 1) / 2, odds = size - half;
        double *even = other, *odd = other + half;
        for (uint64_t i = 0; i < half; i++) even[i] = x[i] / by;
        for (uint64_t i = 0; i < odds; i++) odd[i] = x[half + i] * by;
        for (int f = a->kind == WAVELET97 ? 3 : 1; f >= 0; f--) {
            for (uint64_t i = 0; i < half && f % 2; i++)
                even[i] += -factor[f] * (odd[i ? i - 1 : 0] + odd[smaller(i, odds - 1)]);
            for (uint64_t i = 0; i < odds && f % 2 == 0; i++)
                odd[i] += -factor[f] * (even[i] + even[smaller(i + 1, half - 1)]);
        }
        for (uint64_t i = 0; i < size; i++) x[i] = i % 2 ? odd[i / 2] : even[i / 2];
    }
}

/* Undo the transform of an axis, whose neighbors lie `inner` apart. */
static int undo_axis(memory *m, const axes *a, int axis, double *x, uint64_t count, uint64_t inner) {
    const uint64_t length = a->length[axis], block = a->block[axis], rest = length % block;
    double *line = take(m, 2 * block, sizeof *line), *other = line + block, *cosines = NULL;
    if (!line) return m->error;
    if (a->kind == DCT) { /* of a block, and of the last one, which is shorter */
        if (!(cosines = take(m, block * block + rest * rest, sizeof *cosines))) return m->error;
        make_cosines(cosines, block);
        if (rest) make_cosines(cosines + block * block, rest);
    }
    for (uint64_t outer = 0; outer < count; outer += length * inner) {
        for (uint64_t start = 0, n; start < length; start += n) {
            n = smaller(block, length - start);
            const double *b = n < block ? cosines + block * block : cosines;
            for (uint64_t at = 0; at < inner; at++) {
                double *first = x + outer + start * inner + at;
                for (uint64_t i = 0; i < n; i++) line[i] = first[i * inner];
                if (a->kind == DCT) {
                    for (uint64_t i = 0; i < n; i++) other[i] = b[i] * line[0];
                    for (uint64_t k = 1; k < n; k++)
                        for (uint64_t i = 0; i < n; i++) other[i] += b[k * n + i] * line[k];
                } else {
                    undo_wavelet(a, line, other, n);
                }
                for (uint64_t i = 0; i < n; i++) first[i * inner] = a->kind == DCT ? other[i] : line[i];
            }
        }
    }
    return 0;
}

static int decode_spectral(reader *r, const tensor *t, void *out) {
    const uint64_t count = count_of(t);
    const int layout = (int)t->parameter[4], is_morton = (int)t->parameter[5];
    double *x = take(r->m, count, sizeof *x);
    uint64_t *ranks[3] = {NULL, NULL, NULL}, at[MOST_DIMENSIONS] = {0};
    uint32_t *class[MOST_DIMENSIONS];
    values symbol;
    float *scales;
    axes a;
    if (!x) return r->m->error;
    TRY(axes_of(t, &a));
    TRY(read_stream(r, &symbol));
    TRY(read_scales(r, a.class_count, &scales));
    points inside = {.n = layout == 2 ? a.n : a.n > 2 ? a.n - 2 : 0, .is_morton = is_morton};
    for (int i = 0; i < a.n; i++) {
        if (!(class[i] = take(r->m, a.length[i], sizeof **class))) return r->m->error;
        for (uint64_t k = 0; k < a.length[i]; k++) class[i][k] = (uint32_t)class_of(&a, i, k);
        const int axis = layout == 2 ? i : i - 2;
        if (axis >= 0) inside.size[axis] = layout == 2 ? a.block[i] : a.length[i];
        if (axis >= 0 && layout == 1) inside.class[axis] = class[i];
        if (i < 2 && layout == 1) {
            const points line = {1, 0, {a.length[i]}, {class[i]}};
            if (!(ranks[a.n > 1 ? i : 1] = rank_points(r->m, &line))) return r->m->error;
        }
    }
    if (layout && !(ranks[2] = rank_points(r->m, &inside))) return r->m->error;
    uint64_t width = 1; /* of a row of the coded matrix */
    for (int k = 0; k < a.n; k++) width *= layout == 2 ? a.block[k] : k == (a.n > 1) ? a.length[k] : 1;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t row = 0, point = 0, kind = 0, from = i;
        for (int k = 0; k < a.n; k++) {
            kind = kind * a.classes[k] + class[k][at[k]];
            if (layout == 2) row = row * (a.length[k] / a.block[k]) + at[k] / a.block[k];
            if (layout == 2) point = point * a.block[k] + at[k] % a.block[k];
            if (layout == 1 && k > 1) point = point * a.length[k] + at[k];
        }
        if (layout == 2) from = row * width + ranks[2][point];
        if (layout == 1 && a.n == 1) from = ranks[1][at[0]];
        if (layout == 1 && a.n > 1) from = (ranks[2][point] * a.length[0] + ranks[0][at[0]]) * width + ranks[1][at[1]];
        x[i] = (double)value_at(symbol, (size_t)from) * scales[kind];
        for (int k = a.n - 1; k >= 0 && ++at[k] == a.length[k]; k--) at[k] = 0;
    }
    if (a.kind == HADAMARD) {
        const uint64_t columns = t->columns, p = (uint64_t)1 << log2_of(columns);
        double *signs = take(r->m, 2 * p, sizeof *signs);
        if (!signs) return r->m->error;
        make_signs(signs, p, 0);
        make_signs(signs + p, p, 1);
        for (uint64_t row = 0; row < t->rows; row++) rotate_row(x + row * columns, columns, signs);
    }
    uint64_t inner = 1;
    for (int k = a.n - 1; k >= 0; inner *= a.length[k--])
        if (a.block[k] > 1) TRY(undo_axis(r->m, &a, k, x, count, inner));
    store_doubles(t->dtype, x, count, out);
    return 0;
}

/* ---- Tucker ---- */

enum { MOST_AXES = 8 };

typedef struct tucker {
    uint64_t ranks[MOST_AXES], shapes[MOST_AXES][2];
    inner core, factors[MOST_AXES]; /* of cut axes */
} tucker;

static int take_tucker(const tensor *t, tucker *k) {
    const int n = t->dimensions;
    CHECK(is_real(t->dtype) && count_of(t) && n >= 2 && n <= MOST_AXES && t->parameters >= (uint64_t)n, PARAMETERS);
    const int64_t *v = t->parameter + n;
    uint64_t left = t->parameters - (uint64_t)n, numbers = 1, is_cut = 0;
    for (int i = 0; i < n; i++) {
        k->ranks[i] = (uint64_t)t->parameter[i];
        CHECK(k->ranks[i] >= 1 && k->ranks[i] <= t->shape[i], PARAMETERS);
        numbers *= k->ranks[i];
    }
    TRY(take_inner(&v, &left, n, k->ranks, 0, &k->core));
    for (int i = 0; i < n; i++) {
        k->factors[i].by = NULL;
        if (k->ranks[i] == t->shape[i]) continue;
        is_cut = 1;
        numbers += k->shapes[i][0] = k->ranks[i];
        numbers += k->ranks[i] * (k->shapes[i][1] = t->shape[i]) - k->ranks[i];
        TRY(take_inner(&v, &left, 2, k->shapes[i], 0, &k->factors[i]));
    }
    CHECK(is_cut && !left && numbers <= count_of(t), PARAMETERS);
    return 0;
}

static int plan_tucker(plan *p, const tensor *t) {
    tucker k;
    TRY(take_tucker(t, &k));
    TRY(k.core.by->plan(p, &k.core.t));
    spend(p, count_of(t), 12);
    for (int i = 0; i < t->dimensions; i++) {
        if (!k.factors[i].by) continue;
        uint64_t size = 1; /* once this axis is expanded, and those after it */
        for (int j = 0; j < t->dimensions; j++) size *= j < i ? k.ranks[j] : t->shape[j];
        spend(p, size, 2 * k.ranks[i]);
        TRY(k.factors[i].by->plan(p, &k.factors[i].t));
        TRY(add_stream(p, k.ranks[i], 1, -16, 1));
    }
    return 0;
}

static int decode_tucker(reader *r, const tensor *t, void *out) {
    const double most = most_of(BIRDIE_FLOAT32);
    tucker k;
    double *factors[MOST_AXES] = {NULL}, *x;
    float *from, *scales;
    TRY(take_tucker(t, &k));
    TRY(decode_inner(r, &k.core, &from));
    uint64_t count = count_of(&k.core.t), inner = 1;
    if (!(x = take(r->m, count, sizeof *x))) return r->m->error;
    for (uint64_t i = 0; i < count; i++) x[i] = from[i];
    for (int i = 0; i < t->dimensions; i++) {
        if (!k.factors[i].by) continue;
        const uint64_t n = count_of(&k.factors[i].t);
        if (!(factors[i] = take(r->m, n, sizeof **factors))) return r->m->error;
        TRY(decode_inner(r, &k.factors[i], &from));
        TRY(read_scales(r, k.ranks[i], &scales));
        for (uint64_t j = 0; j < n; j++) factors[i][j] = (double)from[j] * scales[j / t->shape[i]];
    }
    for (int axis = t->dimensions - 1; axis >= 0; inner *= t->shape[axis--]) {
        const uint64_t rank = k.ranks[axis], length = t->shape[axis], outer = count / rank / inner;
        const double *f = factors[axis];
        if (!f) continue;
        double *y = take(r->m, outer * length * inner, sizeof *y), *to = y;
        if (!y) return r->m->error;
        for (uint64_t o = 0; o < outer; o++) {
            for (uint64_t i = 0; i < length; i++, to += inner) {
                const double *line = x + o * rank * inner;
                for (uint64_t c = 0; c < inner; c++) to[c] = f[i] * line[c];
                for (uint64_t j = 1; j < rank; j++)
                    for (uint64_t c = 0; c < inner; c++) to[c] += f[j * length + i] * line[j * inner + c];
                for (uint64_t c = 0; c < inner; c++) to[c] = to[c] > most ? most : to[c] < -most ? -most : to[c];
            }
        }
        x = y;
        count = outer * length * inner;
    }
    store_doubles(t->dtype, x, count, out);
    return 0;
}

#endif
static const scheme schemes[OWN_SCHEMES] = {
    {NULL, NULL, 0},
    {plan_lossless, decode_lossless, 2},
    {plan_grid, decode_grid, 1},
    {plan_cast, decode_cast, 2},
    {plan_trellis, decode_trellis, 2},
    {plan_ternary, decode_ternary, 1},
    {plan_codebook, decode_codebook, 1},
    {plan_rotation, decode_rotation, 0},
    {plan_lowrank, decode_lowrank, 0},
#ifndef BIRDIE_SMALL
    {plan_spectral, decode_spectral, 2},
    {plan_tucker, decode_tucker, 0},
#endif
};

/* ==== Metadata ==== */

enum { MOST_VALUES = 1 << 22, MOST_DEPTH = 500, MOST_DIGITS = 4300 };

static int is_space(int c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
static int is_digit(int c) { return c >= '0' && c <= '9'; }

static int hex_of(int c) {
    return is_digit(c) ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
}

/* Return the position after a string whose first character is at `p`, behind its quote; NULL if it is none. */
static const char *check_string(const char *p, const char *end) {
    for (; p < end; p++) {
        if (*p == '"') return p + 1;
        if ((unsigned char)*p < 0x20) return NULL;
        if (*p != '\\') continue;
        if (++p == end) return NULL;
        if (*p == 'u') {
            for (int k = 1; k <= 4; k++)
                if (end - p <= k || hex_of(p[k]) < 0) return NULL;
            p += 4;
        } else if (!memchr("\"\\/bfnrt", *p, 8)) {
            return NULL;
        }
    }
    return NULL;
}

/* Return whether a number is finite in float64, which it is below 2^1024 - 2^970: half a unit above the largest one. */
static int is_finite_number(const char *p, const char *end) {
    static const char beyond[] =
        "17976931348623158079372897140530341507993413271003782693617377898044496829276475094664901797758720709633"
        "02864166928879109465555478519404026306574886715058206819089020007083836762738548458177115317644757302700"
        "69855571366959622842914819860834936475292719074168444365510704342711559699508093042880177904174497792";
    int64_t point = 0, exponent = 0; /* the value is 0.DIGITS times ten to that power */
    int is_after = 0, order = 0;
    size_t digits = 0;
    for (p += *p == '-'; p < end && (is_digit(*p) || *p == '.'); p++) {
        if (*p == '.') {
            is_after = 1;
            continue;
        }
        if (digits || *p != '0') {
            char other = digits < sizeof beyond - 1 ? beyond[digits] : '0';
            if (!order) order = *p < other ? -1 : *p > other;
            digits++;
            point += !is_after;
        } else {
            point -= is_after;
        }
    }
    if (!digits) return 1;
    if (digits < sizeof beyond - 1 && !order) order = -1;
    if (p < end) {
        int is_negative = *++p == '-';
        for (p += *p == '-' || *p == '+'; p < end; p++)
            if (exponent < (int64_t)1 << 40) exponent = 10 * exponent + (*p - '0');
        point += is_negative ? -exponent : exponent;
    }
    return point < (int64_t)(sizeof beyond - 1) || (point == (int64_t)(sizeof beyond - 1) && order < 0);
}

/* Return the position after a number; NULL if it is none, or one that the format does not allow. */
static const char *check_number(const char *p, const char *end) {
    const char *start = p, *digits;
    int is_integer = 1;
    if (p < end && *p == '-') p++;
    digits = p;
    while (p < end && is_digit(*p)) p++;
    if (p == digits || (*digits == '0' && p - digits > 1)) return NULL;
    if (p < end && *p == '.') {
        digits = ++p;
        while (p < end && is_digit(*p)) p++;
        if (p == digits) return NULL;
        is_integer = 0;
    }
    if (p < end && (*p | 32) == 'e') {
        p++;
        if (p < end && (*p == '-' || *p == '+')) p++;
        digits = p;
        while (p < end && is_digit(*p)) p++;
        if (p == digits) return NULL;
        is_integer = 0;
    }
    return (is_integer ? p - digits <= MOST_DIGITS : is_finite_number(start, p)) ? p : NULL;
}

/* Return the code point at `*p` within a string, and go on; UINT32_MAX at its end. Half a pair stands for itself. */
static uint32_t next_character(const char **p) {
    static const char escapes[] = "b\bf\fn\nr\rt\t";
    const unsigned char *s = (const unsigned char *)*p;
    uint32_t c = *s++;
    if (c == '"') return UINT32_MAX;
    if (c == '\\') {
        c = *s++;
        if (c == 'u') {
            c = 0;
            for (int k = 0; k < 4; k++) c = c << 4 | (uint32_t)hex_of(*s++);
            if (c >> 10 == 0xD800 >> 10 && s[0] == '\\' && s[1] == 'u') {
                uint32_t low = 0;
                for (int k = 2; k < 6; k++) low = low << 4 | (uint32_t)hex_of(s[k]);
                if (low >> 10 == 0xDC00 >> 10) {
                    c = 0x10000 + ((c & 1023) << 10 | (low & 1023));
                    s += 6;
                }
            }
        } else {
            for (int k = 0; k < 10; k += 2)
                if (c == (unsigned char)escapes[k]) c = (unsigned char)escapes[k + 1], k = 10;
        }
    } else if (c >= 0x80) {
        int more = c < 0xE0 ? 1 : c < 0xF0 ? 2 : 3;
        for (c &= 0x3Fu >> more; more; more--) c = c << 6 | (*s++ & 63);
    }
    *p = (const char *)s;
    return c;
}

/* Compare keys, each the number of its object and its position in the text. */
static int compare_keys(const void *with, uint64_t a, uint64_t b) {
    if (a >> 32 != b >> 32) return a < b ? -1 : 1;
    const char *p = (const char *)with + (uint32_t)a, *q = (const char *)with + (uint32_t)b;
    for (;;) {
        uint32_t c = next_character(&p), d = next_character(&q);
        if (c != d) return c + 1 < d + 1 ? -1 : 1; /* the end is before all others */
        if (c == UINT32_MAX) return 0;
    }
}

static const char *skip_space(const char *p, const char *end) {
    while (p < end && is_space(*p)) p++;
    return p;
}

/* Check that a text is a JSON object without repeated keys. */
static int check_json(memory *m, const char *text, size_t size) {
    const char *p = text, *end = text + size;
    uint64_t marks = 0, keys = 0, objects = 0, object[MOST_DEPTH]; /* 0 for a list */
    int depth = 0, must_be_key = 0, may_end = 0;
    for (size_t i = 0; i < size; i++) marks += p[i] == ',' || p[i] == '[' || p[i] == '{';
    CHECK(marks <= MOST_VALUES && is_utf8((const uint8_t *)text, size), METADATA);
    uint64_t *key = take(m, marks, sizeof *key);
    if (!key) return m->error;
    p = skip_space(p, end);
    CHECK(p < end && *p == '{', METADATA);
    for (;;) { /* a value, or a key and a value, or the end of a list or object that has none */
        p = skip_space(p, end);
        CHECK(p < end, METADATA);
        if (!(may_end && *p == (object[depth - 1] ? '}' : ']'))) {
            if (must_be_key) {
                CHECK(*p == '"', METADATA);
                key[keys++] = object[depth - 1] << 32 | (uint64_t)(p + 1 - text);
                CHECK((p = check_string(p + 1, end)) != NULL, METADATA);
                p = skip_space(p, end);
                CHECK(p < end && *p == ':', METADATA);
                p = skip_space(p + 1, end);
                CHECK(p < end, METADATA);
            }
            if (*p == '{' || *p == '[') {
                CHECK(depth < MOST_DEPTH, METADATA);
                must_be_key = *p++ == '{';
                object[depth++] = must_be_key ? ++objects : 0;
                may_end = 1;
                continue;
            }
            if (*p == '"') {
                p = check_string(p + 1, end);
            } else if (*p == '-' || is_digit(*p)) {
                p = check_number(p, end);
            } else {
                size_t left = (size_t)(end - p), length = *p == 'f' ? 5 : 4;
                CHECK(left >= length, METADATA);
                CHECK(!memcmp(p, *p == 'f' ? "false" : *p == 't' ? "true" : "null", length), METADATA);
                p += length;
            }
            CHECK(p, METADATA);
            p = skip_space(p, end);
        }
        while (p < end && depth && *p == (object[depth - 1] ? '}' : ']')) {
            depth--;
            p = skip_space(p + 1, end);
        }
        if (!depth) break;
        CHECK(p < end && *p == ',', METADATA);
        p++;
        must_be_key = object[depth - 1] != 0;
        may_end = 0;
    }
    CHECK(p == end, METADATA);
    sort(key, (size_t)keys, compare_keys, text);
    for (uint64_t i = 1; i < keys; i++) CHECK(compare_keys(text, key[i - 1], key[i]), METADATA);
    return 0;
}

/* What follows reads a text that check_json has checked, so every value ends, and so does every list. */

/* Return the position after a value. */
static const char *skip_value(const char *p) {
    int depth = 0;
    do {
        if (*p == '"') {
            for (p++; *p != '"'; p++) p += *p == '\\';
        } else {
            depth += (*p == '[' || *p == '{') - (*p == ']' || *p == '}');
        }
        p++;
    } while (depth || !(is_space(*p) || *p == ',' || *p == ']' || *p == '}' || *p == ':'));
    return p;
}

/* Return the first thing in a list or object, a value or a key, NULL for none. */
static const char *first_in(const char *p) {
    for (p++; is_space(*p); p++) {}
    return *p == ']' || *p == '}' ? NULL : p;
}

/* Return the thing after a value of a list or object, NULL after the last. */
static const char *next_in(const char *value) {
    const char *p = skip_value(value);
    while (is_space(*p)) p++;
    return *p == ',' ? first_in(p) : NULL;
}

/* Return the value of a key. */
static const char *value_of(const char *key) {
    const char *p = skip_value(key);
    while (is_space(*p) || *p == ':') p++;
    return p;
}

static int is_text(const char *p, const char *text) {
    if (*p++ != '"') return 0;
    for (; *text; text++)
        if (next_character(&p) != (unsigned char)*text) return 0;
    return *p == '"';
}

static int is_integer(const char *p) {
    if (*p == '-') p++;
    if (!is_digit(*p)) return 0;
    while (is_digit(*p)) p++;
    return *p != '.' && (*p | 32) != 'e';
}

/* Return an integer >= 0, or -1 for what is none; those above 2^59 as a number above it. */
static int64_t natural(const char *p) {
    int is_negative = *p == '-';
    int64_t value = 0;
    if (!is_integer(p)) return -1;
    for (p += is_negative; is_digit(*p); p++)
        if (value >> 59 == 0) value = 10 * value + (*p - '0');
    return is_negative && value ? -1 : value;
}

static int are_texts(const char *p) {
    if (*p != '{') return 0;
    for (const char *key = first_in(p), *value; key; key = next_in(value))
        if (*(value = value_of(key)) != '"') return 0;
    return 1;
}

/* Return whether a list somewhere in a tree is a view. */
static int has_views(const char *p) {
    int depth = 0;
    do {
        if (*p == '[') {
            const char *first = first_in(p);
            if (first && is_text(first, "view")) return 1;
        }
        if (*p == '"' || *p == '{') {
            p = skip_value(p);
        } else {
            depth += (*p == '[') - (*p == ']');
            p++;
        }
    } while (depth);
    return 0;
}

/* Return the index of the tensor that a text names, NONE if there is none. */
static uint32_t find_text(const file *f, const char *p) {
    char name[MOST_NAME + 4];
    size_t size = 0;
    p++;
    for (uint32_t c; (c = next_character(&p)) != UINT32_MAX;) {
        int more = c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
        if (size + (size_t)more >= MOST_NAME || !c) return NONE;
        name[size++] = (char)(more ? (0xF00 >> more & 0xFF) | c >> 6 * more : c);
        while (more--) name[size++] = (char)(0x80 | (c >> 6 * more & 63));
    }
    return find(f, name, size);
}

static int check_order(const char *p) {
    const char *marks = *p == '[' ? first_in(p) : NULL;
    if (!marks || *marks != '"') return 0;
    const char *at = marks + 1;
    int count = 0;
    while (next_character(&at) != UINT32_MAX) count++;
    for (const char *moves = next_in(marks); moves; moves = next_in(moves)) {
        if (*moves != '[') return 0;
        for (const char *move = first_in(moves); move; move = next_in(move))
            if (!is_integer(move)) return 0;
    }
    return count <= 8;
}

static int check_state(const char *p) {
    if (*p != '{') return 0;
    for (const char *key = first_in(p), *value; key; key = next_in(value)) {
        value = value_of(key);
        int is_versions = is_text(key, "versions");
        if ((is_versions || is_text(key, "extra")) && *value != '{') return 0;
        if (!is_versions) continue;
        for (const char *module = first_in(value), *version; module; module = next_in(version)) {
            version = value_of(module);
            if (*version != '[' && !is_integer(version)) return 0;
        }
    }
    return 1;
}

/* Check the base; take over whether it is the file itself, and the names that tensors have in it. */
static int check_base(file *f, const char *p, const char **names) {
    if (*p != '{') return 0;
    for (const char *key = first_in(p), *value; key; key = next_in(value)) {
        value = value_of(key);
        if (is_text(key, "of") && *value != '"') return 0;
        if (is_text(key, "inside")) {
            if (*value != 't' && *value != 'f') return 0;
            if (*value == 't') f->base = f;
        }
        if (is_text(key, "names")) {
            if (!are_texts(value)) return 0;
            *names = value;
        }
    }
    return 1;
}

/* Take over which tensors of the base have other names. */
static void read_names(file *f, const char *p) {
    for (const char *name = first_in(p), *other; name; name = next_in(other)) {
        other = value_of(name);
        uint32_t i = find_text(f, name);
        if (i != NONE) f->entries[i].base = find_text(f->base, other);
    }
}

/* Check the values of the keys that the format knows, and take over what decoding needs. */
static int check_fields(file *f) {
    const char *p = f->metadata, *names = NULL;
    while (is_space(*p)) p++;
    for (const char *key = first_in(p), *value; key; key = next_in(value)) {
        value = value_of(key);
        int is_sound = 1;
        if (is_text(key, "budget")) is_sound = is_integer(value) && (*value != '-' || !natural(value)); /* of any size */
        if (is_text(key, "onnx")) is_sound = *value == '[';
        if (is_text(key, "metadata") || is_text(key, "link")) is_sound = *value == '{';
        if (is_text(key, "schemes")) is_sound = are_texts(value);
        if (is_text(key, "order")) is_sound = check_order(value);
        if (is_text(key, "state")) is_sound = check_state(value);
        if (is_text(key, "base")) is_sound = check_base(f, value, &names);
        if (is_text(key, "tree")) {
            is_sound = *value != '{';
            f->has_views = *value == '[' && has_views(value);
        }
        if (is_text(key, "files")) {
            is_sound = *value == '{';
            for (const char *name = is_sound ? first_in(value) : NULL, *size; name && is_sound; name = next_in(size)) {
                size = value_of(name);
                is_sound = natural(size) >= 0 && natural(size) <= (int64_t)1 << 48;
            }
        }
        if (is_text(key, "copies")) {
            uint32_t next = 0, alias = 0; /* of the tensors, and of the aliases among those before it */
            int64_t before = -1;
            is_sound = *value == '[';
            for (const char *one = is_sound ? first_in(value) : NULL; one; one = next_in(one)) {
                int64_t index = natural(one);
                CHECK(index > before, METADATA);
                before = index;
                for (;; next++) { /* to the alias of this index */
                    CHECK(next < f->tensor_count, METADATA);
                    if (f->entries[f->tensors[next]].kind == ALIAS && alias++ == index) break;
                }
                f->entries[f->tensors[next++]].is_copy = 1;
            }
        }
        CHECK(is_sound, METADATA);
    }
    for (uint32_t i = 0; i < f->count && f->base; i++) {
        entry *e = &f->entries[i];
        if (is_tensor(e)) e->base = f->base == f ? i : find(f->base, e->name, e->name_size);
    }
    if (names && f->base) read_names(f, names);
    return 0;
}

static int check_metadata(file *f) {
    if (!f->metadata_size) return 0;
    block *mark = f->m.top;
    TRY(check_json(&f->m, f->metadata, f->metadata_size));
    release(&f->m, mark);
    return check_fields(f);
}

/* ==== Coded streams (docs/coders.md) ==== */

/* ---- Numbers: side information ---- */

enum { CONTEXTS = 96, LENGTHS = 35, SLOTS = LENGTHS + 8 * LENGTHS };

typedef struct side {
    const uint8_t *words;
    size_t count, at;
    uint32_t x;
    int failed; /* what was read is no side information; numbers are 0 from then on */
    uint8_t is_used[CONTEXTS];
    struct {
        uint16_t p, n;
    } models[CONTEXTS][SLOTS]; /* of each context L ones and zeros, and 8 nodes for each length */
} side;

static uint32_t side_word(side *s) {
    uint32_t word = s->at < s->count ? little16(s->words + 2 * s->at) : 0;
    s->at++;
    return word;
}

static int open_side(side *s, const uint8_t *words, size_t count) {
    CHECK(count >= 2, SIDE);
    *s = (side){.words = words, .count = count};
    s->x = side_word(s);
    s->x |= side_word(s) << 16;
    return 0;
}

/* Read a bit with odds of 32,768. */
static uint32_t side_bit(side *s, uint32_t odds) {
    uint32_t part = s->x & 32767, bit = part < odds;
    s->x = bit ? odds * (s->x >> 15) + part : (32768 - odds) * (s->x >> 15) + part - odds;
    if (s->x < 65536) s->x = s->x << 16 | side_word(s);
    return bit;
}

static uint32_t model_bit(side *s, int context, int slot) {
    int32_t p = s->models[context][slot].p, n = s->models[context][slot].n;
    uint32_t bit = side_bit(s, (uint32_t)hold(p >> 1, 32, 32736));
    s->models[context][slot].p = (uint16_t)(p + (((int64_t)(bit ? 65535 - p : -p) * (131072 / (2 * n + 3))) >> 16));
    if (n < 60) s->models[context][slot].n = (uint16_t)(n + 1);
    return bit;
}

/* Read a number in a context. */
static uint64_t number(side *s, int context) {
    if (!s->is_used[context]) {
        s->is_used[context] = 1;
        for (int i = 0; i < SLOTS; i++) s->models[context][i].p = 32768, s->models[context][i].n = 0;
    }
    int length = 0;
    uint64_t value = 1;
    while (length < LENGTHS - 1 && model_bit(s, context, length)) length++;
    for (int i = 0; i < length; i++)
        value = 2 * value + (i < 3 ? model_bit(s, context, LENGTHS + 8 * length + (int)value) : side_bit(s, 16384));
    if (value > (uint64_t)1 << 34) s->failed = 1;
    return s->failed ? 0 : value - 1;
}

/* Read a number that is at most `limit`. */
static uint32_t number_to(side *s, int context, uint32_t limit) {
    uint64_t value = number(s, context);
    if (value > limit) s->failed = 1;
    return s->failed ? 0 : (uint32_t)value;
}

static int64_t signed_number(side *s, int context) { return unzigzag(number(s, context)); }

/* Read the next number of a chain, `before` being the one before; the chain goes up to `most`. */
static uint64_t chained(side *s, int context, uint64_t before, int most) {
    return number(s, context + (int)smaller(before, (uint64_t)most));
}

static int finish_side(const side *s) {
    CHECK(!s->failed && s->at == s->count && s->x == 65536, SIDE);
    return 0;
}

/* ---- Streams ---- */

typedef struct coded { /* a stream that is decoded */
    const file *f;
    memory *m;
    const stream *s;
    const uint8_t *data;
    size_t size;
    side *side;            /* of coders 4 to 6 */
    const machine *halves; /* not NULL: numbers m are wanted as 2m + odd, which coders know that follow the paths */
    int has_halves;        /* 1: that is what they are */
} coded;

static int check_range(const stream *s, int64_t low, int64_t high) {
    CHECK(low >= s->low && high <= s->high, RANGE);
    return 0;
}

static int check_values(const stream *s, const int32_t *v, size_t n) {
    int32_t low = v[0], high = v[0];
    for (size_t i = 1; i < n; i++) {
        low = v[i] < low ? v[i] : low;
        high = v[i] > high ? v[i] : high;
    }
    return check_range(s, low, high);
}

static int decode_constant(const coded *c, int32_t *out) {
    const int size = (int)smaller(c->size, 5);
    uint32_t value = 0;
    for (int i = 0; i < size && i < 4; i++) value |= (uint32_t)c->data[i] << 8 * i;
    if (size && size < 4 && value >> (8 * size - 1)) value |= ~(uint32_t)0 << 8 * size;
    int64_t v = (int32_t)value;
    int least = 0;
    while (least < 4 && v && !(least && v >= -((int64_t)1 << (8 * least - 1)) && v < (int64_t)1 << (8 * least - 1)))
        least++;
    CHECK(size == least, PAYLOAD);
    *out = (int32_t)v;
    return check_range(c->s, v, v);
}

static int decode_bytes(const coded *c, size_t n, int32_t *out) {
    CHECK(c->size == n, PAYLOAD);
    for (size_t i = 0; i < n; i++) out[i] = c->data[i];
    return check_values(c->s, out, n);
}

static int decode_packed(const coded *c, size_t n, int32_t *out) {
    CHECK(c->size >= 5 && c->data[0] >= 1 && c->data[0] <= 32, PAYLOAD);
    const uint32_t width = c->data[0];
    const int64_t low = (int32_t)little32(c->data + 1);
    const uint8_t *p = c->data + 5, *end = c->data + c->size;
    CHECK(c->size - 5 == ceiling((uint64_t)n * width, 8), PAYLOAD);
    uint64_t held = 0, mask = ((uint64_t)1 << width) - 1;
    for (size_t i = 0, count = 0; i < n; i++, count -= width, held >>= width) {
        for (; count < width && p < end; count += 8) held |= (uint64_t)*p++ << count;
        int64_t value = low + (int64_t)(held & mask);
        CHECK(value <= INT32_MAX, RANGE);
        out[i] = (int32_t)value;
    }
    return check_values(c->s, out, n);
}

static int decode_numbers(const coded *c, size_t n, int32_t *out) {
    side *s = take(c->m, 1, sizeof *s);
    if (!s) return c->m->error;
    CHECK(c->size % 2 == 0 && n <= 1 << 20, PAYLOAD);
    TRY(open_side(s, c->data, c->size / 2));
    int is_running = (int)number_to(s, 0, 1);
    int64_t center = signed_number(s, 1);
    for (size_t i = 0, before = 0; i < n && !s->failed; i++) {
        uint64_t v = chained(s, 2, before, 31);
        before = (size_t)smaller(v, 31);
        int64_t value = center + unzigzag(v);
        CHECK(value >= c->s->low && value <= c->s->high, RANGE);
        out[i] = (int32_t)value;
        if (is_running) center = value;
    }
    return finish_side(s);
}

/* ---- Alphabets ---- */

enum { MOST_SYMBOLS = 4096, TOKENS = 256 + 26 * 8 };

typedef struct alphabet {
    int is_split, is_affine;
    uint32_t size;
    int64_t center;
    int32_t v[MOST_SYMBOLS]; /* what symbols stand for; of a split alphabet the tokens */
} alphabet;

static int take_alphabet(side *s, alphabet *a) {
    uint32_t kind = number_to(s, 0, 2);
    int64_t value = signed_number(s, 1);
    a->is_split = kind == 2;
    a->is_affine = kind == 0;
    a->center = value;
    a->size = kind == 2 ? TOKENS : number_to(s, 3, MOST_SYMBOLS - 1) + 1;
    int64_t step = kind ? 0 : (int64_t)number(s, 2) + 1;
    for (uint32_t i = 0; i < a->size; i++) {
        if (i && kind < 2) value += kind ? (int64_t)number(s, 4) + 1 : step;
        CHECK(kind == 2 || (value >= INT32_MIN && value <= INT32_MAX), SIDE);
        a->v[i] = kind == 2 ? (int32_t)i : (int32_t)value;
    }
    CHECK(!s->failed, SIDE);
    return 0;
}

/* Replace tokens by numbers, which low bits complete. */
static int join_tokens(const coded *c, const alphabet *a, const uint8_t *low, size_t size, int32_t *v, size_t n) {
    size_t at = 0; /* in bits */
    for (size_t i = 0; i < n; i++) {
        uint32_t token = (uint32_t)v[i], width = token < 256 ? 0 : (token - 256) / 8 + 5;
        uint64_t value = token < 256 ? token : (uint64_t)(8 + token % 8) << width;
        CHECK(width <= 8 * size - at, PAYLOAD);
        for (uint32_t k = 0; k < width; k++, at++) value |= (uint64_t)(low[at / 8] >> at % 8 & 1) << k;
        int64_t number = unzigzag(value) + a->center;
        CHECK(number >= c->s->low && number <= c->s->high, RANGE);
        v[i] = (int32_t)number;
    }
    CHECK(ceiling(at, 8) == size, PAYLOAD);
    return 0;
}

/* ---- Tables ---- */

enum { MOST_LOG = 384 };

typedef struct table_room { /* memory for a table that is read: too much for some stacks */
    int64_t logs[MOST_SYMBOLS], knots[MOST_SYMBOLS];
    uint64_t weights[MOST_SYMBOLS], order[MOST_SYMBOLS];
    uint16_t frequency[MOST_SYMBOLS];
} table_room;

/* Read a table of `size` frequencies, whose sum is 2^precision. */
static int take_table(side *s, uint32_t size, int precision, table_room *room) {
    int64_t *logs = room->logs, *knots = room->knots;
    uint64_t *weights = room->weights, *order = room->order;
    uint16_t *out = room->frequency;
    const uint32_t first = number_to(s, 8, size - 1), last = size - 1 - number_to(s, 8, size - 1);
    const uint32_t form = number_to(s, 9, 44), stride = form / 5, coarseness = form % 5, step = 1u << stride;
    int64_t knot = 0, slope = 0;
    uint64_t sum = 0, v = 0;
    CHECK(!s->failed && first <= last, TABLE);
    const uint32_t width = last - first + 1, count = ((width - 1 + step - 1) >> stride) + 1;
    for (uint32_t i = 0; i < count; i++) {
        v = stride ? number(s, i < 2 ? 10 + (int)i : 12) : chained(s, 13, v, 3);
        if (!stride) knot += unzigzag(v);
        else if (i) knot += slope += unzigzag(v);
        else knot = (int64_t)v;
        CHECK(knot >= 0 && knot <= MOST_LOG, TABLE);
        knots[i] = knot << coarseness;
    }
    for (uint32_t i = 0; i < width; i++) {
        int64_t l = knots[i >> stride], r = knots[smaller((i >> stride) + 1, count - 1)];
        logs[i] = stride ? l + (((r - l) * (i & (step - 1)) + (step >> 1)) >> stride) : l;
    }
    uint64_t symbol = 0;
    for (uint32_t spikes = number_to(s, 17, 16); spikes; spikes--) {
        symbol += number(s, 18);
        CHECK(symbol < width, TABLE);
        logs[symbol] = hold(logs[symbol] + signed_number(s, 19), stride ? 0 : 1, MOST_LOG + 1);
    }
    uint32_t present = 0;
    for (uint32_t i = 0; i < width; i++) {
        CHECK(logs[i] <= MOST_LOG, TABLE);
        if (!stride && !logs[i]) continue;
        weights[present] = (uint64_t)(sixteenths[logs[i] & 15] >> 8) << (logs[i] >> 4);
        sum += weights[present];
        order[present++] = first + i;
    }
    int64_t left = (int64_t)1 << precision;
    CHECK(!s->failed && present && present <= left, TABLE);
    memset(out, 0, size * sizeof *out);
    for (uint32_t i = 0; i < present; i++) {
        uint64_t share = larger(1, ((weights[i] << precision) + sum / 2) / sum);
        left -= (int64_t)share;
        out[order[i]] = (uint16_t)share;
        order[i] |= (32768 - share) << 16; /* the most frequent first, then by symbol */
    }
    if (left) sort(order, present, by_number, NULL);
    while (left) {
        for (uint32_t i = 0; i < present && left; i++) {
            uint16_t *one = &out[order[i] & 65535];
            if (left < 0 && *one == 1) continue;
            *one = (uint16_t)(left > 0 ? *one + 1 : *one - 1);
            left += left > 0 ? -1 : 1;
        }
    }
    return 0;
}

/* Read the classes of rows; there are `count`. */
static int take_classes(side *s, uint64_t rows, uint32_t count, uint8_t *out) {
    uint32_t class = 0;
    for (uint64_t row = 0; row < rows; row++) {
        if (count > 1) class = number_to(s, 24 + (int)smaller(class, 31), count - 1);
        out[row] = (uint8_t)class;
    }
    CHECK(!s->failed, SIDE);
    return 0;
}

/* Take what coders 4 to 6 begin with: their side information, after which `c` has the rest. */
static int take_side(coded *c) {
    cursor at = {c->data, c->size, 0};
    uint64_t count;
    if (!(c->side = take(c->m, 1, sizeof *c->side))) return c->m->error;
    CHECK(!take_varint(&at, c->size / 2, &count) && count <= (c->size - at.at) / 2, SIDE);
    TRY(open_side(c->side, c->data + at.at, (size_t)count));
    c->data += at.at + 2 * (size_t)count;
    c->size -= at.at + 2 * (size_t)count;
    return 0;
}

/* Return a copy of `count` words of 16 bits, and some zeros behind them: decoders look a few words ahead. */
static uint16_t *copy_words(const coded *c, size_t count) {
    uint16_t *words = take(c->m, (uint64_t)count + 64, sizeof *words);
    for (size_t i = 0; words && i < count + 64; i++) words[i] = i < count ? (uint16_t)little16(c->data + 2 * i) : 0;
    return words;
}

/* Turn an array (columns, rows) into (rows, columns). */
static void transpose(const int32_t *from, size_t rows, size_t columns, int32_t *out) {
    for (size_t top = 0; top < rows; top += 32)
        for (size_t left = 0; left < columns; left += 32)
            for (size_t r = top; r < rows && r < top + 32; r++)
                for (size_t c = left; c < columns && c < left + 32; c++) out[r * columns + c] = from[c * rows + r];
}

/* ---- Prediction ---- */

typedef struct prediction {
    uint32_t kind; /* 0 none, 1 rows, 2 taps */
    uint64_t *distance[2];
    int8_t *weight[3];
    struct {
        int64_t up, back;
        int8_t weight[64];
    } taps[18];
    int tap_count, positions;
} prediction;

static int8_t take_weight(side *s, int context) {
    int64_t weight = signed_number(s, context);
    if (weight < -127 || weight > 127) s->failed = 1;
    return (int8_t)(s->failed ? 0 : weight);
}

static int take_prediction(coded *c, uint64_t rows, uint64_t columns, prediction *p) {
    side *s = c->side;
    p->kind = number_to(s, 22, 2);
    if (p->kind == 1) {
        CHECK(columns >= 8, SIDE);
        for (int k = 0; k < 2; k++) {
            if (!(p->distance[k] = take(c->m, rows, sizeof **p->distance))) return c->m->error;
            for (uint64_t row = 0; row < rows; row++)
                CHECK((p->distance[k][row] = number(s, 58 + k)) <= row, SIDE);
        }
        for (int k = 0; k < 3; k++) {
            if (!(p->weight[k] = take(c->m, rows, 1))) return c->m->error;
            for (uint64_t row = 0; row < rows; row++)
                p->weight[k][row] = k && !p->distance[k - 1][row] ? 0 : take_weight(s, 61 + k);
        }
    }
    if (p->kind == 2) {
        int64_t height = number_to(s, 56, 63) + 1, width = number_to(s, 56, 63) + 1, n = height * width;
        const int64_t across[] = {1, 2,     width, width + 1, width - 1, 2 * width,
                                  n, 2 * n, n - 1, n + 1,     n - width, n + width};
        const int64_t below[][2] = {{1, 0}, {2, 0}, {1, -1}, {1, 1}, {1, -width}, {1, width}};
        CHECK(n <= 64, SIDE);
        p->positions = (int)n;
        p->tap_count = 0;
        for (int i = 0; i < 18; i++) {
            int64_t up = i < 12 ? 0 : below[i - 12][0], back = i < 12 ? across[i] : below[i - 12][1];
            int is_new = up || back;
            for (int k = 0; k < p->tap_count; k++) is_new = is_new && (p->taps[k].up != up || p->taps[k].back != back);
            if (!is_new) continue;
            p->taps[p->tap_count].up = up;
            p->taps[p->tap_count].back = back;
            for (int k = 0; k < n; k++) p->taps[p->tap_count].weight[k] = take_weight(s, 64 + p->tap_count);
            p->tap_count++;
        }
    }
    CHECK(!s->failed, SIDE);
    return 0;
}

static int32_t modulo(int64_t v, int64_t size) {
    return (int32_t)(v >= 0 && v < size ? v : v - size * floored(v, size));
}

/* Replace residuals by the symbols that have them. */
static int add_prediction(coded *c, const prediction *p, size_t rows, size_t columns, int64_t zero, int64_t size,
                          int32_t *v) {
    const int64_t shift = zero - size / 2;
    int32_t *mean = NULL;
    if (p->kind == 1 && !(mean = take_zeros(c->m, columns, sizeof *mean))) return c->m->error;
    for (size_t row = 0; row < rows && p->kind == 1; row++, v += columns) {
        const int64_t rate = 65536 / ((int64_t)smaller(row, 1023) + 1), own = p->weight[0][row];
        const int64_t one = 256 * p->weight[1][row], two = 256 * p->weight[2][row];
        const int32_t *a = v - p->distance[0][row] * columns, *b = v - p->distance[1][row] * columns;
        for (size_t i = 0; i < columns; i++) {
            int64_t f = own * mean[i] + (one ? one * (a[i] - zero) : 0) + (two ? two * (b[i] - zero) : 0) + 1024;
            v[i] = modulo(v[i] + (f >> 11) + shift, size);
            mean[i] += (int32_t)(((v[i] - zero) * 256 - mean[i]) * rate >> 16);
        }
    }
    for (size_t row = 0; row < rows && p->kind == 2; row++) {
        for (size_t i = 0; i < columns; i++, v++) {
            const size_t position = i % (size_t)p->positions;
            int64_t f = 16;
            for (int k = 0; k < p->tap_count; k++) {
                int64_t up = p->taps[k].up, back = p->taps[k].back, from = (int64_t)i - back;
                if (p->taps[k].weight[position] && up <= (int64_t)row && from >= 0 && from < (int64_t)columns)
                    f += p->taps[k].weight[position] * (v[-(up * (int64_t)columns + back)] - zero);
            }
            *v = modulo(*v + (f >> 5) + shift, size);
        }
    }
    return 0;
}

/* ---- Coder 4 ---- */

typedef struct slot {
    uint32_t code; /* frequency - 1 from bit 15 on, offset within the symbol below */
    int32_t v;
} slot;

/* Read tables and lay out their slots one after the other, those of a pair in turn. */
static int take_slots(coded *c, uint32_t tables, int is_paired, const alphabet *a, int precision,
                      const int32_t *meaning, slot **out) {
    slot *slots = *out = take(c->m, (uint64_t)tables << precision, sizeof *slots);
    table_room *room = take(c->m, 1, sizeof *room);
    if (!slots || !room) return c->m->error;
    for (uint32_t table = 0; table < tables; table++) {
        slot *next = slots + ((size_t)(is_paired ? table & ~1u : table) << precision) + (is_paired ? table & 1 : 0);
        TRY(take_table(c->side, a->size, precision, room));
        for (uint32_t symbol = 0; symbol < a->size; symbol++) {
            uint32_t frequency = room->frequency[symbol];
            int32_t v = meaning ? meaning[symbol] : (int32_t)symbol;
            for (uint32_t i = 0; i < frequency; i++, next += 1 + is_paired)
                *next = (slot){(frequency - 1) << 15 | i, v};
        }
    }
    return 0;
}

#define TAKE_PLAIN(x, lane) \
    do { \
        const slot *one = table + (x & mask); \
        uint32_t next = ((one->code >> 15) + 1) * (x >> precision) + (one->code & 32767); \
        uint32_t need = next < 65536; /* a coin toss: no branch */ \
        out[i + lane] = one->v; \
        x = need ? next << 16 | w[at] : next; \
        at += need; \
    } while (0)

/* Decode a chunk of words at ... end whose rows have one table each. */
static int decode_plain(const uint16_t *w, size_t at, size_t end, const uint8_t *classes, size_t rows, size_t columns,
                        const slot *slots, int precision, int32_t *out) {
    const uint32_t mask = (1u << precision) - 1;
    uint32_t x[4], a, b, c, d;
    CHECK(end - at >= 8, CHUNK);
    for (int k = 0; k < 4; k++, at += 2) x[k] = w[at] | (uint32_t)w[at + 1] << 16;
    a = x[0], b = x[1], c = x[2], d = x[3];
    for (size_t row = 0; row < rows; row++, out += columns) {
        const slot *table = slots + ((size_t)classes[row] << precision);
        size_t i = 0;
        for (; i + 4 <= columns; i += 4) {
            CHECK(at <= end, CHUNK);
            TAKE_PLAIN(a, 0);
            TAKE_PLAIN(b, 1);
            TAKE_PLAIN(c, 2);
            TAKE_PLAIN(d, 3);
        }
        CHECK(at <= end, CHUNK);
        if (i < columns) TAKE_PLAIN(a, 0);
        if (i + 1 < columns) TAKE_PLAIN(b, 1);
        if (i + 2 < columns) TAKE_PLAIN(c, 2);
    }
    CHECK(at == end && a == 65536 && b == 65536 && c == 65536 && d == 65536, CHUNK);
    return 0;
}

/* The slots of an even and an odd state are loaded before the state is known: it selects, and that is fast. */
#define TAKE_PAIRED(x, lane) \
    do { \
        const slot *two = table + 2 * ((uint32_t)x & mask); \
        const uint32_t odd = 0 - (s & 1), code = two[0].code ^ ((two[0].code ^ two[1].code) & odd); \
        const uint32_t v = (uint32_t)two[0].v ^ (((uint32_t)two[0].v ^ (uint32_t)two[1].v) & odd); \
        const uint64_t next = ((code >> 15) + (uint64_t)1) * (x >> precision) + (code & 32767); \
        const uint32_t need = next < 1 << 24; \
        out[i + lane] = (int32_t)((v << are_halves) - (odd & half)); \
        x = need ? next << 16 | w[at] : next; \
        at += need; \
        s = s >> 1 ^ (odd & shift) ^ ((0 - (v & 1)) & flip); \
    } while (0)

/* The same of a paired stream: states of 40 bits, and a table for even and one for odd states of the trellis. */
static int decode_paired(const uint16_t *w, size_t at, size_t end, const uint8_t *classes, size_t rows, size_t columns,
                         const slot *slots, int precision, const machine *paths, int are_halves, uint32_t *state,
                         int32_t *out) {
    const uint32_t mask = (1u << precision) - 1, shift = paths->shift, flip = paths->flip;
    const uint32_t half = are_halves ? UINT32_MAX : 0;
    uint64_t x[4], a, b, c, d;
    uint32_t s = 0;
    CHECK(end - at >= 12, CHUNK);
    for (int k = 0; k < 4; k++, at += 3) x[k] = w[at] | (uint64_t)w[at + 1] << 16 | (uint64_t)w[at + 2] << 32;
    if (!paths->is_along_rows) memset(state, 0, columns * sizeof *state);
    for (size_t row = 0; row < rows; row++, out += columns) {
        const slot *table = slots + ((size_t)classes[row] << (precision + 1));
        size_t i = 0;
        a = x[0], b = x[1], c = x[2], d = x[3];
        for (; paths->is_along_rows && i + 4 <= columns; i += 4) {
            CHECK(at <= end, CHUNK);
            TAKE_PAIRED(a, 0);
            TAKE_PAIRED(b, 1);
            TAKE_PAIRED(c, 2);
            TAKE_PAIRED(d, 3);
        }
        x[0] = a, x[1] = b, x[2] = c, x[3] = d;
        for (; i < columns; i++) { /* the last ones, or all, each on a path of its own */
            uint64_t *one = &x[i & 3];
            CHECK(at <= end, CHUNK);
            if (!paths->is_along_rows) s = state[i];
            TAKE_PAIRED(*one, 0);
            if (!paths->is_along_rows) state[i] = s;
        }
    }
    for (int k = 0; k < 4; k++) CHECK(x[k] == 1 << 24, CHUNK);
    CHECK(at == end, CHUNK);
    return 0;
}

static int decode_static(coded *c, int32_t *result) {
    side *s;
    alphabet *a = take(c->m, 1, sizeof *a);
    prediction *p = take_zeros(c->m, 1, sizeof *p);
    machine paths;
    slot *slots;
    if (!a || !p) return c->m->error;
    TRY(take_side(c));
    s = c->side;
    TRY(take_alphabet(s, a));
    const int is_transposed = (int)number_to(s, 5, 1), precision = 8 + (int)number_to(s, 6, 7);
    const uint32_t form = number_to(s, 7, c->s->states != 1 && c->s->states != -1 ? 63 : 31);
    const int is_paired = form > 31;
    const uint32_t classes = (form & 31) + 1;
    const size_t rows = (size_t)(is_transposed ? c->s->columns : c->s->rows), n = (size_t)(c->s->rows * c->s->columns);
    const size_t columns = n / rows;
    CHECK(!s->failed && (columns >= 8 || classes == 1), SIDE);
    TRY(machine_of(is_paired ? c->s->states : 1, &paths));
    TRY(take_prediction(c, rows, columns, p));
    const uint32_t zero = p->kind ? number_to(s, 23, a->size - 1) : 0;
    uint8_t *class = take(c->m, rows, 1), one_class = 0;
    uint32_t *state = take(c->m, columns, sizeof *state);
    if (!class || !state) return c->m->error;
    TRY(take_classes(s, rows, classes, class));
    const int32_t *meaning = p->kind || a->is_split ? NULL : a->v;
    TRY(take_slots(c, classes << is_paired, is_paired, a, precision, meaning, &slots));
    c->has_halves = is_paired && c->halves && meaning && a->v[0] > -(1 << 30) && a->v[a->size - 1] < 1 << 30;
    int is_in_rows = is_paired;
    for (size_t row = 0; row < rows && !is_in_rows; row++) is_in_rows = class[row] != 0;
    /* Where all is of one class the array is one row, cut anywhere. */
    const size_t width = is_in_rows ? columns : BIRDIE_CHUNK, height = is_in_rows ? (size_t)chunk_rows(columns) : 1;
    const size_t chunks = (size_t)ceiling(is_in_rows ? rows : n, is_in_rows ? height : width);
    size_t *ends = take(c->m, chunks, sizeof *ends), end = 0;
    if (!ends) return c->m->error;
    for (size_t i = 0; i < chunks; i++) {
        uint64_t words = number(s, 21);
        CHECK(words <= c->size / 2 - end, CHUNK);
        ends[i] = end += (size_t)words;
    }
    TRY(finish_side(s));
    if (!a->is_split) {
        TRY(check_range(c->s, a->v[0], a->v[a->size - 1]));
        CHECK(2 * end == c->size, CHUNK);
    }
    uint16_t *words = copy_words(c, end);
    int32_t *out = is_transposed ? take(c->m, n, sizeof *out) : result;
    if (!words || !out) return c->m->error;
    for (size_t i = 0, at = 0, begin = 0; i < chunks; i++, begin = ends[i - 1]) {
        size_t row = i * height, some = is_in_rows ? (size_t)smaller(height, rows - row) : 1;
        size_t across = is_in_rows ? width : (size_t)smaller(width, n - at);
        const uint8_t *kinds = is_in_rows ? class + row : &one_class;
        if (is_paired)
            TRY(decode_paired(words, begin, ends[i], kinds, some, across, slots, precision, &paths, c->has_halves,
                              state, out + at));
        else
            TRY(decode_plain(words, begin, ends[i], kinds, some, across, slots, precision, out + at));
        at += some * across;
    }
    TRY(add_prediction(c, p, rows, columns, zero, a->size, out));
    if (a->is_split) TRY(join_tokens(c, a, c->data + 2 * end, c->size - 2 * end, out, n));
    else if (p->kind)
        for (size_t i = 0; i < n; i++) out[i] = a->v[out[i]];
    if (is_transposed) transpose(out, columns, rows, result);
    return 0;
}

/* ---- Tables of coder 5 ----
 *
 * Doubles suffice: no entry lies nearer than 10^-12 of itself to where it would be rounded to another integer, and the
 * exponentials below are right to 10^-14. */

enum { LIMIT = 2047, SCALES = 384, FINE = 64 };

struct tables {
    int32_t squash[4096], stretch[4096], log2[256], power[SCALES], inverse[SCALES], adaptation[1024], prior[3][4097];
};

/* Return e^x, |x| < 700: a power of two times a Taylor series. */
static double exponential(double x) {
    const double ln2 = 0.6931471805599453;
    int n = (int)(x / ln2 + (x < 0 ? -0.5 : 0.5));
    double rest = x - n * 0.693147180369123816490 - n * 1.90821492927058770002e-10, sum = 1;
    for (int k = 20; k; k--) sum = 1 + sum * rest / k;
    return sum * power_of_two(n);
}

static double density(int prior, double x) {
    const double pi = 3.141592653589793, ln2 = 0.6931471805599453;
    if (prior == 0) return exponential(-x * x / pi);
    double inverse = 2 / (exponential(x * ln2) + exponential(-x * ln2));
    return prior == 1 ? inverse * inverse : exponential(-x);
}

static int make_tables(file *f) {
    struct tables *t = f->tables = take(&f->m, 1, sizeof *t);
    if (!t) return f->m.error;
    const double ln2 = 0.6931471805599453;
    for (int x = -2048; x < 2048; x++)
        t->squash[x + 2048] = (int32_t)hold((int64_t)(65536 / (1 + exponential(-x / 170.0)) + 0.5), 8, 65528);
    for (int i = 0, x = 0; i < 2048; i++) {
        int middle = 16 * i + 8;
        while (t->squash[x + 1] <= middle) x++;
        t->stretch[i] = (middle - t->squash[x] <= t->squash[x + 1] - middle ? x : x + 1) - 2048;
        t->stretch[4095 - i] = -t->stretch[i];
    }
    for (int i = 0; i < 256; i++) { /* the logarithm, rounded, is how many halves between its integers lie below */
        t->log2[i] = 0;
        for (int k = 1; k <= 16; k++) t->log2[i] += 1 + (2 * i + 1) / 512.0 >= exponential((2 * k - 1) * ln2 / 32);
    }
    for (int i = 0; i < SCALES; i++) { /* whole powers are exact */
        const int up = (352 - i) & 15;
        t->power[i] = (int32_t)(power_of_two(i >> 4) * (i & 15 ? exponential((i & 15) * ln2 / 16) : 1));
        t->inverse[i] = i > 352 ? 1 : (int32_t)(power_of_two((352 - i) >> 4) * (up ? exponential(up * ln2 / 16) : 1));
    }
    for (int i = 0; i < 1024; i++) t->adaptation[i] = 655360 / (10 * i + 16);
    for (int prior = 0; prior < 3; prior++) {
        double total = 0, sum = 0;
        for (int k = 0; k < 2048; k++) total += 2 * density(prior, (2 * k + 1) / 512.0);
        for (int i = 0; i <= 4096; i++) { /* the sums of both halves and the end are exact fractions */
            int32_t part = i == 2048 ? 1 << 19 : i == 4096 ? 1 << 20 : (int32_t)(1048576 * sum / total);
            t->prior[prior][i] = part + i;
            sum += density(prior, (i < 2048 ? 4095 - 2 * i : 2 * i - 4095) / 512.0);
        }
    }
    return 0;
}

/* lg(v), of v > 0. */
static int32_t lg(const struct tables *t, int64_t v) {
    double x = (double)v;
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return v <= 0 ? 0 : ((int32_t)(bits >> 52) - 1023) * 16 + t->log2[bits >> 44 & 255];
}

static int32_t sc(const struct tables *t, int64_t v) { return (lg(t, v) + 86) >> 1; }

/* ---- Range coder, of coder 5 and of deltas ---- */

typedef struct range {
    const uint8_t *words;
    size_t count, at;
    uint64_t width, code;
} range;

static uint32_t range_word(range *r) {
    uint32_t word = r->at < r->count ? little32(r->words + 4 * r->at) : 0;
    r->at++;
    return word;
}

static void open_range(range *r, const uint8_t *words, size_t count) {
    *r = (range){words, count, 0, UINT64_MAX, 0};
    r->code = (uint64_t)range_word(r) << 32;
    r->code |= range_word(r);
}

static void refill(range *r) {
    if (r->width >> 32) return;
    r->width <<= 32;
    r->code = r->code << 32 | range_word(r);
}

static int range_bit(range *r, uint32_t odds) {
    uint64_t bound = (r->width >> 16) * odds;
    int bit = r->code < bound;
    r->code -= bit ? 0 : bound;
    r->width = bit ? bound : r->width - bound;
    refill(r);
    return bit;
}

/* A chunk has at most one word less than the range coder took, and its last word is not 0. */
static int finish_range(const range *r) {
    CHECK(r->count + 1 <= r->at && (!r->count || little32(r->words + 4 * (r->count - 1))), CHUNK);
    return 0;
}

/* ---- Coder 5: its tree, its model, and a chunk ---- */

enum { COUNTERS = 192, SETS = 64, BUCKETS = 33, MOST_MIXED = 512 };

typedef struct node {
    int32_t low, split, high, depth;
} node;

typedef struct step { /* of a node, in the order in which a symbol needs it */
    int32_t next[2];  /* node after a 0 or 1, or -1 - symbol */
    uint32_t set;     /* of weights of the first mixer, and of the APM */
} step;

typedef struct mixer {
    int32_t w[8];
} mixer;

typedef struct model { /* counters: a probability of 22 bits over a count of 10 bits */
    const struct tables *t;
    const int32_t *prior;
    int64_t size, zero, scale, base, mean, cap, row_count, column_count;
    machine paths;
    int nodes, parities;
    step *steps;
    const uint8_t *parity; /* of the value of each symbol */
    uint32_t *first_counters, *counters, apm[SETS][BUCKETS + 1];
    int32_t *logits; /* of priors */
    mixer mixers[2][SETS];
    /* Local scales. A chunk of a single row may be as long as a tensor; its columns never learn and share an entry. */
    int64_t *slow, *fast, mask, row_level, column_level;
    int32_t *slow_scale, *fast_scale, *magnitude;
    uint8_t *state;
} model;

static int64_t cdf(const model *m, int64_t p, int64_t i) {
    return m->prior[hold((p * m->t->inverse[i] >> 14) + 2048, 0, 4096)];
}

/* Split the symbols into halves of about equal mass, again and again. */
static void grow_tree(const model *m, node *nodes) {
    int64_t sums[MOST_MIXED + 1] = {0};
    int count = 1;
    for (int64_t s = 0; s < m->size; s++)
        sums[s + 1] = sums[s] + 2 + cdf(m, 64 * (s - m->zero) + 32, m->scale) -
                      cdf(m, 64 * (s - m->zero) - 32, m->scale);
    nodes[0] = (node){0, 0, (int32_t)m->size - 1, 0};
    for (int k = 0; k < count; k++) {
        node *n = &nodes[k];
        int64_t twice = sums[n->low] + sums[n->high + 1];
        int32_t t = n->low;
        while (t < n->high - 1 && 2 * sums[t + 1] < twice) t++;
        if (t > n->low && twice - 2 * sums[t] < 2 * sums[t + 1] - twice) t--;
        n->split = t;
        for (int side = 0; side < 2; side++) {
            int32_t low = side ? t + 1 : n->low, high = side ? n->high : t;
            m->steps[k].next[side] = low == high ? -1 - low : count;
            if (low < high) nodes[count++] = (node){low, 0, high, n->depth + 1};
        }
        m->steps[k].set = k < 48 ? (uint32_t)k : (uint32_t)smaller(48 + (uint64_t)n->depth, 63);
    }
}

/* Seed(node, odd, i). */
static uint32_t seed(const model *m, const node *n, int odd, int64_t i) {
    int64_t o = 32 * odd, l = n->low ? cdf(m, 64 * (n->low - m->zero) - 32 + o, i) : 0;
    int64_t middle = cdf(m, 64 * (n->split - m->zero) + 32 + o, i);
    int64_t h = n->high == m->size - 1 ? m->prior[4096] : cdf(m, 64 * (n->high - m->zero) + 32 + o, i);
    return (uint32_t)(h <= l ? 1 << 21 : hold(((h - middle) << 22) / (h - l), 1 << 12, (1 << 22) - (1 << 12)));
}

/* Make what all chunks of a stream share. */
static int make_model(memory *memory, model *m) {
    node nodes[MOST_MIXED];
    m->nodes = (int)m->size - 1;
    m->parities = m->paths.states > 1 ? 2 : 1;
    const size_t stride = (size_t)(m->nodes * m->parities);
    m->steps = take(memory, (uint64_t)m->nodes, sizeof *m->steps);
    m->first_counters = take(memory, COUNTERS * stride, sizeof *m->first_counters);
    m->counters = take(memory, COUNTERS * stride, sizeof *m->counters);
    m->logits = take(memory, FINE * stride, sizeof *m->logits);
    if (!m->steps || !m->first_counters || !m->counters || !m->logits) return memory->error;
    grow_tree(m, nodes);
    for (int f = 0; f < FINE; f++) {
        for (int odd = 0; odd < m->parities; odd++) {
            for (int k = 0; k < m->nodes; k++) {
                size_t at = (size_t)(odd * m->nodes + k);
                uint32_t p = seed(m, &nodes[k], odd, hold(m->scale + 2 * f - 64, 0, SCALES - 1));
                m->logits[(size_t)f * stride + at] = m->t->stretch[p >> 10];
                uint32_t *first = m->first_counters + at;
                for (int x = f / 4; f % 4 == 0 && x < 64; x += 16) first[(size_t)x * stride] = p << 10 | 3;
                for (int x = 64; f == 32 && x < COUNTERS; x++) first[(size_t)x * stride] = p << 10 | 3;
            }
        }
    }
    m->base = m->scale - 64;
    m->mean = m->t->power[m->scale] + 1;
    m->cap = 2 * (m->mean / 16) + 4;
    return 0;
}

/* Start a chunk of rows and columns. */
static int start_chunk(memory *memory, model *m, size_t rows, size_t columns) {
    static const int32_t weights[8] = {4915, 4915, 4915, 4915, 4915, 4915, 21299, 14746};
    const size_t entries = rows > 1 ? columns : 1;
    memcpy(m->counters, m->first_counters, COUNTERS * (size_t)(m->nodes * m->parities) * sizeof *m->counters);
    for (int q = 0; q < SETS; q++) {
        for (int k = 0; k < BUCKETS; k++)
            m->apm[q][k] = (uint32_t)m->t->squash[hold(128 * (k - 16), -LIMIT, LIMIT) + 2048] << 16 | 6;
        memcpy(m->mixers[0][q].w, weights, sizeof weights);
        memcpy(m->mixers[1][q].w, weights, sizeof weights);
    }
    m->slow = take(memory, entries, sizeof *m->slow);
    m->fast = take(memory, entries, sizeof *m->fast);
    m->slow_scale = take(memory, entries, sizeof *m->slow_scale);
    m->fast_scale = take(memory, entries, sizeof *m->fast_scale);
    m->magnitude = take_zeros(memory, columns, sizeof *m->magnitude);
    m->state = take_zeros(memory, columns, 1);
    if (!m->slow || !m->fast || !m->slow_scale || !m->fast_scale || !m->magnitude || !m->state) return memory->error;
    m->mask = rows > 1 ? -1 : 0;
    m->row_level = m->column_level = (25 * m->mean * m->mean >> 10) + 1;
    for (size_t c = 0; c < entries; c++) {
        m->slow[c] = m->fast[c] = m->row_level;
        m->slow_scale[c] = m->fast_scale[c] = sc(m->t, m->row_level) - (int32_t)m->base;
    }
    return 0;
}

static uint32_t learn(const int32_t *adaptation, uint32_t counter, int bit) {
    const uint32_t n = counter & 1023;
    const int64_t step = (bit ? 4194303 : 0) - (int64_t)(counter >> 10);
    const int32_t moved = (int32_t)(step * adaptation[n] >> 16);
    return counter + (uint32_t)moved * 1024 + (n < 1000);
}

static int32_t mixed(const mixer *m, const int32_t *logit) {
    int64_t sum = 0;
    for (int k = 0; k < 8; k++) sum += (int64_t)m->w[k] * logit[k];
    return (int32_t)hold(sum >> 16, -LIMIT, LIMIT);
}

static void train(mixer *m, const int32_t *logit, int32_t error) {
    for (int k = 0; k < 8; k++) m->w[k] = (int32_t)((uint32_t)m->w[k] + (uint32_t)((logit[k] * error + 16384) >> 15));
}

/* Decode a symbol: from the root of the tree, at each node a bit is predicted, decoded, and learned from. */
static int32_t decode_symbol(model *m, range *r, int32_t rate, mixer *b, uint32_t *const counter[6],
                             const int32_t *const prior[2]) {
    const int32_t *squash = m->t->squash, *stretch = m->t->stretch, *adaptation = m->t->adaptation;
    int32_t k = 0;
    do {
        const step *one = &m->steps[k];
        mixer *a = &m->mixers[0][one->set];
        uint32_t *apm = m->apm[one->set];
        int32_t logit[8];
        for (int i = 0; i < 6; i++) logit[i] = stretch[counter[i][k] >> 20];
        logit[6] = prior[0][k];
        logit[7] = prior[1][k];
        const int32_t ya = mixed(a, logit), yb = mixed(b, logit), z = ((ya + yb) >> 1) + 2048, j = z & 127;
        uint32_t *bucket = apm + (z >> 7);
        const int32_t refined = ((int32_t)(bucket[0] >> 16) * (128 - j) + (int32_t)(bucket[1] >> 16) * j) >> 7;
        const int32_t odds = (3 * squash[z] + refined) >> 2;
        const int bit = range_bit(r, (uint32_t)(odds < 8 ? 8 : odds > 65528 ? 65528 : odds));
        train(a, logit, ((65536 * bit - squash[ya + 2048]) * rate) >> 4);
        train(b, logit, ((65536 * bit - squash[yb + 2048]) * rate) >> 4);
        bucket += j >> 6;
        const int32_t p = (int32_t)(*bucket >> 16), n = *bucket & 65535;
        *bucket += (uint32_t)((int32_t)((int64_t)((bit ? 65535 : 0) - p) * adaptation[n] >> 16)) * 65536 + (n < 250);
        for (int i = 0; i < 6; i++) counter[i][k] = learn(adaptation, counter[i][k], bit);
        k = one->next[bit];
    } while (k >= 0);
    return -1 - k;
}

static int32_t sixteenth(int32_t v) { return v < 0 ? 0 : v > 15 ? 15 : v; }
static int32_t fine(int32_t v) { return v < 0 ? 0 : v > 63 ? 63 : v; }

/* Decode a chunk of a stream to symbols. */
static int decode_mixed_chunk(memory *memory, model *m, range *r, size_t rows, size_t columns, int32_t *out) {
    const size_t stride = (size_t)(m->nodes * m->parities);
    const int32_t base = (int32_t)m->base;
    TRY(start_chunk(memory, m, rows, columns));
    for (size_t row = 0; row < rows; row++, out += columns) {
        const int32_t rate = (int32_t)hold(24 - (int64_t)(row * columns / 4000), 8, 24);
        const int32_t band = 128 + (int32_t)(8 * row / rows), u = sc(m->t, m->row_level) - base;
        uint64_t row_sum = (uint64_t)m->row_count * (uint64_t)m->row_level;
        uint64_t expected_sum = (uint64_t)m->row_count * (uint64_t)m->column_level;
        int32_t a1 = 0, a2 = 0;
        for (size_t c = 0; c < columns; c++) {
            uint8_t *state = &m->state[m->paths.is_along_rows ? 0 : c];
            const size_t odd = *state & 1, entry = m->mask ? c : 0;
            const int32_t slow = m->slow_scale[entry];
            const int32_t above = (lg(m->t, (int64_t)row_sum) - lg(m->t, (int64_t)expected_sum)) >> 1;
            const int32_t product = slow + above, fast = m->fast_scale[entry] + above;
            const int64_t sum = 2 * (int64_t)a1 + a2 + 2 * (int64_t)m->magnitude[c];
            const int32_t near = lg(m->t, (13 * sum >> 1) + (m->mean >> 2) + 1) - base;
            const int32_t x[8] = {sixteenth((product + 4) >> 3),
                                  16 + sixteenth((above + u + 4) >> 3),
                                  32 + sixteenth((fast + 4) >> 3),
                                  48 + sixteenth((3 * product + near + 16) >> 5),
                                  64 + fine((slow + 1) >> 1),
                                  band + 8 * (int32_t)(8 * (uint64_t)c / columns),
                                  fine((product + 1) >> 1),
                                  fine((fast + 1) >> 1)};
            uint32_t *counter[6];
            const int32_t *prior[2];
            for (int i = 0; i < 6; i++) counter[i] = m->counters + (size_t)x[i] * stride + odd * (size_t)m->nodes;
            for (int i = 0; i < 2; i++) prior[i] = m->logits + (size_t)x[6 + i] * stride + odd * (size_t)m->nodes;
            const int32_t symbol = decode_symbol(m, r, rate, &m->mixers[1][x[0]], counter, prior);
            const int64_t away = 2 * (symbol - m->zero) + (int64_t)odd;
            out[c] = symbol;
            a2 = a1;
            a1 = m->magnitude[c] = (int32_t)(away < 0 ? -away : away);
            *state = (uint8_t)next_state(&m->paths, *state, m->parity[symbol]);
            const uint64_t held = smaller((uint64_t)a1, (uint64_t)m->cap);
            row_sum += 16 * held * held;
            expected_sum += (uint64_t)m->slow[entry];
        }
        if (row + 1 == rows) break;
        /* What follows stays far below 2^63 in files that birdie writes; others wrap, and are refused where they would
         * divide by what is not above 0. */
        const int64_t divisor = (int64_t)row_sum + 64;
        CHECK(divisor > 0, CHUNK);
        const uint64_t normalize = (uint64_t)floored((int64_t)((expected_sum + 64) << 16), divisor);
        const uint64_t pseudo = (uint64_t)m->row_count * (uint64_t)m->row_level;
        if (row) {
            int64_t mean = floored((int64_t)(row_sum - pseudo), (int64_t)columns);
            mean = floored((int64_t)(7 * (uint64_t)m->row_level + (uint64_t)mean), 8);
            m->row_level = hold(mean, 0, INT64_MAX - 1) + 1;
        } else {
            m->row_level = floored((int64_t)row_sum, (int64_t)columns + m->row_count) + 1;
        }
        const int64_t count = (int64_t)row + m->column_count;
        const uint64_t slow = (uint64_t)m->t->adaptation[hold(count, 0, 1023)];
        const uint64_t fast = (uint64_t)m->t->adaptation[hold(count, 0, hold(m->column_count, 30, 1023))];
        uint64_t total = 0;
        for (size_t c = 0; c < columns; c++) {
            const uint64_t held = smaller((uint64_t)m->magnitude[c], (uint64_t)m->cap);
            const uint64_t g = (uint64_t)((int64_t)(16 * held * held * normalize) >> 16) + 1;
            const uint64_t a = (uint64_t)m->slow[c], b = (uint64_t)m->fast[c];
            m->slow[c] = (int64_t)(a + (uint64_t)((int64_t)((g - a) * slow) >> 16));
            m->fast[c] = (int64_t)(b + (uint64_t)((int64_t)((g - b) * fast) >> 16));
            m->slow_scale[c] = sc(m->t, m->slow[c]) - base;
            m->fast_scale[c] = sc(m->t, m->fast[c]) - base;
            total += (uint64_t)m->slow[c];
        }
        m->column_level = floored((int64_t)total, (int64_t)columns) + 1;
    }
    return finish_range(r);
}

static int decode_mixed(coded *c, int32_t *result) {
    alphabet *a = take(c->m, 1, sizeof *a);
    prediction *p = take_zeros(c->m, 1, sizeof *p);
    model *m = take_zeros(c->m, 1, sizeof *m);
    if (!a || !p || !m) return c->m->error;
    TRY(take_side(c));
    side *s = c->side;
    TRY(take_alphabet(s, a));
    CHECK(!a->is_split && a->size >= 2, SIDE);
    const int is_transposed = (int)number_to(s, 5, 1);
    const uint32_t zero = number_to(s, 23, a->size - 1), low = number_to(s, 8, 3);
    m->t = c->f->tables;
    m->scale = number_to(s, 6, SCALES - 1);
    m->prior = m->t->prior[number_to(s, 7, 2)];
    m->row_count = (int64_t)1 << number_to(s, 9, 12);
    m->column_count = (int64_t)1 << number_to(s, 9, 12);
    m->size = ((a->size - 1) >> low) + 1;
    CHECK(!s->failed && m->size >= 2 && m->size <= MOST_MIXED, SIDE);
    const size_t rows = (size_t)(is_transposed ? c->s->columns : c->s->rows), n = (size_t)(c->s->rows * c->s->columns);
    const size_t columns = n / rows, height = (size_t)chunk_rows(columns), chunks = (size_t)ceiling(rows, height);
    TRY(take_prediction(c, rows, columns, p));
    TRY(check_range(c->s, a->v[0], a->v[a->size - 1]));
    size_t *ends = take(c->m, chunks, sizeof *ends), end = 0;
    uint8_t *parity = take(c->m, a->size, 1);
    if (!ends || !parity) return c->m->error;
    for (size_t i = 0; i < chunks; i++) {
        uint64_t words = number(s, 21);
        CHECK(words <= c->size / 4 - end, CHUNK);
        ends[i] = end += (size_t)words;
    }
    TRY(finish_side(s));
    TRY(machine_of(p->kind || is_transposed || low ? 1 : c->s->states, &m->paths));
    m->zero = (p->kind ? a->size / 2 : zero) >> low;
    for (uint32_t i = 0; i < a->size; i++) parity[i] = (uint8_t)((uint32_t)a->v[i] & 1);
    m->parity = parity;
    TRY(make_model(c->m, m));
    int32_t *out = is_transposed ? take(c->m, n, sizeof *out) : result;
    if (!out) return c->m->error;
    for (size_t i = 0, begin = 0; i < chunks; begin = ends[i++]) {
        block *mark = c->m->top;
        range r;
        open_range(&r, c->data + 4 * begin, ends[i] - begin);
        size_t some = (size_t)smaller(height, rows - i * height);
        TRY(decode_mixed_chunk(c->m, m, &r, some, columns, out + i * height * columns));
        release(c->m, mark);
    }
    if (low) {
        const stream bits = {c->s->rows, c->s->columns, 0, 65535, 1};
        coded rest = {.f = c->f, .m = c->m, .s = &bits, .data = c->data + 4 * end, .size = c->size - 4 * end};
        int32_t *more = take(c->m, n, sizeof *more);
        if (!more) return c->m->error;
        TRY(decode_packed(&rest, n, more));
        for (size_t i = 0; i < n; i++) {
            out[i] = out[i] << low | more[i];
            CHECK(out[i] < (int32_t)a->size, RANGE);
        }
    } else {
        CHECK(4 * end == c->size, CHUNK);
    }
    TRY(add_prediction(c, p, rows, columns, zero, a->size, out));
    for (size_t i = 0; i < n; i++) out[i] = a->v[out[i]];
    if (is_transposed) transpose(out, columns, rows, result);
    return 0;
}

/* ---- Coder 6: tiles ---- */

enum { LANES = 32 };

typedef struct tiles { /* what all tiles of an array share */
    const uint16_t *words;
    const uint32_t *slots; /* frequency - 1: 12 bits, symbol: 8, offset in the symbol: 12 */
    const int32_t *v;      /* 256, of symbols */
    const uint8_t *class;  /* of each row */
    uint8_t *is_seen;      /* of each row: 1 if it has a value that is not 0 */
    machine paths;
    uint32_t left_out;     /* class of rows without words */
    int raw, is_paired, is_listed, are_halves;
    size_t columns, restart;
} tiles;

typedef struct lanes { /* of a tile: states, 4,096 where an odd state has another table, what was taken */
    uint32_t x[LANES], above[LANES], taken[LANES];
} lanes;

/* Take a row: symbols and raw bits of all lanes. Return the position after the words that they took. */
APART static size_t take_lanes(const uint16_t *words, size_t at, const uint32_t *slots, lanes *l, size_t width,
                                uint32_t raw, uint32_t least) {
    const uint16_t *w = words + at;
    for (size_t k = 0; k < width; k++) {
        const uint32_t x = l->x[k], one = slots[(x & 4095) | l->above[k]];
        const uint32_t next = ((one >> 20) + 1) * (x >> 12) + (one & 4095);
        const uint32_t rest = next >> raw, need = rest < least; /* a coin toss: no branch */
        l->taken[k] = (one & ~(uint32_t)4095) | (next & ((1u << raw) - 1));
        l->x[k] = rest << 16 * need | (*w & (0 - need));
        w += need;
    }
    return (size_t)(w - words);
}

/* Decode a tile at a row and column, of words at ... end. Loops over lanes are either that over states, or one of known
 * length, which compilers turn into vector instructions. */
static int decode_tile(const tiles *t, size_t row, size_t rows, size_t column, size_t at, size_t end, size_t tail,
                       uint32_t last_state, int32_t *out) {
    const size_t width = (size_t)smaller(t->columns - column, LANES), size = 4096u << t->is_paired;
    const uint32_t raw = (uint32_t)t->raw, low_bits = (1u << raw) - 1, shift = t->paths.shift, flip = t->paths.flip;
    const uint32_t odd = t->is_paired ? 4096 : 0, low = (uint32_t)t->v[0];
    const uint16_t *w = t->words;
    lanes l = {{0}, {0}, {0}};
    uint32_t path[LANES] = {0}, v[LANES], *x = l.x, *above = l.above, *taken = l.taken;
    CHECK(end - at >= 2 * width, CHUNK);
    for (size_t k = 0; k < width; k++, at += 2) x[k] = (uint32_t)w[at] << 16 | w[at + 1];
    for (size_t r = row; r < row + rows; r++) {
        const uint32_t *slots = t->slots + t->class[r] * size;
        const uint32_t least = r + tail < row + rows ? 65536 : 0;
        CHECK(at <= end, CHUNK);
        if ((r - row) % t->restart == 0)
            for (size_t k = 0; k < LANES; k++) path[k] = above[k] = 0;
        if (t->class[r] == t->left_out) {
            for (size_t k = 0; k < LANES; k++) v[k] = 0;
        } else {
            at = take_lanes(w, at, slots, &l, width, raw, least);
            if (t->is_listed)
                for (size_t k = 0; k < LANES; k++) v[k] = (uint32_t)t->v[taken[k] >> 12 & 255];
            else
                for (size_t k = 0; k < LANES; k++)
                    v[k] = low + ((taken[k] >> 12 & 255) << raw) + (taken[k] & low_bits);
        }
        uint32_t some = 0;
        for (size_t k = 0; k < width; k++) some |= v[k];
        if (some) t->is_seen[r] = 1;
        for (size_t k = 0; k < LANES; k++) {
            const uint32_t one = t->are_halves ? 2 * v[k] + (path[k] & 1) : v[k];
            path[k] = path[k] >> 1 ^ ((0 - (path[k] & 1)) & shift) ^ ((0 - (v[k] & 1)) & flip);
            above[k] = (0 - (path[k] & 1)) & odd;
            v[k] = one;
        }
        memcpy(out + r * t->columns + column, v, width * sizeof *v);
    }
    CHECK(at == end, CHUNK);
    for (size_t k = 0; k < width; k++) CHECK(x[k] == last_state, CHUNK);
    return 0;
}

static int decode_tiles(coded *c, int32_t *result) {
    alphabet *a = take(c->m, 1, sizeof *a);
    table_room *room = take(c->m, 1, sizeof *room);
    int32_t *v = take_zeros(c->m, 256, sizeof *v);
    tiles t = {.v = v};
    if (!a || !room || !v) return c->m->error;
    TRY(take_side(c));
    side *s = c->side;
    TRY(take_alphabet(s, a));
    t.raw = (int)number_to(s, 83, 4);
    const uint32_t size = a->size >> t.raw;
    const int64_t span = (int64_t)a->v[a->size - 1] - a->v[0];
    CHECK(!a->is_split && size <= 256 && size << t.raw == a->size && span < 1 << 20, SIDE);
    CHECK(!t.raw || (a->is_affine && span == (int64_t)a->size - 1), SIDE);
    const int is_plain = c->s->states == 1 || c->s->states == -1, is_transposed = (int)number_to(s, 5, is_plain);
    const size_t rows = (size_t)(is_transposed ? c->s->columns : c->s->rows), n = (size_t)(c->s->rows * c->s->columns);
    const size_t columns = n / rows, restart = (size_t)chunk_rows(columns);
    /* About a thousand rows, a multiple of `restart`: the nearest, the even one of two. */
    const size_t quotient = BIRDIE_TILE / restart, twice = 2 * (BIRDIE_TILE % restart);
    const size_t tall = restart * (size_t)larger(1, quotient + (twice > restart || (twice == restart && quotient % 2)));
    const size_t across = (size_t)ceiling(columns, LANES), count = (size_t)ceiling(rows, tall) * across;
    CHECK(!s->failed && columns >= LANES && columns * (count / across) <= c->size / 4, SIDE);
    const uint32_t form = number_to(s, 7, c->s->states > 1 ? 62 : 30), classes = (form & 31) + 1;
    const uint32_t leaves_out = number_to(s, 80, 1);
    int has_zero = 0;
    for (uint32_t i = 0; i < a->size; i++) has_zero |= !a->v[i];
    CHECK(!s->failed && c->s->states >= -1 && classes <= 31 && (!leaves_out || has_zero), SIDE);
    t.is_paired = form > 31;
    t.left_out = classes;
    t.columns = columns;
    t.restart = restart;
    t.are_halves = c->has_halves = c->halves && !is_transposed && a->v[0] > -(1 << 30) && a->v[a->size - 1] < 1 << 30;
    TRY(machine_of(t.is_paired || c->halves ? c->s->states : 1, &t.paths));
    uint8_t *class = take(c->m, rows, 1);
    uint32_t tables = classes << t.is_paired, *slots = take(c->m, (uint64_t)tables << 12, sizeof *slots);
    size_t *ends = take(c->m, count, sizeof *ends), end = 0;
    uint8_t *tails = take(c->m, 2 * (uint64_t)count, 1), *starts = tails + count;
    t.is_seen = take_zeros(c->m, rows, 1);
    if (!class || !slots || !ends || !tails || !t.is_seen) return c->m->error;
    t.class = class;
    t.slots = slots;
    TRY(take_classes(s, rows, classes + leaves_out, class));
    for (; tables; tables--) {
        TRY(take_table(s, size, 12, room));
        for (uint32_t symbol = 0; symbol < size; symbol++)
            for (uint32_t i = 0; i < room->frequency[symbol]; i++)
                *slots++ = (uint32_t)(room->frequency[symbol] - 1) << 20 | symbol << 12 | i;
    }
    int64_t length = 0;
    for (size_t i = 0; i < count; i++) {
        length = i ? length + signed_number(s, 57) : (int64_t)number(s, 21);
        CHECK(length >= 0 && (uint64_t)length <= c->size / 2 - end, CHUNK);
        ends[i] = end += (size_t)length;
    }
    for (size_t i = 0; i < count; i++) tails[i] = (uint8_t)number_to(s, 81, 255);
    for (size_t i = 0; i < count; i++) {
        starts[i] = (uint8_t)number_to(s, 82, 16);
        CHECK(starts[i], SIDE);
    }
    TRY(finish_side(s));
    TRY(check_range(c->s, a->v[0], a->v[a->size - 1]));
    CHECK(2 * end == c->size, CHUNK);
    for (uint32_t i = 0; i < size; i++) v[i] = a->v[i << t.raw];
    for (uint32_t i = 1; i < size; i++) t.is_listed |= v[i] - v[i - 1] != 1 << t.raw;
    int32_t *out = is_transposed ? take(c->m, n, sizeof *out) : result;
    if (!out || !(t.words = copy_words(c, end))) return c->m->error;
    for (size_t i = 0, begin = 0; i < count; begin = ends[i++]) {
        size_t row = i / across * tall;
        TRY(decode_tile(&t, row, (size_t)smaller(tall, rows - row), i % across * LANES, begin, ends[i], tails[i],
                        1u << starts[i], out));
    }
    for (size_t row = 0; row < rows; row++) CHECK(t.is_seen[row] || class[row] == classes, CHUNK);
    if (is_transposed) transpose(out, columns, rows, result);
    return 0;
}

/* ---- A stream ---- */

static int read_stream(reader *r, values *out) {
    const stream *s = &r->plan->streams[r->next];
    const uint8_t coder = r->e->coder[r->next];
    coded c = {.f = r->f, .m = r->m, .s = s, .data = r->payload, .size = (size_t)r->e->length[r->next]};
    c.halves = r->halves;
    r->halves = NULL;
    r->payload += c.size;
    r->next++;
    const uint64_t count = s->rows * s->columns;
    const size_t n = (size_t)count;
    int32_t *v = take(r->m, coder ? count : 1, sizeof *v);
    if (!v) return r->m->error;
    *out = (values){v, coder != 0};
    if (!coder) return decode_constant(&c, v);
    CHECK(n, PAYLOAD);
    block *mark = r->m->top;
    switch (coder) {
    case BYTES: TRY(decode_bytes(&c, n, v)); break;
    case PACKED: TRY(decode_packed(&c, n, v)); break;
    case NUMBERS: TRY(decode_numbers(&c, n, v)); break;
    case STATIC: TRY(decode_static(&c, v)); break;
    case MIXED: TRY(decode_mixed(&c, v)); break;
    case TILES: TRY(decode_tiles(&c, v)); break;
    default: FAIL(CODER);
    }
    r->has_halves = c.has_halves;
    release(r->m, mark);
    return 0;
}


#ifndef BIRDIE_SMALL
/* ---- Deltas ---- */

enum { WAYS = 8, MOST_DELTA_SCALE = 640, SIGN_COUNTERS = 2 + 64 + 64 + 4096 + 54 + 192 + 4096 + 32 };

/* Where the counters of each context begin. */
static const int32_t delta_starts[WAYS + 1] = {0, 64, 256, 448, 736, 832, 1120, 1888, 2272};
static const int32_t sign_starts[WAYS] = {0, 2, 66, 130, 4226, 4280, 4472, 8568};

typedef struct delta { /* nodes: (up, t), (down, t), t < bits, (first, k), (second, k, bit), k <= bits */
    const struct tables *t;
    int64_t scale, middle, mean;
    int bits, exponent, mantissa; /* of a word; exponent bits of a float with a sign bit, else 0 */
    int nodes;
    uint32_t *first, *counters, *signs;
    mixer *mixers; /* of each node, and of signs */
    struct {
        int64_t sum, last, bias, sign;
    } *columns;
} delta;

/* The mass of differences above 2^(d / 16) means: S(d). */
static int64_t survival(const delta *d, int64_t x) {
    const int32_t *laplace = d->t->prior[2];
    const int64_t all = laplace[4096] - laplace[2048];
    if (x < -128) return all;
    return larger(1, (uint64_t)(laplace[4096] - laplace[hold(2048 + d->t->power[hold(x + 128, 0, 255)], 0, 4096)]));
}

static int make_delta(memory *m, delta *d) {
    d->nodes = 5 * d->bits + 3;
    const uint64_t count = (uint64_t)delta_starts[WAYS] * (uint64_t)d->nodes;
    uint32_t *next = d->first = take(m, count, sizeof *next);
    d->counters = take(m, count, sizeof *next);
    d->signs = take(m, SIGN_COUNTERS, sizeof *next);
    d->mixers = take(m, (uint64_t)d->nodes + 1, sizeof *d->mixers);
    if (!next || !d->counters || !d->signs || !d->mixers) return m->error;
    for (int context = 0; context < WAYS; context++) {
        for (int64_t i = 0; i < delta_starts[context + 1] - delta_starts[context]; i++) {
            const int64_t means[WAYS] = {d->scale - 16 * (i - 16), 4 * i, 4 * i, 8 * i / 3,
                                         8 * i, 8 * i / 3, 8 * (i / 8), 16 * (i / 8)};
            const int64_t a = means[context] - (context ? 160 : 0);
            int64_t longer[66] = {survival(d, INT32_MIN), survival(d, -16 - a)}; /* longer(a, t) is at t + 1 */
            for (int t = 1; t <= d->bits; t++) longer[t + 1] = survival(d, 16 * t - a);
            for (int t = 0; t < d->nodes; t++) next[t] = 1u << 31 | 3;
            for (int t = 0; t < d->bits; t++) {
                const int64_t up = (longer[t + 1] << 22) / longer[t], all = longer[0] - longer[t + 2];
                const int64_t down = ((longer[t + 1] - longer[t + 2]) << 22) / (all > 0 ? all : 1);
                next[t] = (uint32_t)hold(up, 1 << 12, (1 << 22) - (1 << 12)) << 10 | 3;
                next[d->bits + t] = (uint32_t)hold(down, 1 << 12, (1 << 22) - (1 << 12)) << 10 | 3;
            }
            next += d->nodes;
        }
    }
    d->mean = (int64_t)larger(1, ((uint64_t)d->t->power[320 + d->scale % 16] << d->scale / 16) >> 20);
    return 0;
}

static int delta_bit(const delta *d, range *r, mixer *by, uint32_t *const counter[WAYS], int32_t rate) {
    int32_t logit[WAYS];
    for (int i = 0; i < WAYS; i++) logit[i] = d->t->stretch[*counter[i] >> 20];
    const int32_t odds = d->t->squash[mixed(by, logit) + 2048], bit = range_bit(r, (uint32_t)hold(odds, 8, 65528));
    train(by, logit, ((65536 * bit - odds) * rate) >> 4);
    for (int i = 0; i < WAYS; i++) *counter[i] = learn(d->t->adaptation, *counter[i], bit);
    return bit;
}

/* Decide at a node, in the contexts whose counters begin at `start`. */
static int delta_node(const delta *d, range *r, const int64_t start[WAYS], int node, int32_t rate) {
    uint32_t *counter[WAYS];
    for (int i = 0; i < WAYS; i++) counter[i] = d->counters + start[i] * d->nodes + node;
    return delta_bit(d, r, &d->mixers[node], counter, rate);
}

static uint64_t word_at(const void *words, int bits, size_t i) {
    const uint8_t *p = (const uint8_t *)words + i * (size_t)(bits / 8);
    uint64_t word = 0;
    memcpy(&word, p, (size_t)(bits / 8)); /* of a little-endian machine */
    return word;
}

/* Decode a chunk: words from those of the base. */
static int decode_delta_chunk(const delta *d, range *r, size_t rows, size_t columns, const char *base, char *out) {
    const uint64_t count = (uint64_t)delta_starts[WAYS] * (uint64_t)d->nodes, most = (uint64_t)1 << 40;
    const uint64_t top = (uint64_t)1 << (d->bits - 1), all = top | (top - 1);
    int64_t total = 8 * d->mean, total_count = 8, n = 0;
    memcpy(d->counters, d->first, (size_t)count * sizeof *d->counters);
    for (int i = 0; i < SIGN_COUNTERS; i++) d->signs[i] = 1u << 31;
    for (int i = 0; i <= d->nodes; i++)
        for (int k = 0; k < WAYS; k++) d->mixers[i].w[k] = 12000;
    memset(d->columns, 0, columns * sizeof *d->columns);
    for (size_t row = 0, at = 0; row < rows; row++) {
        const int64_t usual = total / total_count + 1;
        int64_t row_sum = 8 * usual, row_count = 8, left = usual, left2 = usual;
        int64_t left_k = 0, sign1 = 0, sign2 = 0, row_bias = 0, agreement = 0, rank = 0;
        for (size_t c = 0; c < columns; c++, at++) {
            const uint64_t word = word_at(base, d->bits, at);
            const uint64_t magnitude = d->exponent ? word & (top - 1) : word;
            const uint64_t s = d->exponent ? word >> (d->bits - 1) : 0;
            const int64_t e = d->exponent ? (int64_t)larger(1, magnitude >> d->mantissa) : 1;
            const int64_t shift = hold(e - d->middle + 16, 0, 40), unit = 16 * shift;
            const int64_t by_row = lg(d->t, row_sum) - lg(d->t, row_count);
            const int64_t by_column = lg(d->t, d->columns[c].sum + 8 * usual) - lg(d->t, n + 8);
            const int64_t both = by_row + by_column - lg(d->t, usual) - unit;
            const int64_t around = 2 * left + left2 + 2 * d->columns[c].last;
            const int64_t near = lg(d->t, (13 * around >> 6) + (usual >> 3) + 1) - unit;
            const int64_t every = floored(3 * both + 2 * near, 5);
            const int64_t deep = hold(e - d->middle + 32, 0, 63), half = hold((both + 160) >> 3, 0, 95);
            int64_t start[WAYS] = {deep, hold((by_row - unit + 160) >> 2, 0, 191),
                                   hold((by_column - unit + 160) >> 2, 0, 191),
                                   hold(3 * (both + 160) >> 3, 0, 287), hold((near + 160) >> 3, 0, 95),
                                   hold(3 * (every + 160) >> 3, 0, 287), 8 * half + hold(left_k, 0, 7),
                                   8 * (half >> 1) + hold((deep - 8) >> 2, 0, 7)};
            for (int i = 0; i < WAYS; i++) start[i] += delta_starts[i];
            const int32_t rate = (int32_t)hold(24 - (int64_t)(at / 8000), 6, 24);
            /* 1. the bit length, from the expected one up or down */
            int t = (int)hold((both + 8) >> 4, 0, d->bits - 1), is_above = delta_node(d, r, start, t, rate);
            if (is_above) {
                while (is_above && t < d->bits - 1) is_above = delta_node(d, r, start, ++t, rate);
            } else {
                while (!is_above && t > 0) is_above = delta_node(d, r, start, d->bits + --t, rate);
            }
            const int k = is_above ? t + 1 : t, first = 2 * d->bits, second = first + d->bits + 1;
            uint64_t size = k > 0, is_negative = 0;
            /* 2. two bits below the leading one */
            if (k > 1) size = 2 + (uint64_t)delta_node(d, r, start, first + k, rate);
            if (k > 2) size = 2 * size + (uint64_t)delta_node(d, r, start, second + 2 * k + (int)(size & 1), rate);
            if (k) { /* 3. the sign */
                const int64_t row_part = (row_bias + 4096) >> 7, column_part = (d->columns[c].bias + 4096) >> 7;
                const int64_t sign = d->columns[c].sign;
                const int64_t index[WAYS] = {(int64_t)s, row_part, column_part, 64 * row_part + column_part,
                                             18 * (sign + 1) + 6 * (sign1 + 1) + 2 * (sign2 + 1) + (int64_t)s,
                                             3 * ((agreement + 4096) >> 7) + sign + 1,
                                             64 * ((rank + 4096) >> 7) + column_part,
                                             2 * hold(k, 0, 15) + (int64_t)s};
                uint32_t *counter[WAYS];
                for (int i = 0; i < WAYS; i++) counter[i] = d->signs + sign_starts[i] + index[i];
                is_negative = (uint64_t)delta_bit(d, r, &d->mixers[d->nodes], counter, rate);
            }
            for (int rest = k - 3, some; rest > 0; rest -= some) { /* 4. the others, plain */
                some = rest < 16 ? rest : 16;
                r->width >>= some;
                const uint64_t part = smaller(r->code / r->width, ((uint64_t)1 << some) - 1);
                r->code -= part * r->width;
                size = size << some | part;
                refill(r);
            }
            uint64_t value = (s ? ~magnitude : magnitude) + (is_negative ? 0 - size : size);
            value = d->exponent && value & top ? top | (~value & all) : value & all;
            memcpy(out + at * (size_t)(d->bits / 8), &value, (size_t)(d->bits / 8));
            const int64_t change = (int64_t)smaller(smaller(size, most >> shift) << shift, most);
            row_sum += change;
            total += change;
            d->columns[c].sum += change;
            if (++row_count == 4096) row_sum = (row_sum >> 1) + 1, row_count >>= 1;
            if (++total_count == 1 << 18) total = (total >> 1) + 1, total_count >>= 1;
            d->columns[c].last = change;
            left2 = left;
            left = change;
            left_k = k;
            if (!k) continue;
            const int64_t sign = is_negative ? -1 : 1;
            row_bias += (4095 * sign - row_bias) >> 5;
            agreement += (4095 * sign * d->columns[c].sign - agreement) >> 5;
            rank += (4095 * (d->columns[c].bias >= 0 ? sign : -sign) - rank) >> 5;
            d->columns[c].bias += (4095 * sign - d->columns[c].bias) >> 4;
            sign2 = sign1;
            sign1 = d->columns[c].sign = sign;
        }
        if (++n < 256) continue;
        n >>= 1;
        for (size_t c = 0; c < columns; c++) d->columns[c].sum >>= 1;
    }
    return finish_range(r);
}

/* Decode the bytes of a delta, given the words of the base. */
static int decode_difference(reader *r, const tensor *t, const uint8_t *data, size_t size, const char *base,
                             char *out) {
    const size_t rows = (size_t)t->rows, columns = (size_t)t->columns * dtypes[t->dtype].words;
    const size_t height = (size_t)chunk_rows(columns), chunks = (size_t)ceiling(rows, height);
    coded c = {.f = r->f, .m = r->m, .data = data, .size = size};
    delta d = {.t = r->f->tables, .bits = 8 * dtypes[t->dtype].bytes, .mantissa = dtypes[t->dtype].mantissa};
    d.exponent = d.mantissa ? d.bits - 1 - d.mantissa : 0;
    TRY(take_side(&c));
    d.middle = number_to(c.side, 6, 2047);
    d.scale = number_to(c.side, 7, MOST_DELTA_SCALE);
    size_t *ends = take(r->m, chunks, sizeof *ends), end = 0;
    if (!ends) return r->m->error;
    for (size_t i = 0; i < chunks; i++) {
        const uint64_t words = number(c.side, 21);
        CHECK(words <= c.size / 4 - end, CHUNK);
        ends[i] = end += (size_t)words;
    }
    TRY(finish_side(c.side));
    CHECK(4 * end == c.size, CHUNK);
    TRY(make_delta(r->m, &d));
    if (!(d.columns = take(r->m, columns, sizeof *d.columns))) return r->m->error;
    for (size_t i = 0, begin = 0; i < chunks; begin = ends[i++]) {
        const size_t at = i * height * columns * (size_t)(d.bits / 8);
        range words;
        open_range(&words, c.data + 4 * begin, ends[i] - begin);
        TRY(decode_delta_chunk(&d, &words, (size_t)smaller(height, rows - i * height), columns, base + at, out + at));
    }
    return 0;
}

enum { SAME, CODED, NEAR };

/* Take the inner tensors of a delta: one of its shape, or two factors, whose shapes are left in `shapes`. */
static int take_near(const tensor *t, uint64_t shapes[2][2], inner in[2]) {
    CHECK(is_real(t->dtype) && count_of(t) && t->parameters >= 3, PARAMETERS);
    const int64_t *v = t->parameter + 3;
    const uint64_t rank = (uint64_t)t->parameter[2];
    uint64_t left = t->parameters - 3;
    CHECK(rank <= smaller(t->rows, t->columns), PARAMETERS);
    shapes[0][0] = shapes[1][0] = rank;
    shapes[0][1] = t->rows;
    shapes[1][1] = t->columns;
    if (!rank) TRY(take_inner(&v, &left, t->dimensions, t->shape, 0, &in[0]));
    for (int i = 0; i < 2 && rank; i++) TRY(take_inner(&v, &left, 2, shapes[i], 0, &in[i]));
    CHECK(!left, PARAMETERS);
    return 0;
}

static int plan_delta(plan *p, const tensor *t) {
    const int64_t *v = t->parameter;
    uint64_t shapes[2][2];
    inner in[2];
    CHECK(t->parameters >= 2 && v[1] >= SAME && v[1] <= NEAR, PARAMETERS);
    if (v[1] == NEAR) {
        TRY(take_near(t, shapes, in));
        spend(p, count_of(t), 4 + 4 * shapes[0][0]);
        for (int i = 0; i < (shapes[0][0] ? 2 : 1); i++) TRY(in[i].by->plan(p, &in[i].t));
        return 0;
    }
    spend(p, count_of(t), v[1] == SAME ? 1 : 1200u * dtypes[t->dtype].words);
    CHECK(t->parameters == (v[1] == SAME ? 2 : 3), PARAMETERS);
    if (v[1] == SAME) return 0;
    CHECK(count_of(t) && v[2] > 0 && v[2] < (int64_t)1 << 40, PARAMETERS);
    return add_stream(p, 1, (uint64_t)v[2], 8, 1);
}

/* BLAKE2b (RFC 7693) of 8 bytes of a dtype's name and words. */
static uint64_t rotated(uint64_t v, int n) { return v >> n | v << (64 - n); }

static void blake_block(uint64_t h[8], const uint8_t *data, uint64_t total, int is_last) {
    static const uint8_t sigma[10][16] = {
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
        {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
        {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
        {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
        {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};
    static const uint64_t start[8] = {0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1,
                                      0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179};
    uint64_t v[16], m[16];
    for (int i = 0; i < 16; i++) m[i] = little32(data + 8 * i) | (uint64_t)little32(data + 8 * i + 4) << 32;
    if (!total) { /* the first call makes the first state */
        for (int i = 0; i < 8; i++) h[i] = start[i];
        h[0] ^= 0x01010008;
        return;
    }
    for (int i = 0; i < 8; i++) v[i] = h[i], v[i + 8] = start[i];
    v[12] ^= total;
    if (is_last) v[14] = ~v[14];
    for (int round = 0; round < 12; round++) {
        const uint8_t *s = sigma[round % 10];
        for (int i = 0; i < 8; i++) {
            const int q = i & 3, a = q, b = 4 + (q + (i > 3 ? 1 : 0)) % 4;
            const int c = 8 + (q + (i > 3 ? 2 : 0)) % 4, e = 12 + (q + (i > 3 ? 3 : 0)) % 4;
            v[a] += v[b] + m[s[2 * i]];
            v[e] = rotated(v[e] ^ v[a], 32);
            v[c] += v[e];
            v[b] = rotated(v[b] ^ v[c], 24);
            v[a] += v[b] + m[s[2 * i + 1]];
            v[e] = rotated(v[e] ^ v[a], 16);
            v[c] += v[e];
            v[b] = rotated(v[b] ^ v[c], 63);
        }
    }
    for (int i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
}

static uint64_t digest(int dtype, const char *words, uint64_t size) {
    const char *name = dtypes[dtype].name;
    uint64_t h[8], total = 0, at = 0;
    uint8_t data[128] = {'t', 'o', 'r', 'c', 'h', '.'};
    uint64_t filled = 6;
    blake_block(h, data, 0, 0);
    while (*name) data[filled++] = (uint8_t)*name++;
    for (;;) {
        const uint64_t some = smaller(128 - filled, size - at);
        memcpy(data + filled, words + at, (size_t)some);
        memset(data + filled + some, 0, (size_t)(128 - filled - some));
        at += some;
        total += filled + some;
        blake_block(h, data, total, at == size);
        if (at == size) return h[0];
        filled = 0;
    }
}

/* Decode a delta, given the words of the base. */
static int decode_delta(reader *r, const tensor *t, const char *base, char *out) {
    const uint64_t count = count_of(t), size = count * element_size(t->dtype), columns = t->columns;
    CHECK(digest(t->dtype, base, size) == (uint64_t)t->parameter[0], WRONG_BASE);
    if (t->parameter[1] == SAME) {
        if (size) memcpy(out, base, (size_t)size);
        return 0;
    }
    if (t->parameter[1] == CODED) {
        const size_t n = (size_t)t->parameter[2];
        uint8_t *data = take(r->m, n, 1);
        values v;
        if (!data) return r->m->error;
        TRY(read_stream(r, &v));
        for (size_t i = 0; i < n; i++) data[i] = (uint8_t)value_at(v, i);
        TRY(decode_difference(r, t, data, n, base, out));
        for (uint64_t i = 0; t->dtype == BIRDIE_BOOL && i < size; i++) CHECK((uint8_t)out[i] <= 1, RANGE);
        return 0;
    }
    uint64_t shapes[2][2];
    float *added[2] = {NULL, NULL};
    inner in[2];
    double x[BLOCK];
    TRY(take_near(t, shapes, in));
    const uint64_t rank = shapes[0][0];
    for (int i = 0; i < (rank ? 2 : 1); i++) TRY(decode_inner(r, &in[i], &added[i]));
    for (uint64_t row = 0, at = 0; row < t->rows; row++) {
        for (uint64_t c = 0, n; c < columns; c += n, at += n) {
            n = smaller(columns - c, BLOCK);
            load_doubles(t->dtype, base + at * element_size(t->dtype), (size_t)n, x);
            for (uint64_t i = 0; i < n && !rank; i++) x[i] += added[0][at + i];
            for (uint64_t k = 0; k < rank; k++) {
                const double factor = added[0][k * t->rows + row];
                const float *line = added[1] + k * columns + c;
                for (uint64_t i = 0; i < n; i++) x[i] += factor * line[i];
            }
            store_doubles(t->dtype, x, n, out + at * element_size(t->dtype));
        }
    }
    return 0;
}
#else
static int plan_delta(plan *p, const tensor *t) {
    (void)p, (void)t;
    FAIL(SCHEME);
}
static int decode_delta(reader *r, const tensor *t, const char *base, char *out) {
    (void)r, (void)t, (void)base, (void)out;
    FAIL(SCHEME);
}
#endif

/* ==== Arrays ==== */

/* Plan an entry, a tensor or delta or a block of one. */
static int plan_entry(const entry *e, plan *p, tensor *t) {
    /* Most operations of a value of each coder. */
    static const uint16_t costs[CODERS] = {0, 1, 64, 128, 64, 800, 64};
    *p = (plan){.count = 0};
    CHECK(e->dtype < DTYPES, DTYPE);
    *t = tensor_of(e->dtype, e->dimensions, e->shape, e->parameter, e->parameters);
    if (e->kind == DELTA) {
        TRY(plan_delta(p, t));
    } else {
        CHECK(e->kind == TENSOR && e->scheme < OWN_SCHEMES && schemes[e->scheme].plan, SCHEME);
        TRY(schemes[e->scheme].plan(p, t));
    }
    CHECK(p->count == e->streams, STREAMS);
    for (int i = 0; i < p->count; i++) {
        CHECK(e->coder[i] < CODERS, CODER);
        spend(p, p->streams[i].rows * p->streams[i].columns, costs[e->coder[i]]);
    }
    return 0;
}

/* Decode an entry; of a delta `base` has the words. */
static int decode_entry(const file *f, memory *m, const entry *e, const void *base, void *out) {
    block *mark = m->top;
    tensor t;
    plan *p = take(m, 1, sizeof *p);
    if (!p) return m->error;
    TRY(plan_entry(e, p, &t));
    reader r = {.f = f, .m = m, .e = e, .plan = p, .payload = f->data + e->offset};
    CHECK(!e->payload || crc32(f, 0, r.payload, (size_t)e->payload) == e->crc, CHECKSUM);
    TRY(e->kind == DELTA ? decode_delta(&r, &t, base, out) : schemes[e->scheme].decode(&r, &t, out));
    release(m, mark);
    return 0;
}

static int is_planes(const file *f, uint32_t i) {
    return f->entries[i].kind == BLOCKS && f->entries[block_of(f, i, 0)].dtype != f->entries[i].dtype;
}

/* Return how many blocks of an array are deltas. */
static uint32_t count_deltas(const file *f, uint32_t i) {
    uint32_t count = 0;
    for (uint32_t index = 0, k; (k = block_of(f, i, index)) != NONE; index++) count += f->entries[k].kind == DELTA;
    return count;
}

/* Describe an array: what decoding it takes. */
static int describe(const file *f, uint32_t array, birdie_array *out) {
    const uint32_t i = f->arrays[array];
    const entry *e = &f->entries[i];
    plan p;
    tensor t;
    CHECK(e->dtype < DTYPES, DTYPE);
    *out = (birdie_array){.dtype = e->dtype, .elements = e->elements, .entry = i};
    out->bytes = e->elements * element_size(e->dtype);
    for (uint32_t index = 0, k; (k = block_of(f, i, index)) != NONE; index++) {
        TRY(plan_entry(&f->entries[k], &p, &t));
        out->payload += f->entries[k].payload;
        out->operations = smaller(out->operations + 150000 + p.operations, (uint64_t)1 << 62);
        out->parts++;
    }
    if (count_deltas(f, i)) { /* whose base is decoded too, and is no delta */
        birdie_array base;
        CHECK(f->base && e->base != NONE && !is_planes(f, i), BASE);
        const file *b = f->base;
        const entry *other = &b->entries[e->base];
        CHECK(is_tensor(other) && other->elements == e->elements && !count_deltas(b, b->arrays[other->array]), BASE);
        CHECK(other->dtype == e->dtype || (other->dtype < DTYPES && is_real(other->dtype) && is_real(e->dtype)), BASE);
        TRY(describe(b, other->array, &base));
        out->operations = smaller(out->operations + base.operations, (uint64_t)1 << 62);
    }
    return 0;
}

/* Decode the tensor that an array is relative to, in the dtype of the array. */
static int decode_array(const file *f, memory *m, uint32_t array, void *out);

static int decode_base(const file *f, memory *m, const entry *e, char **out) {
    const entry *other = &f->base->entries[e->base]; /* as `describe` has checked */
    const entry *whole = &f->base->entries[f->base->arrays[other->array]];
    const size_t size = element_size(other->dtype);
    if (!(*out = take(m, e->elements, element_size(e->dtype)))) return m->error;
    block *mark = m->top;
    char *words = take(m, whole->elements, size);
    if (!words) return m->error;
    TRY(decode_array(f->base, m, other->array, words));
    words += other->position * other->elements * size;
    if (e->dtype == other->dtype) memcpy(*out, words, (size_t)e->elements * size);
    else convert(other->dtype, words, e->elements, e->dtype, *out);
    release(m, mark);
    return 0;
}

/* Decode an array to its own dtype. */
static int decode_array(const file *f, memory *m, uint32_t array, void *out) {
    const uint32_t i = f->arrays[array];
    const entry *e = &f->entries[i];
    block *mark = m->top;
    const int are_planes = is_planes(f, i), bytes = dtypes[e->dtype].bytes;
    char *base = NULL, *to = are_planes ? take(m, 2 * e->elements, (size_t)bytes) : out;
    if (!to && e->elements) return m->error;
    if (count_deltas(f, i)) TRY(decode_base(f, m, e, &base));
    uint64_t at = 0;
    for (uint32_t index = 0, k; (k = block_of(f, i, index)) != NONE; index++) {
        const entry *b = &f->entries[k];
        TRY(decode_entry(f, m, b, base ? base + at : NULL, to + at));
        at += b->elements * element_size(b->dtype);
    }
    if (are_planes) { /* real parts, then imaginary parts */
        for (uint64_t k = 0; k < 2 * e->elements; k++) {
            const uint64_t from = k / 2 + (k % 2 ? e->elements : 0);
            memcpy((char *)out + k * (uint64_t)bytes, to + from * (uint64_t)bytes, (size_t)bytes);
        }
    }
    release(m, mark);
    return 0;
}

static uint64_t most_bytes(const file *f) {
    return f->limits.max_bytes ? f->limits.max_bytes : larger((uint64_t)1 << 30, 64 * (uint64_t)f->size);
}

static int check_limits(const file *f, uint64_t bytes, uint64_t operations) {
    const uint64_t most = most_bytes(f), payload = f->size - f->header_bytes;
    const uint64_t allowed = larger((uint64_t)1 << 31, 2 * smaller(most, (uint64_t)1 << 60)) + 65536 * payload;
    CHECK(bytes <= most, TOO_MANY_BYTES);
    CHECK(operations <= (f->limits.max_operations ? f->limits.max_operations : allowed), TOO_MANY_OPERATIONS);
    return 0;
}

/* Decode `count` elements of an array, from element `first` on, to a dtype. */
static int decode_part(const file *f, uint32_t array, uint64_t first, uint64_t count, int dtype, void *out,
                       size_t size) {
    birdie_array a;
    TRY(describe(f, array, &a));
    TRY(check_limits(f, a.bytes, a.operations));
    if (dtype == BIRDIE_OWN) dtype = a.dtype;
    CHECK(dtype == a.dtype || (is_real(a.dtype) && is_real(dtype) && dtype != BIRDIE_FLOAT64), CONVERSION);
    const uint64_t own = element_size(a.dtype), one = element_size(dtype);
    CHECK(size == count * one, SIZE);
    CHECK(!size || (out && (uintptr_t)out % dtypes[dtype].bytes == 0), ARGUMENT);
    const uint64_t most = 16 * larger(a.bytes, smaller(f->limits.max_bytes, (uint64_t)1 << 56)) + (1 << 26);
    memory m = {f->m.by, most + 1024 * (uint64_t)(f->size - f->header_bytes), NULL, 0};
    if (f->limits.max_memory) m.left = f->limits.max_memory;
    char *to = out;
    if (count != a.elements || one < own) { /* elsewhere: all of a group, or wider words */
        if (!(to = take(&m, a.bytes, 1))) return m.error;
    } else if (size) {
        to += size - count * own; /* at the end of the output, which is filled from its beginning */
    }
    int error = decode_array(f, &m, array, to);
    if (!error && dtype != a.dtype) convert(a.dtype, to + first * own, count, dtype, out);
    else if (!error && to != out && size) memcpy(out, to + first * own, size);
    release(&m, NULL);
    return error;
}

/* ==== birdie.h ==== */

const char *birdie_error_text(int error) {
    switch (error) {
#define SENTENCE(name, number, text) \
    case number: return text;
        BIRDIE_ERRORS(SENTENCE)
#undef SENTENCE
    default: return "an unknown error";
    }
}

const char *birdie_dtype_name(int dtype) { return dtype >= 0 && dtype < DTYPES ? dtypes[dtype].name : NULL; }

size_t birdie_dtype_size(int dtype) { return dtype >= 0 && dtype < DTYPES ? element_size(dtype) : 0; }

#ifndef BIRDIE_NO_MALLOC
static void *default_alloc(void *opaque, size_t size) {
    (void)opaque;
    return malloc(size);
}

static void default_free(void *opaque, void *block) {
    (void)opaque;
    free(block);
}
#endif

int birdie_open(const void *data, size_t size, const birdie_options *options, birdie_file **out) {
    CHECK(out, ARGUMENT);
    *out = NULL;
    CHECK(data || !size, ARGUMENT);
    memory m = {.left = options && options->limits.max_memory ? options->limits.max_memory : UINT64_MAX};
    if (options) m.by = options->allocator;
    CHECK(!m.by.alloc == !m.by.free, ARGUMENT);
#ifndef BIRDIE_NO_MALLOC
    if (!m.by.alloc) m.by = (birdie_allocator){default_alloc, default_free, NULL};
#endif
    CHECK(m.by.alloc, ARGUMENT);
    file *f = take_zeros(&m, 1, sizeof *f);
    if (!f) return m.error;
    f->m = m;
    f->data = data;
    f->size = size;
    if (options) {
        f->limits = options->limits;
        f->base = options->base;
    }
    int error = open_file(f);
    if (error) birdie_close(f);
    else *out = f;
    return error;
}

void birdie_close(birdie_file *f) {
    if (!f) return;
    memory m = f->m; /* the file is a block of its own memory */
    release(&m, NULL);
}

const char *birdie_metadata(const birdie_file *f, size_t *size) {
    *size = f->metadata_size;
    return f->metadata;
}

int birdie_has_views(const birdie_file *f) { return f->has_views; }

size_t birdie_count(const birdie_file *f) { return f->tensor_count; }

int birdie_get(const birdie_file *f, size_t i, birdie_tensor *out) {
    CHECK(f && out && i < f->tensor_count, ARGUMENT);
    const entry *e = &f->entries[f->tensors[i]];
    *out = (birdie_tensor){.name = e->name, .name_size = e->name_size, .dtype = e->dtype, .dimensions = e->dimensions};
    if (e->dimensions) memcpy(out->shape, e->shape, e->dimensions * sizeof *e->shape);
    out->elements = e->elements;
    out->bytes = e->elements * birdie_dtype_size(e->dtype);
    out->array = e->array;
    out->first = e->position * e->elements;
    out->is_alias = e->kind == ALIAS;
    out->is_copy = e->is_copy;
    return 0;
}

size_t birdie_find(const birdie_file *f, const char *name, size_t name_size) {
    size_t low = 0, high = f->tensor_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const entry *e = &f->entries[f->tensors[middle]];
        int order = compare_names(e->name, e->name_size, name, name_size);
        if (!order) return middle;
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return f->tensor_count;
}

int birdie_decode(const birdie_file *f, size_t i, int dtype, void *out, size_t size) {
    birdie_tensor t;
    TRY(birdie_get(f, i, &t));
    return decode_part(f, (uint32_t)t.array, t.first, t.elements, dtype, out, size);
}

size_t birdie_array_count(const birdie_file *f) { return f->array_count; }

int birdie_array_get(const birdie_file *f, size_t array, birdie_array *out) {
    CHECK(f && out && array < f->array_count, ARGUMENT);
    return describe(f, (uint32_t)array, out);
}

int birdie_array_decode(const birdie_file *f, size_t array, int dtype, void *out, size_t size) {
    CHECK(f && array < f->array_count, ARGUMENT);
    return decode_part(f, (uint32_t)array, 0, f->entries[f->arrays[array]].elements, dtype, out, size);
}

int birdie_check(const birdie_file *f) {
    uint64_t bytes = 0, operations = 0;
    CHECK(f, ARGUMENT);
    for (uint32_t i = 0; i < f->array_count; i++) {
        birdie_array a;
        TRY(describe(f, i, &a));
        bytes = smaller(bytes + a.bytes, (uint64_t)1 << 62);
        operations = smaller(operations + a.operations, (uint64_t)1 << 62);
    }
    for (uint32_t i = 0; i < f->tensor_count; i++) {
        const entry *e = &f->entries[f->tensors[i]];
        if (e->is_copy) bytes = smaller(bytes + e->elements * birdie_dtype_size(e->dtype), (uint64_t)1 << 62);
    }
    return check_limits(f, bytes, operations);
}

size_t birdie_entry_count(const birdie_file *f) { return f->count; }

int birdie_entry_get(const birdie_file *f, size_t i, birdie_entry *out) {
    CHECK(f && out && i < f->count, ARGUMENT);
    const entry *e = &f->entries[i];
    *out = (birdie_entry){.name = e->name, .name_size = e->name_size, .kind = e->kind, .scheme = e->scheme};
    out->dtype = e->dtype;
    out->dimensions = e->dimensions;
    if (e->dimensions) memcpy(out->shape, e->shape, e->dimensions * sizeof *e->shape);
    out->target = e->kind == ALIAS || e->kind == MEMBER ? e->target : i;
    out->parameters = e->parameter;
    out->parameter_count = e->parameters;
    out->coders = e->coder;
    out->stream_count = e->streams;
    out->payload = f->data + e->offset;
    out->payload_size = e->payload;
    return 0;
}

uint64_t birdie_entry_stream(const birdie_file *f, size_t i, size_t stream) {
    return i < f->count && stream < f->entries[i].streams ? f->entries[i].length[stream] : 0;
}
