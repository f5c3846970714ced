/* lzma2.c: LZMA2 is a sequence of chunks, each bytes as they are or LZMA, of which the last is one byte 0.
 *
 * LZMA is a sequence of literals and matches. A range coder codes their bits, each by a probability of 11 bits that
 * follows what was coded; bits of numbers are the path down a binary tree of such probabilities.
 *
 *     control of a chunk     00 end      01 bytes, from here on the dictionary is empty      02 bytes
 *                            80 | resets << 5 | high bits of the size: LZMA
 *     resets                 0 none      1 probabilities      2 and settings (lc, lp, pb)    3 and the dictionary
 */
#include "lzma2.h"

#include <string.h>

enum {
    STATES = 12,        /* what the last literals and matches were */
    POSITIONS = 16,     /* of the position, modulo at most 2^4 */
    LITERAL = 0x300,    /* probabilities of a literal in a context: a tree, and one for each bit of the byte it is not */
    CONTEXTS = 16,      /* of literals, 2^(lc + lp) at most */
    LENGTH_CLASSES = 4, /* of distances, by the length of the match */
    DIRECT_SLOT = 14,   /* distance slots from here on have bits without a probability */
    SHORTEST = 2        /* match */
};

typedef uint16_t bit; /* probability of a 0, of 2048 */

typedef struct lengths {
    bit is_medium, is_high, low[POSITIONS][8], medium[POSITIONS][8], high[256];
} lengths;

typedef struct probabilities {
    bit is_match[STATES][POSITIONS];
    bit is_repeated[STATES], is_second[STATES], is_third[STATES], is_fourth[STATES]; /* not the distance before … */
    bit is_long[STATES][POSITIONS]; /* a repeated distance with a length, not a single byte */
    bit slots[LENGTH_CLASSES][64], special[128], align[16];
    bit literals[CONTEXTS * LITERAL];
    lengths match, repeated;
} probabilities;

typedef struct decoder {
    const uint8_t *data; /* what is left of the chunk */
    const uint8_t *data_end;
    uint32_t range, code;
    uint8_t *out; /* all of the output */
    size_t at, start, chunk_end;     /* in it: the next byte, where the dictionary begins, where the chunk ends */
    unsigned state, lc, lp, pb;
    size_t distances[4]; /* the last four, each less 1 */
    probabilities of;
} decoder;

static void normalize(decoder *d)
{
    if (d->range >> 24) return;
    d->range <<= 8;
    d->code = d->code << 8 | (d->data < d->data_end ? *d->data : 0);
    d->data++; /* beyond the end if the chunk is damaged, which its own end shows */
}

static unsigned get(decoder *d, bit *probability)
{
    normalize(d);
    uint32_t bound = (d->range >> 11) * *probability;
    if (d->code < bound) {
        d->range = bound;
        *probability = (bit)(*probability + ((2048 - *probability) >> 5));
        return 0;
    }
    d->range -= bound;
    d->code -= bound;
    *probability = (bit)(*probability - (*probability >> 5));
    return 1;
}

static unsigned tree(decoder *d, bit *probabilities, unsigned bits)
{
    unsigned node = 1;
    for (unsigned i = 0; i < bits; i++) node = node << 1 | get(d, &probabilities[node]);
    return node - (1u << bits);
}

/* The same, lowest bit first. */
static unsigned reversed(decoder *d, bit *probabilities, unsigned bits)
{
    unsigned node = 1, value = 0;
    for (unsigned i = 0; i < bits; i++) {
        unsigned one = get(d, &probabilities[node]);
        node = node << 1 | one;
        value |= one << i;
    }
    return value;
}

static uint32_t direct(decoder *d, unsigned bits)
{
    uint32_t value = 0;
    while (bits--) {
        normalize(d);
        d->range >>= 1;
        unsigned one = d->code >= d->range;
        if (one) d->code -= d->range;
        value = value << 1 | one;
    }
    return value;
}

static unsigned length(decoder *d, lengths *of, size_t position)
{
    if (!get(d, &of->is_medium)) return SHORTEST + tree(d, of->low[position], 3);
    if (!get(d, &of->is_high)) return SHORTEST + 8 + tree(d, of->medium[position], 3);
    return SHORTEST + 16 + tree(d, of->high, 8);
}

static size_t distance(decoder *d, unsigned length)
{
    unsigned class = length - SHORTEST < LENGTH_CLASSES ? length - SHORTEST : LENGTH_CLASSES - 1;
    unsigned slot = tree(d, d->of.slots[class], 6);
    if (slot < 4) return slot;
    unsigned bits = (slot >> 1) - 1;
    uint32_t first = (2 | (slot & 1)) << bits;
    if (slot < DIRECT_SLOT) return first + reversed(d, d->of.special + first - slot, bits);
    first += direct(d, bits - 4) << 4;
    return first + reversed(d, d->of.align, 4);
}

static void literal(decoder *d)
{
    size_t at = d->at - d->start;
    unsigned before = at ? d->out[d->at - 1] : 0;
    size_t context = ((at & ((1u << d->lp) - 1)) << d->lc) + (before >> (8 - d->lc));
    bit *probabilities = d->of.literals + LITERAL * context;
    unsigned node = 1;
    if (d->state >= 7) { /* after a match, the byte at its distance is what this one is not */
        unsigned match = d->out[d->at - d->distances[0] - 1], differs = 0;
        while (node < 0x100 && !differs) {
            unsigned expected = match >> 7 & 1, one = get(d, &probabilities[((1 + expected) << 8) + node]);
            match <<= 1;
            node = node << 1 | one;
            differs = one != expected;
        }
    }
    while (node < 0x100) node = node << 1 | get(d, &probabilities[node]);
    d->out[d->at++] = (uint8_t)node;
    d->state = d->state < 4 ? 0 : d->state < 10 ? d->state - 3 : d->state - 6;
}

/* Move one of the last distances to the front. */
static void use(decoder *d, int which)
{
    size_t distance = d->distances[which];
    memmove(d->distances + 1, d->distances, (size_t)which * sizeof distance);
    d->distances[0] = distance;
}

/* Decode a literal or a match; return 0 if it points outside. */
static int packet(decoder *d)
{
    probabilities *of = &d->of;
    unsigned state = d->state, count;
    size_t position = (d->at - d->start) & (((size_t)1 << d->pb) - 1);
    if (!get(d, &of->is_match[state][position])) {
        if (state >= 7 && d->distances[0] >= d->at - d->start) return 0;
        literal(d);
        return 1;
    }
    if (!get(d, &of->is_repeated[state])) {
        count = length(d, &of->match, position);
        use(d, 3);
        d->distances[0] = distance(d, count);
        d->state = state < 7 ? 7 : 10;
    } else if (get(d, &of->is_second[state])) {
        use(d, !get(d, &of->is_third[state]) ? 1 : !get(d, &of->is_fourth[state]) ? 2 : 3);
        count = length(d, &of->repeated, position);
        d->state = state < 7 ? 8 : 11;
    } else if (get(d, &of->is_long[state][position])) {
        count = length(d, &of->repeated, position);
        d->state = state < 7 ? 8 : 11;
    } else {
        count = 1;
        d->state = state < 7 ? 9 : 11;
    }
    size_t back = d->distances[0] + 1;
    if (back > d->at - d->start || count > d->chunk_end - d->at) return 0;
    for (; count; count--, d->at++) d->out[d->at] = d->out[d->at - back];
    return 1;
}

static void reset(decoder *d)
{
    bit *probability = (bit *)&d->of;
    for (size_t i = 0; i < sizeof d->of / sizeof(bit); i++) probability[i] = 1024;
    memset(d->distances, 0, sizeof d->distances);
    d->state = 0;
}

/* Decode a chunk of LZMA whose bytes are data … data_end. */
static int chunk(decoder *d)
{
    if (d->data_end - d->data < 5 || d->data[0]) return 0;
    d->range = 0xffffffff;
    d->code = (uint32_t)d->data[1] << 24 | (uint32_t)d->data[2] << 16 | (uint32_t)d->data[3] << 8 | d->data[4];
    d->data += 5;
    while (d->at < d->chunk_end) {
        if (d->data > d->data_end || !packet(d)) return 0;
    }
    normalize(d);
    return d->data == d->data_end && !d->code;
}

static unsigned pair(const uint8_t *data)
{
    return (unsigned)data[0] << 8 | data[1];
}

int birdie_lzma2(const uint8_t *data, size_t size, uint8_t *out, size_t out_size)
{
    decoder d = {.out = out};
    int has_dictionary = 0, has_settings = 0;
    const uint8_t *end = data + size;
    while (data < end && *data) {
        unsigned control = *data++, is_lzma = control >> 7, resets = is_lzma ? control >> 5 & 3 : 0;
        if (!is_lzma && control > 2) return 0;
        has_dictionary |= control == 1 || resets == 3;
        has_settings |= resets >= 2;
        if (!has_dictionary || (is_lzma && !has_settings)) return 0;
        size_t head = is_lzma ? 4 + (resets >= 2) : 2;
        if ((size_t)(end - data) < head) return 0;
        size_t unpacked = (is_lzma ? (size_t)(control & 31) << 16 : 0) + pair(data) + 1;
        size_t packed = is_lzma ? pair(data + 2) + 1 : unpacked;
        unsigned settings = resets >= 2 ? data[4] : 0;
        data += head;
        if (packed > (size_t)(end - data) || unpacked > out_size - d.at) return 0;
        if (control == 1 || resets == 3) d.start = d.at;
        if (resets >= 2) {
            d.lc = settings % 9;
            d.lp = settings / 9 % 5;
            d.pb = settings / 45;
            if (d.pb > 4 || d.lc + d.lp > 4) return 0;
        }
        if (resets) reset(&d);
        if (is_lzma) {
            d.data = data;
            d.data_end = data + packed;
            d.chunk_end = d.at + unpacked;
            if (!chunk(&d)) return 0;
        } else {
            memcpy(out + d.at, data, unpacked);
            d.at += unpacked;
        }
        data += packed;
    }
    return data + 1 == end && d.at == out_size;
}
