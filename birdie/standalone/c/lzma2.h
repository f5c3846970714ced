/* lzma2.h: decoder of a raw LZMA2 stream, in which a .birdie file keeps other files (docs/format.md, "Files"). */
#ifndef BIRDIE_LZMA2_H
#define BIRDIE_LZMA2_H

#include <stddef.h>
#include <stdint.h>

/* Unpack a stream that unpacks to exactly `out_size` bytes and ends where its bytes end. Return 1, or 0 if it does not:
 * then `out` holds anything. No memory is allocated; the output is the dictionary. */
int birdie_lzma2(const uint8_t *data, size_t size, uint8_t *out, size_t out_size);

#endif
