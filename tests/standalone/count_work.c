/* Decode the file on stdin and print how much work that took: how often each block of birdie.c
 * ran. birdie.c is compiled with -fsanitize-coverage=trace-pc, this file without. */
#include <stdio.h>
#include <stdlib.h>

#include "birdie.h"

static unsigned long long work;

void __sanitizer_cov_trace_pc(void);
void __sanitizer_cov_trace_pc(void) { work++; }

int main(void) {
    size_t size = 0, room = 1 << 24;
    unsigned char *data = malloc(room);
    for (size_t n; data && (n = fread(data + size, 1, room - size, stdin)) > 0;) size += n;
    birdie_file *file;
    int error = birdie_open(data, size, NULL, &file);
    if (!error) error = birdie_check(file);
    for (size_t i = 0; !error && i < birdie_array_count(file); i++) {
        birdie_array array;
        error = birdie_array_get(file, i, &array);
        void *out = error ? NULL : malloc(array.bytes + 1);
        if (out) error = birdie_array_decode(file, i, BIRDIE_OWN, out, array.bytes);
        free(out);
    }
    for (size_t i = 0; !error && i < birdie_count(file); i++) {
        birdie_tensor tensor;
        error = birdie_get(file, i, &tensor);
        if (!error && birdie_find(file, tensor.name, tensor.name_size) != i) return 2;
    }
    printf("%llu\n", work);
    birdie_close(file);
    free(data);
    return 0;
}
