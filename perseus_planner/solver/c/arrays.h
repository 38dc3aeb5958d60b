/* What all kernels share: arrays as Python hands them over, and the larger and smaller of two numbers.
 *
 * `solver/kernels.py` says how Python calls a kernel. A struct has the fields of the NamedTuple of its name, in the same
 * order: a whole number is an int64_t, a float a double, an array one of the views below. tests/solver/test_kernels.py
 * holds headers and Python together. A kernel may not allocate: it changes arrays that its caller made, and returns a
 * number.
 */
#ifndef ARRAYS_H
#define ARRAYS_H

#include <stdbool.h>
#include <stdint.h>

/* Marks what Python may call; all else is hidden. */
#define KERNEL __attribute__((visibility("default")))

/* Of an array with one axis or more: its first number, how many entries the first axis has, and how many numbers an
 * entry is: the number at (row, column) of a table stands at row * width + column. */
typedef struct {
    int64_t *at;
    int64_t count;
    int64_t width;
} Integers;

typedef struct {
    int32_t *at;
    int64_t count;
    int64_t width;
} Indices;

typedef struct {
    double *at;
    int64_t count;
    int64_t width;
} Floats;

/* More than any flow or time, as in `solver/network.py`. */
static const int64_t UNLIMITED = (int64_t)1 << 62;

static inline int64_t least(int64_t one, int64_t other)
{
    return other < one ? other : one;
}

static inline int64_t most(int64_t one, int64_t other)
{
    return other > one ? other : one;
}

static inline double least_of(double one, double other)
{
    return other < one ? other : one;
}

static inline double most_of(double one, double other)
{
    return other > one ? other : one;
}

#endif
