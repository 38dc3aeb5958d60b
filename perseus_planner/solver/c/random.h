/* Random numbers: the Mersenne Twister MT19937 (Matsumoto and Nishimura 1998), drawn from as NumPy's `RandomState` does.
 *
 * Each search has a generator of its own with a fixed seed, so equal inputs give equal plans on every machine, and
 * threads do not share anything.
 */
#ifndef RANDOM_H
#define RANDOM_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

enum { WORDS = 624, SHIFT = 397 };

typedef struct {
    uint32_t word[WORDS];
    int used;        /* words that were drawn since the last twist */
    bool has_normal; /* normal numbers come in pairs: whether the second one is kept, and it */
    double normal;
} Random;

static inline void seed_random(Random *random, uint32_t seed)
{
    for (uint32_t i = 0; i < WORDS; i++) {
        random->word[i] = seed;
        seed = 1812433253u * (seed ^ (seed >> 30)) + i + 1;
    }
    random->used = WORDS;
    random->has_normal = false;
}

/* Mix one word anew from the highest bit of itself, the rest of the next one, and one further on. */
static inline uint32_t twisted(uint32_t word, uint32_t next, uint32_t further)
{
    uint32_t mixed = (word & 0x80000000u) | (next & 0x7fffffffu);
    return further ^ (mixed >> 1) ^ ((mixed & 1u) ? 0x9908b0dfu : 0u);
}

static inline uint32_t draw_word(Random *random)
{
    if (random->used == WORDS) {
        uint32_t *word = random->word;
        int i = 0;
        for (; i < WORDS - SHIFT; i++) {
            word[i] = twisted(word[i], word[i + 1], word[i + SHIFT]);
        }
        for (; i < WORDS - 1; i++) {
            word[i] = twisted(word[i], word[i + 1], word[i + SHIFT - WORDS]);
        }
        word[i] = twisted(word[i], word[0], word[SHIFT - 1]);
        random->used = 0;
    }
    uint32_t word = random->word[random->used];
    random->used++;
    word ^= word >> 11;
    word ^= (word << 7) & 0x9d2c5680u;
    word ^= (word << 15) & 0xefc60000u;
    word ^= word >> 18;
    return word;
}

/* Return a number from 0 to below 1, of 53 random bits. */
static inline double draw(Random *random)
{
    double high = draw_word(random) >> 5;
    double low = draw_word(random) >> 6;
    return (high * 67108864.0 + low) / 9007199254740992.0;
}

/* Return a whole number from 0 to below `count`, which is at most 2**32; draws nothing if only 0 is possible. */
static inline int64_t draw_below(Random *random, int64_t count)
{
    if (count <= 1) {
        return 0;
    }
    /* As many bits as the largest result has; what is too large is drawn again, so all are equally likely. */
    uint32_t mask = (uint32_t)(count - 1);
    mask |= mask >> 1;
    mask |= mask >> 2;
    mask |= mask >> 4;
    mask |= mask >> 8;
    mask |= mask >> 16;
    int64_t drawn;
    do {
        drawn = draw_word(random) & mask;
    } while (drawn >= count);
    return drawn;
}

/* Return a number of the standard normal distribution, by the polar method (Marsaglia and Bray 1964). */
static inline double draw_normal(Random *random)
{
    if (random->has_normal) {
        random->has_normal = false;
        return random->normal;
    }
    double first;
    double second;
    double square;
    do {
        first = 2.0 * draw(random) - 1.0;
        second = 2.0 * draw(random) - 1.0;
        square = first * first + second * second;
    } while (square >= 1.0 || square == 0.0);
    double scale = sqrt(-2.0 * log(square) / square);
    random->normal = scale * first;
    random->has_normal = true;
    return scale * second;
}

#endif
