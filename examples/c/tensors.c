/* Print the tensors of a .birdie file: name, dtype, shape, and the mean of its numbers.
 *
 *     birdie script --kind decoder --language c
 *     cc -std=c99 -O3 -ffp-contract=off -o tensors tensors.c birdie.c
 *     ./tensors model.birdie
 */
#include "birdie.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/* Read a file into memory; NULL if that fails. */
static char *read_file(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    char *data = NULL;
    if (file && !fseek(file, 0, SEEK_END)) {
        long end = ftell(file);
        rewind(file);
        *size = end > 0 ? (size_t)end : 0;
        data = malloc(*size + 1);
        if (data && fread(data, 1, *size, file) != *size) {
            free(data);
            data = NULL;
        }
    }
    if (file) fclose(file);
    return data;
}

int main(int count, char **arguments) {
    size_t size = 0;
    char *data = count == 2 ? read_file(arguments[1], &size) : NULL;
    if (!data) {
        fprintf(stderr, "usage: tensors MODEL.birdie\n");
        return 2;
    }
    birdie_file *file;
    int error = birdie_open(data, size, NULL, &file);
    if (!error) error = birdie_check(file);
    for (size_t i = 0; !error && i < birdie_count(file); i++) {
        birdie_tensor tensor;
        birdie_get(file, i, &tensor);
        printf("%.*s: %s (", (int)tensor.name_size, tensor.name, birdie_dtype_name(tensor.dtype));
        for (int k = 0; k < tensor.dimensions; k++) printf("%s%" PRIu64, k ? ", " : "", tensor.shape[k]);
        printf(")");
        const size_t bytes = (size_t)tensor.elements * sizeof(float);
        float *numbers = malloc(bytes + 1);
        error = numbers ? birdie_decode(file, i, BIRDIE_FLOAT32, numbers, bytes) : BIRDIE_ERROR_MEMORY;
        if (!error && tensor.elements) {
            double sum = 0;
            for (uint64_t k = 0; k < tensor.elements; k++) sum += numbers[k];
            printf(", mean %.6g", sum / (double)tensor.elements);
        }
        if (error == BIRDIE_ERROR_CONVERSION) error = 0; /* integers and others, which are not asked for here */
        free(numbers);
        printf("\n");
    }
    if (error) fprintf(stderr, "%s: %s\n", arguments[1], birdie_error_text(error));
    birdie_close(file);
    free(data);
    return error != 0;
}
