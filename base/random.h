/* Counter-based random numbers: a pure function of (seed, stream, counter), so that any element can be drawn by any
 * thread or rank in any order. The mixing function is SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014),
 * applied twice. */
#ifndef BASE_RANDOM_H
#define BASE_RANDOM_H

#include "base/host_device.h"

#include <math.h>
#include <stdint.h>

static HOST_DEVICE inline uint64_t random_mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static HOST_DEVICE inline uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t counter) {
    uint64_t key = random_mix(seed + 0x9e3779b97f4a7c15u * (stream + 1));
    return random_mix(key + 0x9e3779b97f4a7c15u * (counter + 1));
}

/* Uniform in [0, 1), 53 bits. */
static inline double random_uniform(uint64_t seed, uint64_t stream, uint64_t counter) {
    return (double)(random_bits(seed, stream, counter) >> 11) * 0x1p-53;
}

/* Standard normal, by Box-Muller from two draws. */
static inline double random_normal(uint64_t seed, uint64_t stream, uint64_t counter) {
    double u = 1.0 - random_uniform(seed, stream, 2 * counter); /* (0, 1]: log is finite */
    double v = random_uniform(seed, stream, 2 * counter + 1);
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}

#endif
